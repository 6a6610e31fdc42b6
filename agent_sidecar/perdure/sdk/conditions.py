"""What a run can wait for, as its author says it: signals, timers, children; any or all of them, with a timeout (W1, W4, W5)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, cast

import msgspec

from perdure import protocol
from perdure.sdk.calls import dispatch
from perdure.sdk.codec import Codec, codec_of, fingerprint, named
from perdure.sdk.durations import Duration, in_seconds
from perdure.sdk.errors import InvalidDeclaration, ResultUndecodable, WaitTimedOut
from perdure.sdk.here import Here

T = TypeVar("T")
WaitMode = Literal["any", "all", "first_failure"]
_MAX_SHOWN: Final = 1000
"""Characters of a payload that is shown in an event."""


class Condition(Protocol):
    """Anything that ``run.wait`` takes: ``signal(...)``, ``timer(...)``, ``at(...)``, a child."""

    def condition(self) -> protocol.Condition: ...


@dataclass(frozen=True, slots=True)
class Signal(Generic[T]):
    """A signal that came. ``late_seconds`` of a timer says how long it was due. ``at`` is RFC 3339 in UTC."""

    name: str
    id: str
    at: str
    payload: T


@dataclass(frozen=True, slots=True)
class Fired:
    """A condition that came true. ``index`` is its position in the call. A timer that is ``late_seconds`` late is the agent's to judge."""

    index: int
    kind: str
    name: str
    id: str
    at: str
    late_seconds: float
    payload: Any


@dataclass(frozen=True, slots=True)
class Waited:
    """What a wait gave. With ``timed_out`` nothing fired."""

    timed_out: bool
    fired: tuple[Fired, ...]

    @property
    def first(self) -> Fired:
        """Raises WaitTimedOut if nothing fired."""
        if not self.fired:
            raise WaitTimedOut
        return self.fired[0]


class SignalCondition(Generic[T]):
    def __init__(self, name: str, codec: Codec[Any]) -> None:
        self.name = name
        self.codec = codec

    def condition(self) -> protocol.Condition:
        return protocol.Condition(kind="signal", name=self.name)


class TimerCondition:
    def __init__(self, seconds: float | None, due: datetime | None) -> None:
        self._seconds = seconds
        self._due = due

    def condition(self) -> protocol.Condition:
        due = None if self._due is None else self._due.astimezone(UTC).isoformat().replace("+00:00", "Z")
        return protocol.Condition(kind="timer", seconds=self._seconds, at=due)


def signal(name: str, kind: type[T] | Any = Any) -> SignalCondition[T]:
    """A signal by name, its payload read as ``kind``."""
    return SignalCondition(name, codec_of(kind))


def timer(duration: Duration) -> TimerCondition:
    """A time from the moment when the wait is first registered; a restart does not begin it again."""
    seconds = in_seconds(duration)
    if seconds < 0:
        raise InvalidDeclaration("a timer cannot be negative")
    return TimerCondition(seconds, None)


def at(due: datetime) -> TimerCondition:
    """An absolute time. It must have a time zone."""
    if due.tzinfo is None:
        raise InvalidDeclaration("a time without a time zone means something else on every machine; give it one")
    return TimerCondition(None, due)


async def until(
    here: Here,
    on: Sequence[protocol.Condition],
    *,
    mode: WaitMode = "any",
    name: str,
    timeout: Duration | None = None,
    key: str | None = None,
    kind: Literal["wait", "sleep"] = "wait",
    hold: Duration | None = None,
    codecs: Mapping[int, Codec[Any]] | None = None,
) -> protocol.WaitOutcome:
    """A wait with its identity. ``codecs``: of the payloads of signals, by the position of their condition. A signal that is not of its
    type is dropped, and the wait goes on. Raises WaitTimedOut, InputChanged, ConcurrentUnnamed, RunCancelled."""
    execution = here.execution
    claim = here.scope.claim(kind, name, key, here.strand.lane)
    seconds = None if timeout is None else in_seconds(timeout)
    held = execution.options.hold_seconds if hold is None else in_seconds(hold)

    # Times may depend on when the code runs; what is waited for may not.
    what = fingerprint({"mode": mode, "on": [[condition.kind, condition.name] for condition in on]})
    body = protocol.WaitBegin(key=claim.key, name=name[:253], mode=mode, on=list(on), timeout_seconds=seconds, fingerprint=what)

    async def work() -> protocol.WaitOutcome:
        this, begin = claim, body
        for count in itertools.count(1):
            known = execution.journal.get(this.key)
            outcome = await execution.waits.wait(here, this, begin, held)
            following = claim.again(count)
            if outcome.status == "timed_out":
                return outcome
            # What was dropped once stays dropped, whatever the code of today could read.
            if following.key not in execution.journal:
                reasons = {item.index: reason for item in outcome.fired if (reason := _reason(codecs or {}, item)) is not None}
                if not reasons:
                    return outcome
                if known is not None and known.state != "open" and execution.acted_after(known.seq):
                    # An earlier attempt could read it, and did something then: to drop it now would do that again.
                    raise ResultUndecodable(
                        f"{this.key}: a payload that was accepted is not readable any more: {next(iter(reasons.values()))}"
                    )
                for reason in reasons.values():
                    execution.notice("SignalRejected", reason)
                begin = msgspec.structs.replace(body, key=following.key, instead_of=this.key, dropped=list(reasons))
            else:
                begin = msgspec.structs.replace(body, key=following.key)
            this = following
        raise AssertionError("unreachable")

    outcome: protocol.WaitOutcome = await dispatch(execution, work, blocking=False)
    if outcome.status == "timed_out":
        raise WaitTimedOut(f"{claim.key}: nothing happened in {seconds} s")
    return outcome


def _reason(codecs: Mapping[int, Codec[Any]], item: protocol.Fired) -> dict[str, object] | None:
    """Why a signal is dropped, None if it is not."""
    codec = codecs.get(item.index)
    if codec is None:
        return None
    try:
        codec.decode(item.payload)
    except ValueError as error:
        payload = bytes(item.payload).decode()[:_MAX_SHOWN]
        return {"signal": item.name, "id": item.id, "payload": payload, "expected": named(codec.type), "reason": str(error)}
    return None


def typed(conditions: Sequence[Condition]) -> dict[int, Codec[Any]]:
    """Codecs of the payloads of signals, by position. Raises InvalidDeclaration if one signal is awaited as two types: which of the two a
    payload was meant for, nobody could tell."""
    types: dict[str, Any] = {}
    found = {index: condition for index, condition in enumerate(conditions) if isinstance(condition, SignalCondition)}
    for condition in found.values():
        if (other := types.setdefault(condition.name, condition.codec.type)) != condition.codec.type:
            raise InvalidDeclaration(
                f"one wait has the signal {condition.name!r} as {named(other)} and as {named(condition.codec.type)}; "
                "give them two names, or one type that takes both"
            )
    return {index: condition.codec for index, condition in found.items()}


def fired(conditions: Sequence[Condition], outcome: protocol.WaitOutcome) -> tuple[Fired, ...]:
    return tuple(
        Fired(item.index, item.kind, item.name, item.id, item.at, item.late_seconds, _payload(conditions[item.index], item))
        for item in outcome.fired
    )


def _payload(condition: Condition, item: protocol.Fired) -> Any:
    if isinstance(condition, SignalCondition):
        return decoded(condition.codec, item)
    ended = getattr(condition, "_ended", None)
    return cast("Any", ended)(item) if ended else None


def decoded(codec: Codec[Any], item: protocol.Fired) -> Any:
    try:
        return codec.decode(item.payload)
    except ValueError as error:
        raise ResultUndecodable(f"the payload of {item.kind} {item.name} is no {codec.type}: {error}") from error
