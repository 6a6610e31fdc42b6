"""``Run``: what an agent is given to work with. Asynchronous; :class:`SyncRun` in ``sync_run`` is the same for synchronous agents."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from datetime import datetime
from typing import Any, Literal, TypeVar, cast, overload

import msgspec

from perdure import protocol
from perdure.sdk.calls import dispatch
from perdure.sdk.children import Child, ChildResult, JoinMode, Spawning, join, spawning
from perdure.sdk.codec import codec_of, encode
from perdure.sdk.conditions import Condition, Signal, Waited, at, decoded, fired, signal, timer, typed, until
from perdure.sdk.durations import Duration, in_seconds
from perdure.sdk.errors import InvalidDeclaration, PerdureError, Refused, ResultUndecodable, WaitTimedOut
from perdure.sdk.execution import Execution
from perdure.sdk.here import HERE, Here
from perdure.sdk.session import Session

T = TypeVar("T")
CheckpointType = Literal["step", "phase", "pre_side_effect"]

_HELD_SLEEP_SECONDS = 1.0
"""A sleep up to this long keeps its pod: to give it back and get another takes about as long."""


class RunLog(logging.LoggerAdapter[logging.Logger]):
    """Logger ``perdure.run`` whose records carry ``run_id``, ``attempt``, ``epoch`` and the ``step`` that wrote them (L9)."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        here = HERE.get()
        kwargs["extra"] = {**(self.extra or {}), "step": here.step if here else None, **(kwargs.get("extra") or {})}
        return msg, kwargs


class RunFacts:
    """What does not change during an attempt. ``attempt`` starts at 1; ``reasons`` says why this lease was granted."""

    def __init__(self, execution: Execution) -> None:
        context = execution.context
        self._execution = execution
        self.id = context.run_id
        self.name = context.name
        self.namespace = context.namespace
        self.pool = context.pool
        self.epoch = context.epoch
        self.attempt = context.attempt
        self.objective = context.objective
        self.parent = context.parent
        self.root = context.root
        self.deadline = None if context.deadline is None else msgspec.convert(context.deadline, datetime)
        self.reasons = tuple(context.reasons)
        self.spec: dict[str, Any] = msgspec.json.decode(context.spec) or {}
        self.log = RunLog(
            logging.getLogger("perdure.run"),
            {"run_id": context.run_id, "run": context.name, "attempt": context.attempt, "epoch": context.epoch},
        )

    @property
    def session(self) -> Session:
        return self._execution.session

    @property
    def cancel_requested(self) -> bool:
        return self._execution.cancelled

    def check(self) -> None:
        """Raises RunCancelled when the run was asked to cancel. For long computations between operations."""
        self._execution.check()

    @overload
    def cursor(self) -> Any: ...
    @overload
    def cursor(self, kind: type[T]) -> T | None: ...
    def cursor(self, kind: Any = Any) -> Any:
        """The cursor of the checkpoint that this attempt goes on from, None without one. Raises ResultUndecodable."""
        data = self._execution.resume_point.data
        if data == protocol.NULL:
            return None
        try:
            return codec_of(kind).decode(data)
        except ValueError as error:
            raise ResultUndecodable(f"the cursor of the checkpoint is no {kind}: {error}") from error

    def _here(self) -> Here:
        here = HERE.get()
        if here is None or here.execution is not self._execution:
            raise PerdureError(
                "this code has lost the context of its run; start threads with contextvars.copy_context().run, or use asyncio.to_thread"
            )
        return here


class Run(RunFacts):
    """Durable operations of a run. Each has a redo identity; ``key=`` names it where calls of one kind and name run at once."""

    async def sleep(self, duration: Duration, *, key: str | None = None) -> None:
        """Waits without a pod, unless it is a second or less. Counted from the first time that this line is reached."""
        seconds = in_seconds(duration)
        hold = seconds + 1.0 if seconds <= _HELD_SLEEP_SECONDS else None
        await until(self._here(), [timer(seconds).condition()], name="", key=key, kind="sleep", hold=hold)

    async def sleep_until(self, due: datetime, *, key: str | None = None) -> None:
        await until(self._here(), [at(due).condition()], name="", key=key, kind="sleep")

    @overload
    async def wait_signal(
        self, name: str, *, timeout: Duration | None = None, key: str | None = None, hold: Duration | None = None
    ) -> Signal[Any]: ...
    @overload
    async def wait_signal(
        self, name: str, kind: type[T], *, timeout: Duration | None = None, key: str | None = None, hold: Duration | None = None
    ) -> Signal[T]: ...
    async def wait_signal(
        self, name: str, kind: Any = Any, *, timeout: Duration | None = None, key: str | None = None, hold: Duration | None = None
    ) -> Signal[Any]:
        """The next signal of this name, its payload read as ``kind``; one that came before the wait counts. A signal whose payload is no
        ``kind`` is dropped with the event SignalRejected, and the wait goes on. ``hold``: how long the pod is kept. Raises WaitTimedOut,
        RunCancelled."""
        wanted = signal(name, kind)
        codecs = {0: wanted.codec}
        outcome = await until(self._here(), [wanted.condition()], name=name, timeout=timeout, key=key, hold=hold, codecs=codecs)
        item = outcome.fired[0]
        return Signal(name=item.name, id=item.id, at=item.at, payload=decoded(wanted.codec, item))

    async def wait(
        self,
        *conditions: Condition,
        mode: Literal["any", "all"] = "any",
        timeout: Duration | None = None,
        name: str | None = None,
        key: str | None = None,
        hold: Duration | None = None,
    ) -> Waited:
        """Waits for any or all of ``signal(…)``, ``timer(…)``, ``at(…)`` and children. A timeout is a result here, not an error. A signal
        that is not of its type is dropped, as by ``wait_signal``: the wait goes on, with its times and with the signals that fit."""
        if not conditions:
            raise InvalidDeclaration("run.wait needs something to wait for")
        on = [condition.condition() for condition in conditions]
        name = name or "+".join(part.kind if part.kind == "timer" else f"{part.kind}.{part.name}" for part in on[:3])[:200]
        try:
            outcome = await until(self._here(), on, mode=mode, name=name, timeout=timeout, key=key, hold=hold, codecs=typed(conditions))
        except WaitTimedOut:
            return Waited(timed_out=True, fired=())
        return Waited(timed_out=False, fired=fired(conditions, outcome))

    def spawn(
        self,
        *,
        pool: str = "",
        input: object = None,  # the name that a run's spec has for it
        objective: str = "",
        summary: str = "",
        spec: Mapping[str, Any] | None = None,
        policy: Literal["cancel", "detach", "fail_parent"] = "cancel",
        recording: Literal["Resource", "StoreOnly"] = "Resource",
        result: type[T] | Any = Any,
        key: str | None = None,
    ) -> Spawning[T]:
        """Starts a child run; await it for the child, or ``.join()`` it. ``pool`` empty: this run's own. ``result``: type of its output.
        ``policy``: what becomes of the child when this run ends. ``recording``: StoreOnly spares the cluster a resource for it; for wide
        fan-out. Raises Refused, InputChanged, RunCancelled."""
        return spawning(
            self._here(),
            pool=pool,
            input=input,
            objective=objective,
            summary=summary,
            spec=spec,
            policy=policy,
            recording=recording,
            result=result,
            key=key,
        )

    async def join(
        self, children: Iterable[Child[T]], *, mode: JoinMode = "all", timeout: Duration | None = None, key: str | None = None
    ) -> list[ChildResult[T]]:
        """Waits for children: ``all``, ``any``, or until the ``first_failure``. Raises WaitTimedOut, RunCancelled."""
        return await join(children, mode=mode, timeout=timeout, key=key)

    async def checkpoint(self, *, type: CheckpointType = "step", cursor: object = None) -> None:  # the protocol's name
        """Saves the session and marks where the next attempt goes on.

        It is a promise: started again, the code goes on from the session or from ``run.cursor()``, and does not call again what came
        before. Code that runs straight through needs no checkpoint; every step is one. A save that fails warns, and the run goes on (C7).
        """
        here = self._here()
        await dispatch(self._execution, lambda: self._checkpoint(here, type, cursor), blocking=False)

    async def _checkpoint(self, here: Here, type: CheckpointType, cursor: object) -> None:  # the protocol's name
        execution = self._execution
        await execution.gate(here.strand)
        point = {"ordinals": execution.root.counts(), "data": msgspec.Raw(encode(cursor, "cursor of the checkpoint"))}
        body = protocol.CheckpointSave(
            type=type, cursor=msgspec.Raw(protocol.encode_json(point)), covers_seq=execution.last_seq, slices=execution.session.take()
        )
        try:
            with here.strand.busy():
                await execution.call(body, protocol.Recorded)
        except Refused as refusal:
            execution.notice("CheckpointFailed", {"type": type, "reason": str(refusal)})

    async def append(self, kind: str, data: object = None, *, expected_seq: int | None = None) -> int:
        """Appends an event to the run's log and gives its sequence number. Code outside steps appends it again after a restart.
        ``expected_seq``: refuse unless the log ends there."""
        here = self._here()
        body = protocol.EventAppend(kind=kind, data=msgspec.Raw(encode(data, f"event {kind}")), expected_seq=expected_seq)
        return cast("int", await dispatch(self._execution, lambda: self._append(here, body), blocking=False))

    async def _append(self, here: Here, body: protocol.EventAppend) -> int:
        await self._execution.gate(here.strand)
        with here.strand.busy():
            return (await self._execution.call(body, protocol.Recorded)).seq


def inside() -> Run | None:
    """The run that this code is running in, None outside of any."""
    here = HERE.get()
    return None if here is None else Run(here.execution)
