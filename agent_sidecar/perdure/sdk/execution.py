"""One attempt of one run in this process: the journal it knows, its operations on their way, and how it may end.

Every durable operation passes :meth:`Execution.gate` when it begins and :meth:`Execution.call` when it commits. An attempt ends early in
two ways that never raise in agent code: the run was suspended, or the lease was lost. Then the operation at hand simply stays pending
(*parked*), and the process ends. Receipts of tools that are already at work are the one thing still sent after a lease was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeVar

import msgspec

from perdure import protocol
from perdure.sdk.errors import InvalidInput, PerdureError, Refused, RunCancelled, SidecarUnavailable
from perdure.sdk.exits import DONE, LEASE_LOST, Exits
from perdure.sdk.fetching import Fetching
from perdure.sdk.here import HERE, Here
from perdure.sdk.identity import Scope
from perdure.sdk.session import Session
from perdure.sdk.strands import Strand, Strands
from perdure.sdk.threads import Threads
from perdure.sdk.transport import Transport
from perdure.sdk.waits import Waits

RECEIPT_GRACE_SECONDS: Final = 5.0
"""How long a process that has lost its lease lives on for the receipts of tools that it is executing."""
YIELD_SECONDS: Final = 5.0
"""How long a process that was told to end tries to give its run back."""

InputPolicy = Literal["reuse", "redo", "fail"]
A = TypeVar("A", bound=msgspec.Struct)
T = TypeVar("T")

_log = logging.getLogger("perdure")
_encode = msgspec.json.Encoder().encode
_context_decoder = msgspec.json.Decoder(protocol.RunContext)
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}
_ATTEMPT_OVER: Final = frozenset({"lease-lost", "not-running", "run-finished", "run-released", "deadline-exceeded"})


@dataclass(frozen=True, slots=True)
class Options:
    """What an agent declares for all of its run. ``hold_seconds``: how long a wait keeps the pod before it is given back."""

    hold_seconds: float = 0.0
    on_input_change: InputPolicy = "reuse"


@dataclass(slots=True)
class _Deferred:
    """An operation to send before the next one. ``failure_of``: key of a failed step, recorded only if the agent goes on after it."""

    body: msgspec.Struct
    failure_of: str | None = None


class ResumePoint(msgspec.Struct):
    """The cursor of a checkpoint on the wire: the agent's own ``data`` and the root ordinals."""

    ordinals: dict[str, int] = {}
    data: msgspec.Raw = protocol.NULL


class Execution:
    """Lives on one event loop; everything but ``threads.block_on`` is called there."""

    def __init__(self, context: bytes, transport: Transport, exits: Exits, options: Options = Options()) -> None:
        self.context = read_context(context)
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.journal = {entry.key: entry for entry in self.context.journal}
        self.last_seq = self.context.last_seq
        self.resume_point = self._read_resume_point()
        self.root = Scope(counts=self.resume_point.ordinals)
        self.session = Session(self.context.slices, self._slice_started_fresh)
        self.fetched = Fetching(self)
        self.threads = Threads(self.loop)
        self.waits = Waits(self)
        self.strands = Strands(self.waits.nudge)
        self.cancelled = self.context.cancel_requested
        self.over = False
        self.probe: Callable[[str], None] = _nothing  # told the key of each tool call whose function has returned
        self._stop = asyncio.Event()
        self._exits = exits
        self._transport = transport
        self._deferred: list[_Deferred] = []
        self._receipts = 0
        self._leave: Callable[[], None] = _nothing_to_do
        self._background: set[asyncio.Task[Any]] = set()
        self._parked: list[asyncio.Future[None]] = []
        transport.listen(self)

    # ------------------------------------------------------------------------------------------- operations

    async def gate(self, strand: Strand) -> None:
        """Passes when a new operation may begin. Raises RunCancelled; CancelledError in a branch whose gather has failed."""
        if self.over:
            await self.park()
        self.check()
        if strand.stopped:
            raise asyncio.CancelledError("another branch of this gather has failed")

    def check(self) -> None:
        """Raises RunCancelled when the run was asked to cancel."""
        if self.cancelled:
            raise RunCancelled(f"run {self.context.name} was asked to cancel")

    async def call(self, body: msgspec.Struct, answer: type[A], *, receipt: bool = False) -> A:
        """Commits one operation. Slices that it carries count as sent only if it is accepted. ``receipt``: passes after a lost lease.

        Raises Refused, RunCancelled. Stays pending for ever when the attempt is over."""
        if self._deferred and not receipt:
            await self._flush_deferred()
        if self.over and not receipt:
            await self.park()
        answered = await self._send(body, answer, receipt=receipt)
        if self.over and not receipt:
            await self.park()
        return answered

    async def _send(self, body: msgspec.Struct, answer: type[A], *, receipt: bool = False) -> A:
        try:
            data = await self._answer(_encode(body))
        except Refused as refusal:
            self.session.not_committed(getattr(body, "slices", ()))
            code = refusal.problem_code
            if code in _ATTEMPT_OVER and not receipt:
                self.on_lost(code)
                await self.park()
            if code == "cancel-requested":
                self.cancel()
                self.check()
            raise
        except SidecarUnavailable as error:
            self.on_lost(str(error))
            if receipt:
                raise
            await self.park()
        decoder = _decoders.get(answer)
        if decoder is None:
            decoder = _decoders[answer] = msgspec.json.Decoder(answer)
        try:
            decoded: A = decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise PerdureError(f"the answer to {type(body).__name__} cannot be read by this version: {error}") from error
        self.last_seq = max(self.last_seq, getattr(decoded, "seq", 0))
        return decoded

    async def _answer(self, body: bytes) -> bytes:
        """Sees a commit through: a cancellation of this task that comes meanwhile is delivered after the answer. Otherwise nobody would
        know what was committed, or have the token that was granted."""
        answer = asyncio.ensure_future(self._transport.call(body))
        interrupted = False
        while not answer.done():
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                interrupted = True
            except (Refused, SidecarUnavailable):
                break
        task = asyncio.current_task()
        if interrupted and task is not None:
            task.uncancel()
            task.cancel()
        return answer.result()

    def defer(self, body: msgspec.Struct, *, failure_of: str | None = None) -> None:
        """Sends this before the next operation. ``failure_of``: drop it if the attempt fails first, so that the next one tries again."""
        self._deferred.append(_Deferred(body, failure_of))

    def forget_failures(self, below: str = "") -> None:
        """What failed under this scope is about to be tried again: it is not an outcome."""
        self._deferred = [item for item in self._deferred if item.failure_of is None or not item.failure_of.startswith(below)]

    async def _flush_deferred(self) -> None:
        while self._deferred:
            item = self._deferred.pop(0)
            try:
                await self._send(item.body, protocol.Recorded)
            except Refused as refusal:
                _log.warning("%s was not recorded: %s", type(item.body).__name__, refusal)

    def acted_after(self, seq: int) -> bool:
        """Whether an earlier attempt did anything after this point of the log."""
        done = any(entry.seq > seq for entry in self.context.journal if entry.kind != "wait" or entry.state == "open")
        return done or self.context.ledger_seq > seq or any(entry.seq > seq for entry in self.context.ledger)

    def notice(self, kind: str, data: dict[str, object]) -> None:
        """A warning for the log of the run and of this process; sent with the next operation."""
        _log.warning("%s %s", kind, data)
        self.defer(protocol.EventAppend(kind=kind, data=msgspec.Raw(_encode(data))))

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Lets something finish that nobody waits for."""
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s", error)

    async def pause(self, seconds: float) -> None:
        """Waits in this process, between tries. Raises RunCancelled as soon as a cancel comes."""
        if await self.stops_within(seconds):
            await self.park()

    async def stops_within(self, seconds: float) -> bool:
        """The same for who has something to say before the process ends: True as soon as the attempt is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        if not self.over:
            self.check()
        return self.over

    @contextmanager
    def here(self, scope: Scope, strand: Strand, step: str | None) -> Iterator[None]:
        before = HERE.get()
        HERE.set(Here(self, scope, strand, step))
        try:
            yield
        finally:
            # Not by a token: what a simulated death has left behind is collected in any context.
            HERE.set(before)

    # ------------------------------------------------------------------------------------------- ends

    async def park(self) -> NoReturn:
        """Never returns and never raises: the process is about to end. The future is kept, or the collector would end the task."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._parked.append(future)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(future)

    async def suspended(self) -> NoReturn:
        """The run has let this pod go: the process ends here."""
        self.over = True
        self._exits.leave(DONE)
        await self.park()

    def abandon(self, code: int) -> None:
        """Ends the process: at once, or when the tools that are at work have sent their receipts, or the grace for that is over."""
        self._end(lambda: self._exits.leave(code))

    def give_back(self, code: int) -> None:
        """The same, but for the run, which goes on elsewhere: that this process was told to end is no failure of the attempt."""
        self._end(lambda: self.background(self._yield(code)))

    def _end(self, leave: Callable[[], None]) -> None:
        if self.over:
            return
        self.over = True
        self._leave = leave
        self._stop.set()
        if self._receipts == 0:
            self._leave_once()
        else:
            self.loop.call_later(RECEIPT_GRACE_SECONDS, self._leave_once)

    def _leave_once(self) -> None:
        leave, self._leave = self._leave, _nothing_to_do
        leave()

    async def _yield(self, code: int) -> None:
        try:
            async with asyncio.timeout(YIELD_SECONDS):
                await self._transport.call(_encode(protocol.Finish(outcome="yielded")))
        except TimeoutError:
            _log.warning("the run could not be given back: no answer")
        except PerdureError as error:
            _log.warning("the run could not be given back: %s", error)
        self._exits.leave(code)

    @contextmanager
    def receipt_due(self) -> Iterator[None]:
        """A tool is executing: its receipt must get out even if the lease is lost meanwhile."""
        self._receipts += 1
        try:
            yield
        finally:
            self._receipts -= 1
            if self.over and self._receipts == 0:
                self._leave_once()

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._stop.set()
            self.waits.cancel()

    # ------------------------------------------------------------------------------------------- what the transport tells

    def on_poke(self, poke: protocol.Poke) -> None:
        self.waits.resolve(poke.outcomes)
        if poke.cancel:
            self.cancel()

    def on_lost(self, reason: str) -> None:
        if not self.over:
            _log.error("the lease of run %s is lost (%s): this attempt ends", self.context.name, reason)
        self.abandon(LEASE_LOST)

    def on_reconnected(self) -> None:
        self.waits.register_again()

    # ------------------------------------------------------------------------------------------- resuming

    def _read_resume_point(self) -> ResumePoint:
        checkpoint = self.context.checkpoint
        if checkpoint is None:
            return ResumePoint()
        try:
            return msgspec.json.decode(checkpoint.cursor, type=ResumePoint)
        except msgspec.MsgspecError:
            return ResumePoint(data=checkpoint.cursor)

    def _slice_started_fresh(self, name: str, stored: int, declared: int, reason: str) -> None:
        self.notice("SliceStartedFresh", {"slice": name, "storedVersion": stored, "version": declared, "reason": reason})


def read_context(data: bytes) -> protocol.RunContext:
    try:
        return _context_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"the sidecar sent a run context that this version cannot read: {error}") from error


def _nothing(_: str) -> None: ...


def _nothing_to_do() -> None: ...
