"""The operations that the gateway has not answered yet, in the order in which they came.

An operation stays here, encoded, from the moment it is taken until its answer: that is what makes a resend possible. Order is by
``id``. After a reconnect everything is unsent again, oldest first, under the same request id. What is here is bounded; who sends more
than fits is not read from until there is room (back-pressure, nothing is dropped).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from perdure.protocol import Answer, Op, Refusal, encode_frame

MAX_OPERATIONS = 4096
MAX_BYTES = 16 * 1024 * 1024
LOW_WATER = 0.5
"""Reading goes on when this share of both limits is reached again."""

Outcome = Answer | Refusal
Waiter = Callable[[Outcome], None]


class Pending:
    """One operation under way. ``frame`` is the encoded :class:`Op`; ``sent_at`` the loop time of its first sending, None before."""

    __slots__ = ("epoch", "frame", "id", "op", "req", "run", "sent_at", "waiters")

    def __init__(self, id: int, run: str, epoch: int, req: str, op: str, frame: bytes, waiter: Waiter) -> None:
        self.id = id
        self.run = run
        self.epoch = epoch
        self.req = req
        self.op = op
        self.frame = frame
        self.waiters = [waiter]
        self.sent_at: float | None = None


class Outbox:
    def __init__(self, *, max_operations: int = MAX_OPERATIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_operations = max_operations
        self._max_bytes = max_bytes
        self._pending: dict[int, Pending] = {}
        self._by_request: dict[tuple[str, str], Pending] = {}
        self._unsent: deque[Pending] = deque()
        self._next_id = 1
        self._bytes = 0
        self._on_room: list[Callable[[], None]] = []
        self.resent = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def size(self) -> int:
        """In bytes."""
        return self._bytes

    @property
    def full(self) -> bool:
        return len(self._pending) >= self._max_operations or self._bytes >= self._max_bytes

    def when_room(self, callback: Callable[[], None]) -> None:
        """Calls back once, when the outbox is half empty again."""
        self._on_room.append(callback)

    def add(self, *, run: str, epoch: int, req: str, op: str, body: bytes, waiter: Waiter) -> Pending:
        """Takes an operation, even when full: who reads from the agent looks at :attr:`full` first. A request id that is under way is
        not sent twice, its answer goes to both."""
        known = self._by_request.get((run, req))
        if known is not None:
            known.waiters.append(waiter)
            return known
        id = self._next_id
        self._next_id += 1
        frame = encode_frame(Op(id=id, run=run, epoch=epoch, req=req, body=body))
        pending = Pending(id, run, epoch, req, op, frame, waiter)
        self._pending[id] = self._by_request[(run, req)] = pending
        self._unsent.append(pending)
        self._bytes += len(frame)
        return pending

    def next_unsent(self) -> Pending | None:
        return self._unsent.popleft() if self._unsent else None

    def rewind(self) -> None:
        """The connection is gone: whether any of these was committed is unknown, so all are to be sent again, in order."""
        self._unsent = deque(self._pending.values())

    def settle(self, id: int) -> Pending | None:
        """Removes an operation that has its answer. None: nobody waits for that id."""
        pending = self._pending.pop(id, None)
        if pending is None:
            return None
        del self._by_request[(pending.run, pending.req)]
        self._bytes -= len(pending.frame)
        if self._on_room and len(self._pending) <= self._max_operations * LOW_WATER and self._bytes <= self._max_bytes * LOW_WATER:
            waiting, self._on_room = self._on_room, []
            for callback in waiting:
                callback()
        return pending

    def unanswered(self, *ops: str) -> int:
        """How many operations of these kinds (of all, without any) are under way."""
        return sum(1 for pending in self._pending.values() if not ops or pending.op in ops)
