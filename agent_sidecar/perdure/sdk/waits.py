"""Waits of one attempt: registered, resolved, and given back with the pod when nothing else is at work (W2, W3).

An open wait is a future here and a row at the gateway. Whenever strands come to rest or a wait is opened, a *settle* pass is scheduled a
few turns of the loop later, so that tasks which start together are all seen. It registers what is new; if every open operation is a wait
and no hold time is left, it gives the pod back. One wait that is alone registers and suspends in one operation.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from perdure import protocol
from perdure.protocol import WaitAnswer, WaitBegin, WaitOutcome
from perdure.sdk.errors import InputChanged, ResultUndecodable, RunCancelled
from perdure.sdk.here import Here
from perdure.sdk.identity import Claim
from perdure.sdk.strands import Group, Strand

if TYPE_CHECKING:
    from perdure.sdk.execution import Execution

_DEBOUNCE_TURNS: Final = 8
_MARGIN_SECONDS: Final = 1.0
"""By how much what makes the agent give a wait up may come later than the first time."""
_outcome_decoder = msgspec.json.Decoder(WaitOutcome)


class _Wait:
    """``begun`` is the loop's time. Before ``listens_at`` it is not registered; before ``hold_until`` it keeps the pod."""

    __slots__ = ("begun", "body", "future", "hold_until", "listens_at", "registered", "strand")

    def __init__(
        self, body: WaitBegin, future: asyncio.Future[WaitOutcome], strand: Strand, *, begun: float, silent: float, hold: float
    ) -> None:
        self.body = body
        self.future = future
        self.strand = strand
        self.begun = begun
        self.listens_at = begun + silent
        self.hold_until = begun + max(silent, hold)
        self.registered = False


class Waits:
    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._open: dict[str, _Wait] = {}
        self._abandoned: dict[str, protocol.Abandoned] = {}
        self._scheduled = False
        self._settling: asyncio.Task[None] | None = None
        self._again = False

    async def wait(self, here: Here, claim: Claim, body: WaitBegin, hold_seconds: float) -> WaitOutcome:
        """The outcome of a wait: from the journal, or when it comes. ``body.fingerprint`` must fit what was registered before.

        One that an earlier attempt gave up is awaited unregistered for as long as it was then: it will be given up again, by what is done
        meanwhile, and must not take the pod or a signal from what comes after it. If it is not, it is registered again.

        Raises InputChanged, RunCancelled, Refused."""
        await self._execution.gate(here.strand)
        known, silent = self._execution.journal.get(claim.key), 0.0
        if known is not None:
            if known.fingerprint is not None and body.fingerprint is not None and known.fingerprint != body.fingerprint:
                raise InputChanged(f"wait {claim.key} was recorded with other conditions; give the new one a key= of its own")
            if known.state == "abandoned":
                silent = msgspec.json.decode(known.output, type=float) + _MARGIN_SECONDS
            elif known.state != "open":
                recorded = _recorded(await self._execution.fetched.entry(known))
                return await self._execution.fetched.outcome(claim.key, recorded)
        with claim.in_flight():
            loop = self._execution.loop
            wait = _Wait(body, loop.create_future(), here.strand, begun=loop.time(), silent=silent, hold=hold_seconds)
            self._open[body.key] = wait
            self._abandoned.pop(body.key, None)
            wait.strand.enter()
            self.nudge()
            try:
                outcome = await self._execution.fetched.outcome(claim.key, await wait.future)
            except BaseException:
                # The gateway does not see it: a signal must not go to a wait that nobody awaits.
                self._abandoned[body.key] = protocol.Abandoned(key=body.key, seconds=round(loop.time() - wait.begun, 3))
                raise
            finally:
                self._close(body.key)
        self._execution.journal[claim.key] = protocol.JournalEntry(
            key=claim.key,
            kind="wait",
            name=body.name,
            state=outcome.status,
            seq=self._execution.last_seq,
            fingerprint=body.fingerprint,
            output=msgspec.Raw(protocol.encode_json(outcome)),
        )
        return outcome

    def resolve(self, outcomes: dict[str, WaitOutcome]) -> None:
        for key, outcome in outcomes.items():
            wait = self._close(key)
            if wait is not None and not wait.future.done():
                wait.future.set_result(outcome)

    def cancel(self) -> None:
        for key in list(self._open):
            self._fail(key, RunCancelled(f"run {self._execution.context.name} was asked to cancel"))

    def stop(self, group: Group) -> None:
        """A gather has failed: its branches wait no longer."""
        for key, wait in list(self._open.items()):
            if wait.strand.within(group):
                self._fail(key, asyncio.CancelledError("another branch of this gather has failed"))

    def register_again(self) -> None:
        """After a reconnect: an outcome may have been pushed to nobody, and registering a second time answers it."""
        for wait in self._open.values():
            wait.registered = False
        self.nudge()

    def nudge(self) -> None:
        """Looks soon whether the pod can be given back."""
        if self._open and not self._scheduled:
            self._scheduled = True
            self._execution.loop.call_soon(self._debounce, _DEBOUNCE_TURNS)

    def _debounce(self, turns: int) -> None:
        if turns:
            self._execution.loop.call_soon(self._debounce, turns - 1)
            return
        self._scheduled = False
        if self._settling is None:
            self._settling = self._execution.loop.create_task(self._settle())
        else:
            self._again = True

    async def _settle(self) -> None:
        try:
            while self._open and not self._execution.over:
                self._again = False
                if not await self._settle_once() and not self._again:
                    return
        finally:
            self._settling = None

    async def _settle_once(self) -> bool:
        """True when something was sent, so that another look is due."""
        now = self._execution.loop.time()
        new = [wait for wait in self._open.values() if not wait.registered and wait.listens_at <= now]
        idle = self._idle()
        if idle and len(new) == len(self._open) == 1:
            await self._register(new[0], suspend=True)
        elif new:
            await asyncio.gather(*(self._register(wait, suspend=False) for wait in new))
        elif idle:
            await self._suspend(list(self._open))
        else:
            return False
        return True

    def _idle(self) -> bool:
        """Whether every open operation is a wait and none holds the pod any more. A hold that is left schedules the next look."""
        if self._execution.strands.running:
            return False
        loop = self._execution.loop
        held_until = max(wait.hold_until for wait in self._open.values())
        if held_until <= loop.time():
            return True
        loop.call_at(held_until, self.nudge)
        return False

    async def _register(self, wait: _Wait, *, suspend: bool) -> None:
        wait.registered = True
        wait.body.suspend = suspend
        try:
            wait.body.slices = self._execution.session.take()
            wait.body.abandoned = self._take_abandoned()
            answer = await self._execution.call(wait.body, WaitAnswer)
        except (Exception, RunCancelled) as error:  # noqa: BLE001  # handed on to the one who waits
            self._not_told(wait.body.abandoned)
            self._fail(wait.body.key, error)
            return
        await self._answered(answer)

    async def _suspend(self, keys: list[str]) -> None:
        body = protocol.Suspend(waits=keys, abandoned=self._take_abandoned(), slices=self._execution.session.take())
        try:
            answer = await self._execution.call(body, WaitAnswer)
        except (Exception, RunCancelled) as error:  # noqa: BLE001  # handed on to those who wait
            self._not_told(body.abandoned)
            for key in keys:
                self._fail(key, error)
            return
        await self._answered(answer)

    async def _answered(self, answer: WaitAnswer) -> None:
        if answer.status == "suspended":
            await self._execution.suspended()
        self.resolve(answer.outcomes)

    def _take_abandoned(self) -> list[protocol.Abandoned]:
        """To be told with the next operation about waits."""
        taken, self._abandoned = list(self._abandoned.values()), {}
        return taken

    def _not_told(self, abandoned: list[protocol.Abandoned]) -> None:
        self._abandoned = {wait.key: wait for wait in abandoned} | self._abandoned

    def _close(self, key: str) -> _Wait | None:
        """The strand goes on from this moment, before its task wakes: otherwise it would look idle in between."""
        wait = self._open.pop(key, None)
        if wait is not None:
            wait.strand.leave()
        return wait

    def _fail(self, key: str, error: BaseException) -> None:
        wait = self._close(key)
        if wait is not None and not wait.future.done():
            if isinstance(error, asyncio.CancelledError):
                wait.future.cancel(str(error))
            else:
                wait.future.set_exception(error)


def _recorded(entry: protocol.JournalEntry) -> WaitOutcome:
    try:
        return _outcome_decoder.decode(entry.output)
    except msgspec.MsgspecError as error:
        raise ResultUndecodable(f"the recorded outcome of {entry.key} is not one: {error}") from error
