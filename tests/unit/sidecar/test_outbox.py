"""Order, resending and bounds of what the gateway has not answered."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perdure.protocol import Answer, Op, decode_from_pod
from perdure.sidecar.outbox import Outbox, Outcome, Pending


def ignore(outcome: Outcome) -> None: ...


def add(outbox: Outbox, req: str, body: bytes = b"{}", *, run: str = "run") -> Pending:
    return outbox.add(run=run, epoch=3, req=req, op="event", body=body, waiter=ignore)


def test_the_frame_carries_the_fence_and_the_body_as_it_is() -> None:
    frame = decode_from_pod(add(Outbox(), "r1", b'{ "op":"event"}').frame)
    assert frame == Op(id=1, run="run", epoch=3, req="r1", body=b'{ "op":"event"}')


def test_a_request_under_way_is_joined_but_not_that_of_another_run() -> None:
    outbox = Outbox()
    first = add(outbox, "r1")
    assert add(outbox, "r1") is first
    assert len(first.waiters) == 2
    assert add(outbox, "r1", run="other") is not first
    assert outbox.settle(first.id) is first
    assert add(outbox, "r1") is not first


def test_room_is_told_once_when_half_is_free() -> None:
    outbox = Outbox(max_operations=4)
    told: list[int] = []
    pending = [add(outbox, str(n)) for n in range(6)]
    assert outbox.full
    outbox.when_room(lambda: told.append(len(outbox)))
    for each in pending:
        outbox.settle(each.id)
    assert told == [2]


def test_bytes_bound_it_too() -> None:
    outbox = Outbox(max_bytes=100)
    pending = add(outbox, "r", bytes(100))
    assert outbox.full
    outbox.settle(pending.id)
    assert not outbox.full
    assert outbox.size == 0


class Sending(RuleBasedStateMachine):
    """Whatever is answered and however often the connection goes: each connection sees the unanswered in the order they came."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox()
        self.unanswered: list[int] = []
        self.sent: list[int] = []
        self.count = 0

    @rule()
    def add(self) -> None:
        self.count += 1
        self.unanswered.append(add(self.outbox, str(self.count)).id)

    @rule(many=st.integers(1, 5))
    def send(self, many: int) -> None:
        for _ in range(many):
            pending = self.outbox.next_unsent()
            if pending is not None:
                self.sent.append(pending.id)

    @rule(which=st.integers(0, 100))
    def answer(self, which: int) -> None:
        known = [id for id in self.sent if id in self.unanswered]
        if known:
            id = known[which % len(known)]
            assert self.outbox.settle(Answer(id=id, body=b"").id) is not None
            assert self.outbox.settle(id) is None
            self.unanswered.remove(id)

    @rule()
    def reconnect(self) -> None:
        self.outbox.rewind()
        self.sent = []

    @invariant()
    def in_order(self) -> None:
        assert self.sent == sorted(set(self.sent))
        assert len(self.outbox) == len(self.unanswered)

    def teardown(self) -> None:
        self.outbox.rewind()
        again = []
        while (pending := self.outbox.next_unsent()) is not None:
            again.append(pending.id)
        assert again == self.unanswered


TestSending = Sending.TestCase
