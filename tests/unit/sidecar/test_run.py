"""The rules about a held run that need no connection."""

from __future__ import annotations

import msgspec
import pytest

from perdure.protocol import Lease
from perdure.sidecar.presence import Presence
from perdure.sidecar.run import HeldRun, State, closed_token, operation_tag


def held(secret: str | None = None, stall: float | None = None) -> HeldRun:
    return HeldRun(Lease(run="r", epoch=1, context=b"{}", stall_timeout_seconds=stall), secret=secret, now=0)


def act(run: HeldRun, op: str, answer: bytes | None = b"{}", closed: str = "") -> None:
    run.began(0)
    run.acknowledged(op, closed, answer, 0)


@pytest.mark.parametrize(
    ("body", "tag"),
    [
        (b'{"op":"step.end","key":"k"}', "step.end"),
        (b'{ "key":"k", "op" : "wait"}', "wait"),
        (b'{"output":{"op":"inner"},"op":"event"}', "event"),
        (b"{}", ""),
    ],
)
def test_the_tag_is_found_wherever_it_stands(body: bytes, tag: str) -> None:
    assert operation_tag(body) == tag


@pytest.mark.parametrize("body", [b"", b"[]", b'{"op":1}', b"{"])
def test_what_has_no_tag_is_an_error(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        operation_tag(body)


def test_the_closed_token() -> None:
    assert closed_token(b'{"key":"k","response":{"token":"no"},"token":"t"}') == "t"


def test_a_poke_comes_apart_as_bytes() -> None:
    run = held()
    parts = run.poked(b'{"cancel":true,"outcomes":{"w":{"fired":[1.50]}},"signals":["a"],"later":1}')
    assert parts == [
        ("cancel", b'{"cancel":true}'),
        ("wait", b'{"outcomes":{"w":{"fired":[1.50]}}}'),
        ("signal", b'{"signals":["a"]}'),
    ]
    assert run.poked(b'{"outcomes":{},"signals":[]}') == []
    assert run.flags() == [("cancel", b'{"cancel":true}')]


@pytest.mark.parametrize("secret", [None, "", "other"])
def test_only_the_secret_admits(secret: str | None) -> None:
    assert held("right").admits("right")
    assert not held("right").admits(secret)
    assert held().admits(secret)


def test_a_pause_needs_an_acknowledgement_after_it() -> None:
    run = held()
    act(run, "step.end")
    run.poked(b'{"pause":true}')
    assert not run.may_pause()
    act(run, "step.end", None)
    assert not run.may_pause(), "a refusal acknowledges nothing"
    act(run, "step.end")
    assert run.may_pause()
    run.began(0)
    assert not run.may_pause(), "something is under way"
    run.acknowledged("step.end", "", b"{}", 0)
    run.state = State.ENDING
    assert not run.may_pause()


def test_a_pause_is_due_at_once_while_only_a_wait_is_open() -> None:
    run = held()
    act(run, "wait", b'{"status":"open"}')
    run.poked(b'{"pause":true}')
    assert run.may_pause()
    run.poked(b'{"outcomes":{"w":{}}}')
    assert not run.may_pause(), "the agent goes on"
    other = held()
    act(other, "wait", b'{"status":"done"}')
    other.poked(b'{"pause":true}')
    assert not other.may_pause()


@pytest.mark.parametrize(("decision", "opens"), [("execute", True), ("retry", True), ("receipt", False), ("unknown", False)])
def test_an_activity_between_intent_and_receipt_holds_a_pause_off(decision: str, opens: bool) -> None:
    run = held()
    act(run, "activity.begin", b'{"decision":"%b","key":"k","token":"t","response":{"decision":"no"}}' % decision.encode())
    assert run.activities == ({"t": "k"} if opens else {})
    run.poked(b'{"pause":true}')
    act(run, "event")
    assert run.may_pause() is not opens
    act(run, "activity.end", None, "t")
    assert run.may_pause() is not opens, "a refused receipt closes nothing"
    act(run, "activity.end", b"{}", "t")
    assert run.may_pause()


def test_an_answer_of_another_shape_tells_nothing() -> None:
    run = held()
    act(run, "activity.begin", b'{"decision":7}')
    act(run, "wait", b"not json")
    assert not run.activities


def test_a_cancel_overrules_a_pause() -> None:
    run = held()
    run.poked(b'{"pause":true,"cancel":true}')
    act(run, "event")
    assert not run.may_pause()


class Session:
    def __init__(self, last_pong: float) -> None:
        self.last_pong = last_pong

    def ping(self) -> None: ...


def test_an_agents_age_is_that_of_its_freshest_sign() -> None:
    presence = Presence()
    assert presence.age(9) is None
    presence.streams.add(object())
    assert presence.age(9) == 0
    presence.sessions |= {Session(3), Session(5)}
    assert presence.age(9) == 4


@pytest.mark.parametrize(
    ("sessions", "streams", "seen", "operation", "stalled"),
    [
        ([0.0], 0, True, 0.0, True),
        ([0.0], 1, True, 0.0, True),  # a session that hangs is not excused by a stream
        ([9.0], 0, True, 0.0, False),
        ([0.0], 0, True, 9.0, False),
        ([0.0, 9.0], 0, True, 0.0, False),
        ([], 1, True, 0.0, False),
        ([], 0, True, 0.0, False),  # plain requests only: somebody else looks after its process
        ([], 0, False, 0.0, True),  # never came
    ],
)
def test_who_counts_as_stalled(sessions: list[float], streams: int, seen: bool, operation: float, stalled: bool) -> None:
    presence, run = Presence(), held(stall=5)
    presence.lease_began()
    presence.sessions |= {Session(pong) for pong in sessions}
    presence.streams |= {object() for _ in range(streams)}
    if seen:
        presence.seen()
    run.last_operation = operation
    assert presence.stalled(run, 10) is stalled
    run.stall_timeout_seconds = None
    assert not presence.stalled(run, 10)
