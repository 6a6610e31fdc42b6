"""What the oracle (memory.py) holds: a run with its waits, wakeups and ledger, and the pods, as plain objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from perdure_operator.domain.run import Event, State
from perdure_operator.store.operations import Fence, SliceWrite

Answer = dict[str, Any]
SECONDS_PER_PRIORITY = 60

LOGGED = {
    Event.LEASE: "run.leased", Event.SUSPEND: "run.suspended", Event.WAKE: "run.woken", Event.LOSE: "run.lost",
    Event.RETRY: "run.retrying", Event.YIELD: "run.yielded", Event.PAUSE: "run.paused",
    Event.SUCCEED: "run.succeeded", Event.FAIL: "run.failed", Event.CANCEL: "run.cancelled",
}  # fmt: skip
APPLIED = {"child_done": "child.done", "cancel": "run.cancel_requested"}


@dataclass(frozen=True)
class Condition:
    kind: str
    name: str
    at: datetime | None


@dataclass(frozen=True)
class Fired:
    """A condition that came true; ``index`` -1 is the timeout. ``wakeup`` is what made it true, if it was one."""

    index: int
    kind: str
    at: datetime
    late: float = 0.0
    wakeup: Wakeup | None = None


@dataclass
class Wait:
    key: str
    mode: str
    on: list[Condition]
    timeout_at: datetime | None
    fingerprint: str | None
    state: str = "open"
    fired: list[Fired] = field(default_factory=list)


@dataclass
class Wakeup:
    """``seq`` None: not applied yet; 0: came after the end. ``bound``: the wait that took it first."""

    kind: str
    source: str
    at: datetime
    name: str = ""
    id: str = ""
    payload: bytes | None = None
    status: str = ""
    policy: str = ""
    seq: int | None = None
    bound: str | None = None


@dataclass
class Executor:
    """A lease that left an UNKNOWN effect: its pod, since when it is given up, and whether it is proven that nothing of it is left."""

    pod: UUID
    lost_at: datetime
    gone: bool = False


@dataclass
class LedgerEntry:
    key: str
    effect: str
    policy: str
    fingerprint: str
    token: str
    safe_at: datetime
    holder: UUID | None
    epoch: int
    timeout: float
    max_retries: int | None
    state: str = "RUNNING"
    attempts: int = 1
    past_tokens: set[str] = field(default_factory=set)
    executor_ended: bool = False
    absent: bool = False  # the provider did not have it
    asked: bool = False  # a question to the provider is put after the executor has gone
    response: bytes | None = None
    provider_ref: str | None = None
    error: Any = None


@dataclass
class Pod:
    pool: str
    state: str = "starting"
    reuse: bool = False
    gateway: str = ""
    run: UUID | None = None
    charged: UUID | None = None
    charged_seq: int = 0


@dataclass
class Run:
    """One run with all that hangs on it. ``log`` holds the kinds of its events, so ``len(log)`` is its last sequence."""

    columns: dict[str, Any]
    input: bytes
    now: datetime
    state: State = State.PENDING
    reason: str = "Queued"
    log: list[str] = field(default_factory=lambda: ["run.created"])
    epoch: int = 0
    holder: UUID | None = None
    attempt: int = 1
    failures: int = 0
    losses: int = 0
    worker_seq: int = 0
    loss_seq: int = 0
    steps: int = 0
    reasons: list[str] = field(default_factory=lambda: ["start"])
    cancel_requested: bool = False
    cancel_due: datetime | None = None
    paused: bool = False
    wake_due: bool = False
    started_at: datetime | None = None
    deadline_at: datetime | None = None
    active_used: timedelta = timedelta()
    result: bytes | None = None
    error_type: str | None = None
    journal: dict[str, tuple[str, str, int, UUID | None]] = field(default_factory=dict)  # key: kind, state, seq, request
    children: dict[str, str] = field(default_factory=dict)  # spawn key: child
    waits: dict[str, Wait] = field(default_factory=dict)
    wakeups: list[Wakeup] = field(default_factory=list)
    ledger: dict[str, LedgerEntry] = field(default_factory=dict)
    executors: dict[int, Executor] = field(default_factory=dict)  # by epoch
    slices: list[tuple[int, SliceWrite]] = field(default_factory=list)
    requests: dict[UUID, tuple[str, Answer]] = field(default_factory=dict)
    raw_bytes: int = 0
    stored_bytes: int = 0
    size_told: bool = False

    def __post_init__(self) -> None:
        self.id = UUID(str(self.columns["run_id"]))
        self.pool: str = self.columns["pool"]
        self.namespace: str = self.columns["namespace"]
        parent = self.columns.get("parent_id")
        self.parent = UUID(str(parent)) if parent else None
        self.spec_paused = bool(self.columns.get("spec_paused"))
        self.runnable_at = self.beat_at = self.now
        self.active_since: datetime | None = self.now
        self.rank = self._rank()

    def _rank(self) -> float:
        """Place in the queue: a point of priority is worth a minute, so age beats any priority in the end (L4)."""
        priority: int = self.columns.get("priority", 0)
        return self.runnable_at.timestamp() - priority * SECONDS_PER_PRIORITY

    def enqueue(self, now: datetime) -> None:
        self.runnable_at = max(self.runnable_at, now)
        self.rank = self._rank()

    def record(self, kind: str) -> int:
        self.log.append(kind)
        return len(self.log)

    @property
    def fence(self) -> Fence | None:
        return Fence(self.epoch, self.holder) if self.holder else None

    def deadline_passed(self, now: datetime) -> bool:
        """L6: wall clock since the first start, or time at work and in the queue."""
        limit = self.columns.get("active_limit_ms")
        used_up = limit is not None and self.active_since and self.active_used + (now - self.active_since) >= timedelta(milliseconds=limit)
        return bool(used_up) or (self.deadline_at is not None and self.deadline_at <= now)

    def cancel_is_due(self, now: datetime) -> bool:
        return self.cancel_due is not None and self.cancel_due <= now
