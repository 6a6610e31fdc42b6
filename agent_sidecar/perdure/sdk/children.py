"""Children: runs that this run starts, and waits for (V1, V2)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec

from perdure import protocol
from perdure.sdk.calls import dispatch
from perdure.sdk.codec import Codec, codec_of, encode, fingerprint
from perdure.sdk.conditions import until
from perdure.sdk.durations import Duration
from perdure.sdk.errors import ChildFailed, InputChanged, InvalidDeclaration, ResultUndecodable
from perdure.sdk.here import HERE, Here
from perdure.sdk.identity import Claim

T = TypeVar("T")
JoinMode = Literal["any", "all", "first_failure"]


@dataclass(frozen=True, slots=True)
class ChildResult(Generic[T]):
    """How a child ended. ``status`` is its final state: Succeeded, Failed or Cancelled; ``reason`` says more, e.g. RetriesExhausted."""

    child: str
    status: str
    reason: str
    error: protocol.ErrorInfo | None
    _data: bytes
    _codec: Codec[Any]

    @property
    def output_ref(self) -> str | None:
        """Names the output without carrying it: to hand it on to a tool or another run. None unless it succeeded."""
        return f"run:{self.child}" if self.succeeded else None

    @property
    def succeeded(self) -> bool:
        return self.status == "Succeeded"

    @property
    def result(self) -> T:
        """Raises ChildFailed, ResultUndecodable."""
        if not self.succeeded:
            raise ChildFailed(self.child, self.status, self.error)
        try:
            return cast("T", self._codec.decode(self._data))
        except ValueError as error:
            raise ResultUndecodable(f"the result of child {self.child} is no {self._codec.type}: {error}") from error


class Child(Generic[T]):
    """A started child. ``id`` is its run id."""

    def __init__(self, here: Here, run_id: str, codec: Codec[Any]) -> None:
        self._here = here
        self._codec = codec
        self.id = run_id

    def condition(self) -> protocol.Condition:
        return protocol.Condition(kind="child_done", name=self.id)

    async def join(self, *, timeout: Duration | None = None, key: str | None = None) -> ChildResult[T]:
        """Waits for its end, in any state. Raises WaitTimedOut, RunCancelled."""
        return (await join([self], timeout=timeout, key=key))[0]

    def _ended(self, payload: protocol.Fired) -> ChildResult[T]:
        try:
            done = msgspec.json.decode(payload.payload, type=protocol.ChildResult)
        except msgspec.MsgspecError as error:
            raise ResultUndecodable(f"what was recorded of child {self.id} cannot be read: {error}") from error
        return ChildResult(self.id, done.status, done.reason, done.error, bytes(done.output), self._codec)


class Spawning(Generic[T]):
    """What ``run.spawn`` gives: await it for the :class:`Child`, or ``.join()`` it at once."""

    def __init__(self, here: Here, claim: Claim, body: protocol.Spawn, codec: Codec[Any]) -> None:
        self._here = here
        self._claim = claim
        self._body = body
        self._codec = codec

    def __await__(self) -> Generator[Any, Any, Child[T]]:
        return cast("Generator[Any, Any, Child[T]]", dispatch(self._here.execution, self._start, blocking=False).__await__())

    async def join(self, *, timeout: Duration | None = None, key: str | None = None) -> ChildResult[T]:
        """Starts the child and waits for its end. Raises WaitTimedOut, RunCancelled, Refused."""
        return await (await self).join(timeout=timeout, key=key)

    async def _start(self) -> Child[T]:
        """V1: a redo finds the same child, from the journal, or at the gateway by the same key."""
        execution, strand = self._here.execution, cast("Here", HERE.get()).strand
        await execution.gate(strand)
        known = execution.journal.get(self._claim.key)
        if known is not None and known.fingerprint not in (None, self._body.fingerprint):
            raise InputChanged(f"{self._claim.key} was started with another pool, objective or input; give the new child a key= of its own")
        if known is None:
            with self._claim.in_flight(), strand.busy():
                spawned = await execution.call(self._body, protocol.Spawned)
            known = protocol.JournalEntry(
                key=self._claim.key,
                kind="spawn",
                name=self._body.pool,
                state="succeeded",
                seq=execution.last_seq,
                fingerprint=self._body.fingerprint,
                output=msgspec.Raw(protocol.encode_json(spawned)),
            )
            execution.journal[known.key] = known
        return Child(self._here, msgspec.json.decode(known.output, type=protocol.Spawned).child, self._codec)


def spawning(
    here: Here,
    *,
    pool: str,
    input: object,  # the name that a run's spec has for it
    objective: str,
    summary: str,
    spec: Mapping[str, Any] | None,
    policy: Literal["cancel", "detach", "fail_parent"],
    recording: Literal["Resource", "StoreOnly"],
    result: Any,
    key: str | None,
) -> Spawning[Any]:
    data = encode(input, "input of the child")
    claim = here.scope.claim("spawn", pool or "child", key, here.strand.lane)
    body = protocol.Spawn(
        key=claim.key,
        pool=pool,
        objective=objective,
        summary=summary,
        input=msgspec.Raw(data),
        spec=dict(spec or {}),
        policy=policy,
        recording=recording,
        fingerprint=fingerprint({"pool": pool, "objective": objective, "input": msgspec.Raw(data)}),
    )
    return Spawning(here, claim, body, codec_of(result))


async def join(
    children: Iterable[Child[T]], *, mode: JoinMode = "all", timeout: Duration | None = None, key: str | None = None
) -> list[ChildResult[T]]:
    """Waits for children. ``all``: every one, in the given order. ``any``: the first to end. ``first_failure``: the first that does not
    succeed, else all. Raises WaitTimedOut, RunCancelled."""
    waited = list(children)
    if not waited:
        return []
    here = HERE.get() or waited[0]._here
    if len({child.id for child in waited}) != len(waited):
        raise InvalidDeclaration("a child is to be joined twice at once")
    name = f"join.{waited[0].id}" if len(waited) == 1 else f"join.{len(waited)}"
    outcome = await until(here, [child.condition() for child in waited], mode=mode, name=name, timeout=timeout, key=key)
    return [waited[fired.index]._ended(fired) for fired in sorted(outcome.fired, key=lambda fired: fired.index)]
