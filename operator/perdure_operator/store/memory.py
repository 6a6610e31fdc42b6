"""The rules of the store once more, in plain Python: the oracle that property tests compare the Postgres store with.

It is no adapter: nothing is durable, nothing concurrent, nothing fast. One operation after the other changes Python objects, and what it
does is meant to be seen at a glance. It takes what the store takes (``Control``, ``JournalStep``) and answers with the same codes and
comparable answers; states move by ``domain/transitions.py``, the one table that both have in common. Time stands in ``now`` and moves
only when the caller moves it. Payloads are raw JSON. A refusal is decided before anything is changed, so nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from perdure_operator.domain.errors import (
    CancelRequested,
    ConcurrentAppend,
    DeadlineExceeded,
    IllegalTransition,
    InvalidInput,
    NameTaken,
    PerdureError,
    RunFinished,
    RunNotFound,
    StaleFence,
    UnknownActivity,
    WaitConflict,
)
from perdure_operator.domain.lease import Weight, weight
from perdure_operator.domain.run import Effect, Event, State
from perdure_operator.domain.transitions import transition
from perdure_operator.store.operations import Control, Fence, JournalStep, Outcome, SliceWrite

Answer = dict[str, Any]

LAST_WORDS = timedelta(seconds=5)
SECONDS_PER_PRIORITY = 60
STARVING = timedelta(seconds=60)

_LOGGED = {
    Event.LEASE: "run.leased", Event.SUSPEND: "run.suspended", Event.WAKE: "run.woken", Event.LOSE: "run.lost",
    Event.RETRY: "run.retrying", Event.YIELD: "run.yielded", Event.PAUSE: "run.paused",
    Event.SUCCEED: "run.succeeded", Event.FAIL: "run.failed", Event.CANCEL: "run.cancelled",
}  # fmt: skip
_APPLIED = {"child_done": "child.done", "cancel": "run.cancel_requested"}


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
class LedgerEntry:
    key: str
    effect: str
    policy: str
    fingerprint: str
    token: str
    safe_at: datetime
    holder: UUID | None
    state: str = "RUNNING"
    attempts: int = 1
    past_tokens: set[str] = field(default_factory=set)
    executor_ended: bool = False
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
    deadline_at: datetime | None = None
    active_used: timedelta = timedelta()
    result: bytes | None = None
    error_type: str | None = None
    journal: dict[str, tuple[str, str, int, UUID | None]] = field(default_factory=dict)  # key: kind, state, seq, request
    children: dict[str, str] = field(default_factory=dict)  # spawn key: child
    waits: dict[str, Wait] = field(default_factory=dict)
    wakeups: list[Wakeup] = field(default_factory=list)
    ledger: dict[str, LedgerEntry] = field(default_factory=dict)
    slices: list[tuple[int, SliceWrite]] = field(default_factory=list)
    requests: dict[UUID, tuple[str, Answer]] = field(default_factory=dict)

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


class Oracle:
    """``jitter`` gives the random part of the n-th backoff of a run, 0 to 1."""

    def __init__(self, now: datetime, jitter: Callable[[UUID, int], float]) -> None:
        self.now = now
        self.jitter = jitter
        self.runs: dict[UUID, Run] = {}
        self.pods: dict[UUID, Pod] = {}
        self.terminated: set[UUID] = set()
        self.pools: dict[str, int | None] = {}  # limit of running runs
        self.tenants: dict[str, tuple[float, int | None]] = {}  # weight, limit of running runs

    # ------------------------------------------------------------------------------------------------------ operations

    def create(self, columns: dict[str, Any], input_json: bytes) -> tuple[str, UUID]:
        """Code (ok, or existing: the same idempotency key) and run. Raises NameTaken."""
        key = columns.get("idempotency_key")
        mine = [run for run in self.runs.values() if run.namespace == columns["namespace"]]
        if key is not None and (same := next((run for run in mine if run.columns.get("idempotency_key") == key), None)):
            return "existing", same.id
        if any(run.columns["name"] == columns["name"] for run in mine):
            raise NameTaken
        run = Run(columns, input_json, self.now)
        self.runs[run.id] = run
        if run.spec_paused:
            self._settle(run)
        return "ok", run.id

    def journal(self, step: JournalStep) -> Outcome:
        """The first outcome under a key stays; a new one needs the lease."""
        run = self.runs.get(step.run)
        if run is not None and step.key in run.journal:
            _, _, seq, request = run.journal[step.key]
            return Outcome("ok", {"seq": seq, "existing": request != step.request})
        try:
            run = self._fenced(step.run, step.fence)
            if run.cancel_is_due(self.now):
                raise CancelRequested
            if run.deadline_passed(self.now):
                raise DeadlineExceeded
        except PerdureError as error:
            return Outcome(error.code, {"seq": None, "existing": False})
        seq = run.record(f"step.{step.state}")
        run.worker_seq, run.steps = seq, run.steps + 1
        run.journal[step.key] = ("step", step.state, seq, step.request)
        run.slices += [(seq, piece) for piece in step.slices]
        return Outcome("ok", {"seq": seq, "existing": False})

    def control(self, op: Control, idle: Sequence[UUID] = (), gateway: str = "") -> Outcome:
        run = self.runs.get(op.run)
        if run is None:
            return Outcome(RunNotFound.code, {})
        if op.request in run.requests:
            code, answer = run.requests[op.request]
            return Outcome(code, answer, state=run.state)
        code, before, holds = "ok", len(run.log), op.fence is not None and op.fence == run.fence
        try:
            if op.fence is not None and op.kind != "activity.end":
                self._fenced(run.id, op.fence)
            if holds and op.kind not in ("activity.end", "finish") and (run.cancel_is_due(self.now) or run.deadline_passed(self.now)):
                code, answer = (CancelRequested.code if run.cancel_is_due(self.now) else DeadlineExceeded.code), {}
                self._settle(run)
            else:
                answer = getattr(self, "_" + op.kind.replace(".", "_"))(run, op)
                if holds and op.slices:
                    seq = run.record("session.saved") if len(run.log) == before else len(run.log)
                    run.slices += [(seq, piece) for piece in op.slices]
        except PerdureError as error:
            return Outcome(error.code, {}, state=run.state)
        if holds and len(run.log) > before:
            run.worker_seq = len(run.log)
        leased = self._direct(run, idle, gateway)
        if op.request is not None and len(run.log) > before:
            run.requests[op.request] = (code, answer)
        return Outcome(code, answer, state=run.state, leased=leased, epoch=run.epoch if leased else None)

    def _fenced(self, run_id: UUID, fence: Fence) -> Run:
        run = self.runs.get(run_id)
        if run is None:
            raise RunNotFound
        if run.fence != fence:
            raise RunFinished if run.state.terminal else StaleFence
        return run

    # ------------------------------------------------------------------------------------------------------- transitions

    def _move(self, run: Run, event: Event, reason: str, *, pod: UUID | None = None) -> None:
        move = transition(run.state, event)
        if move.state is run.state and not move.effects:
            return
        run.state, run.reason = move.state, reason
        for effect in move.effects:
            self._effect(run, effect, pod)
        run.record(_LOGGED[event])

    def _effect(self, run: Run, effect: Effect, pod: UUID | None) -> None:
        match effect:
            case Effect.GRANT:
                run.epoch, run.holder, run.beat_at, run.wake_due = run.epoch + 1, pod, self.now, False
                seconds = run.columns.get("deadline_seconds")
                if run.deadline_at is None and seconds is not None:
                    run.deadline_at = self.now + timedelta(seconds=seconds)
            case Effect.REVOKE:
                run.epoch += 1
            case Effect.RELEASE:
                held = self.pods.get(run.holder) if run.holder else None
                if held and held.run == run.id:
                    held.run, held.state = None, "leased" if held.reuse else "retiring"
                run.holder = None
            case Effect.ORPHAN:
                for entry in run.ledger.values():
                    if entry.state == "RUNNING":
                        entry.state = "UNKNOWN"
                        run.record("activity.unknown")
            case Effect.ATTEMPT:
                run.attempt += 1
            case Effect.ENQUEUE:
                run.enqueue(self.now)
            case Effect.CLOCK_ON:
                run.active_since = run.active_since or self.now
            case Effect.CLOCK_OFF:
                run.active_used += self.now - run.active_since if run.active_since else timedelta()
                run.active_since = None
            case Effect.FINISH:
                self._finished(run)

    def _finished(self, run: Run) -> None:
        run.reasons, run.wake_due = [], False
        for wait in run.waits.values():
            wait.state = "closed" if wait.state == "open" else wait.state
        if run.parent is not None:
            policy = run.columns.get("parent_policy", "cancel")
            done = Wakeup("child_done", str(run.id), self.now, run.columns["name"], str(run.id), run.result, run.state, policy)
            self.runs[run.parent].wakeups.append(done)
        for child in self.runs.values():
            if child.parent == run.id and child.columns.get("parent_policy", "cancel") != "detach" and not child.state.terminal:
                child.wakeups.append(Wakeup("cancel", str(run.id), self.now))

    def _settle(self, run: Run, op: Control | None = None) -> Answer:
        """Does the strongest thing that is due: cancel > deadline > pause > wake (L1). A requested cancel names every end a cancel."""
        fresh = sorted((w for w in run.wakeups if w.seq is None), key=lambda w: (w.at, w.kind, w.source))
        for wakeup in fresh:
            wakeup.seq = 0 if run.state.terminal else run.record(_APPLIED[wakeup.kind])
        if run.state.terminal:
            return {}
        if any(w.kind == "cancel" for w in fresh):
            self._request_cancel(run)
        child_failed = any(w.policy == "fail_parent" and w.status != State.SUCCEEDED for w in fresh)
        ending = self.now_ending(run, child_failed=child_failed)
        if ending:
            if ending != "Cancelled":
                run.error_type = ending
            self._move(run, Event.CANCEL if ending == "Cancelled" else Event.FAIL, ending)
            return {}
        self._decide_waits(run)
        if run.paused or run.spec_paused:
            if run.state is State.PENDING:
                run.wake_due = True
                self._move(run, Event.PAUSE, "Paused")
        elif run.state is State.SUSPENDED and run.wake_due:
            run.wake_due = False
            self._move(run, Event.WAKE, "Woken")
        return {}

    def now_ending(self, run: Run, *, child_failed: bool = False) -> str | None:
        """Why this run must end now, if it must."""
        late = run.deadline_passed(self.now)
        if run.cancel_requested and (run.state is not State.RUNNING or run.cancel_is_due(self.now) or late or child_failed):
            return "Cancelled"
        return "DeadlineExceeded" if late else "ChildFailed" if child_failed else None

    def _request_cancel(self, run: Run) -> None:
        if not run.cancel_requested:
            run.cancel_requested = True
            run.cancel_due = self.now + timedelta(seconds=run.columns["grace_seconds"]) + LAST_WORDS

    # -------------------------------------------------------------------------------------------------------------- waits

    def _met(self, run: Run, wait: Wait) -> list[Fired]:
        """The conditions that hold now. A signal counts for one condition; a child's end can be joined again and again."""
        met, taken = [], set()
        for index, condition in enumerate(wait.on):
            if condition.kind == "timer":
                if condition.at is not None and condition.at <= self.now:
                    met.append(Fired(index, "timer", condition.at, (self.now - condition.at).total_seconds()))
                continue
            for wakeup in run.wakeups:
                free = wakeup.bound is None and wakeup.source not in taken and wakeup.name == condition.name
                fits = free if condition.kind == "signal" else wakeup.source == condition.name
                if wakeup.seq and wakeup.kind == condition.kind and fits:
                    taken.add(wakeup.source)
                    met.append(Fired(index, condition.kind, wakeup.at, wakeup=wakeup))
                    break
        return met

    def _decide(self, run: Run, wait: Wait) -> tuple[str, list[Fired]] | None:
        met = self._met(run, wait)
        earliest = sorted(met, key=lambda f: (f.at, f.index))
        failed = [f for f in earliest if f.kind == "child_done" and f.wakeup and f.wakeup.status != State.SUCCEEDED]
        if wait.mode == "any" and met:
            return "satisfied", earliest[:1]
        if wait.mode == "first_failure" and failed:
            return "satisfied", failed[:1]
        if wait.mode != "any" and len(met) == len(wait.on):
            return "satisfied", met
        if wait.timeout_at is not None and wait.timeout_at <= self.now:
            return "timed_out", [Fired(-1, "timeout", wait.timeout_at, (self.now - wait.timeout_at).total_seconds())]
        return None

    def _decide_waits(self, run: Run) -> None:
        """Oldest wait first. What satisfies a wait is bound to it in the commit that journals its outcome (W5)."""
        for wait in run.waits.values():
            decision = self._decide(run, wait) if wait.state == "open" else None
            if decision is None:
                continue
            wait.state, wait.fired = decision
            for fired in wait.fired:
                if fired.wakeup and fired.wakeup.bound is None:
                    fired.wakeup.bound = wait.key
            run.journal[wait.key] = ("wait", wait.state, run.record(f"wait.{wait.state}"), None)
            if run.state is not State.RUNNING:
                run.wake_due = True
                run.reasons.append(wait.fired[0].kind)

    def _wait(self, run: Run, op: Control) -> Answer:
        key, print_ = op.body["key"], op.body.get("fingerprint")
        wait = run.waits.get(key)
        if wait is None and key in run.journal:
            raise WaitConflict
        if wait is not None and None not in (wait.fingerprint, print_) and wait.fingerprint != print_:
            raise WaitConflict
        if wait is None:
            on = [Condition(c["kind"], c.get("name", ""), self._due(c)) for c in op.body["on"]]
            seconds = op.body.get("timeoutSeconds")
            timeout_at = None if seconds is None else self.now + timedelta(seconds=seconds)
            run.waits[key] = wait = Wait(key, op.body["mode"], on, timeout_at, print_)
            run.journal[key] = ("wait", "open", run.record("wait.opened"), None)
        self._decide_waits(run)
        if wait.state == "open" and not op.body.get("suspend"):
            return {"status": "open"}
        return self._give_back(run, [key])

    def _due(self, condition: dict[str, Any]) -> datetime | None:
        if condition["kind"] != "timer":
            return None
        return datetime.fromisoformat(condition["at"]) if condition.get("at") else self.now + timedelta(seconds=condition["seconds"])

    def _suspend(self, run: Run, op: Control) -> Answer:
        if any(key not in run.waits for key in op.body["waits"]):
            raise WaitConflict
        self._decide_waits(run)
        return self._give_back(run, op.body["waits"])

    def _give_back(self, run: Run, keys: Iterable[str]) -> Answer:
        """A decided wait returns at once (W2); otherwise the pod goes."""
        done = {key: run.waits[key] for key in keys if run.waits[key].state in ("satisfied", "timed_out")}
        if done:
            return {"status": "done", "outcomes": {key: self.outcome(wait) for key, wait in done.items()}}
        run.reasons = []
        self._move(run, Event.SUSPEND, "Waiting")
        self._settle(run)
        return {"status": "suspended"}

    def outcome(self, wait: Wait) -> Answer:
        """Of each fired condition: index, kind, id, lateness in seconds, payload, and the status of a child."""
        return {
            "status": wait.state,
            "fired": [
                (f.index, f.kind, f.wakeup.id, 0.0, f.wakeup.payload, f.wakeup.status)
                if f.wakeup
                else (f.index, f.kind, "", round(f.late, 3), None, "")
                for f in wait.fired
            ],
        }

    def _signal(self, run: Run, op: Control) -> Answer:
        name, id_ = op.body["name"], op.body["id"]
        known = next((w for w in run.wakeups if w.kind == "signal" and (w.name, w.id) == (name, id_)), None)
        if known is not None:
            return {"seq": known.seq, "duplicate": True, "state": run.state}
        if run.state.terminal:
            raise RunFinished
        seq = run.record("signal.received")
        run.wakeups.append(Wakeup("signal", f"{len(run.wakeups)}", self.now, name, id_, op.payload, seq=seq))
        self._settle(run)
        return {"seq": seq, "duplicate": False, "state": run.state}

    # ------------------------------------------------------------------------------------------------------------- effects

    def _grant_execution(self, run: Run, entry: LedgerEntry, body: dict[str, Any], after: float) -> None:
        """A new token. The executor can act from ``after`` on until the tool's timeout and the lease have passed."""
        entry.past_tokens.add(entry.token)
        entry.token, entry.state, entry.attempts = str(body["token"]), "RUNNING", entry.attempts + 1
        entry.holder, entry.executor_ended, entry.error = run.holder, False, None
        entry.safe_at = self.now + timedelta(seconds=after + body["timeoutSeconds"] + body["leaseSeconds"])
        run.record("activity.started")

    def _decision(self, entry: LedgerEntry, decision: str, after: float = 0.0, policy: str | None = None) -> Answer:
        token = entry.token if decision in ("execute", "retry") else None
        response = entry.response if decision == "receipt" else None
        return {
            "decision": decision, "key": entry.key, "attempt": entry.attempts, "effect": entry.effect, "token": token,
            "policy": policy or entry.policy, "retryAfterSeconds": round(max(after, 0.0), 3), "response": response,
            "providerRef": entry.provider_ref, "error": entry.error,
        }  # fmt: skip

    def _activity_begin(self, run: Run, op: Control) -> Answer:
        body = op.body
        entry = run.ledger.get(body["key"])
        if entry is None:
            safe_at = self.now + timedelta(seconds=body["timeoutSeconds"] + body["leaseSeconds"])
            entry = LedgerEntry(body["key"], body["effect"], body["policy"], body["fingerprint"], str(body["token"]), safe_at, run.holder)
            run.ledger[entry.key] = entry
            run.record("activity.started")
            return self._decision(entry, "execute")
        if entry.fingerprint != body["fingerprint"] and not body.get("scopeIsIdentity"):
            return self._decision(entry, "conflict")
        if entry.state == "UNKNOWN":
            wait = self._may_still_act(entry)
            if body["policy"] in ("query", "ask", "fail") or wait > 0:
                asked = body["policy"] in ("query", "ask", "fail")
                return self._decision(entry, "unknown", 0.0 if asked else wait, body["policy"])
            entry.policy = body["policy"]
            self._grant_execution(run, entry, body, 0.0)
            return self._decision(entry, "execute")
        return self._known(run, entry, body)

    def _known(self, run: Run, entry: LedgerEntry, body: dict[str, Any]) -> Answer:
        """An entry that is not UNKNOWN. FAILED is proven not executed: again, up to the limit, after a backoff."""
        if entry.state == "SUCCEEDED":
            return self._decision(entry, "receipt")
        if entry.state == "RUNNING":
            return self._decision(entry, "busy", 0.2)
        limit = body.get("maxRetries")
        if entry.attempts > (run.columns["max_tool_retries"] if limit is None else limit):
            return self._decision(entry, "failed")
        after = self.backoff(run, entry.attempts)
        self._grant_execution(run, entry, body, after)
        return self._decision(entry, "retry", after)

    def _may_still_act(self, entry: LedgerEntry) -> float:
        """Seconds until a second execution of an UNKNOWN effect can be excluded by time; 0 when nothing forbids it (E5)."""
        if entry.effect != "external" or entry.executor_ended or entry.holder in self.terminated:
            return 0.0
        return max(0.0, (entry.safe_at - self.now).total_seconds())

    def _activity_end(self, run: Run, op: Control) -> Answer:
        """A receipt. Success is believed from whoever was granted the call; any other word only from the one who has it now."""
        body = op.body
        entry, token, state = run.ledger.get(body["key"]), str(body["token"]), body["state"].upper()
        if entry is None or token not in {entry.token, *entry.past_tokens}:
            raise UnknownActivity
        fenced, current, ended = op.fence is not None and op.fence == run.fence, token == entry.token, not run.state.terminal
        evidence = not (fenced and current and entry.state == "RUNNING")
        if state == "CANCELLED" and entry.effect in ("external", "memory"):
            state = "UNKNOWN"  # E1: to have been cancelled proves nothing
        if state == "SUCCEEDED":
            accepted, twice = entry.state != "SUCCEEDED", not current and entry.state in ("RUNNING", "SUCCEEDED")
        else:
            accepted = current and (entry.state == "RUNNING" or (entry.state == "UNKNOWN" and (state != "UNKNOWN" or fenced)))
            twice = False
        if accepted:
            entry.past_tokens.add(entry.token)
            entry.token, entry.state = token, state
            entry.response = op.payload if state == "SUCCEEDED" else None
            entry.provider_ref, entry.error = body.get("providerRef"), body.get("error")
            entry.executor_ended |= current
            if ended:
                run.record("activity.evidence" if evidence else f"activity.{state.lower()}")
        if twice and ended:
            run.record("activity.duplicate_effect")
        return {"state": entry.state, "seq": len(run.log), "evidence": evidence}

    def _activity_resolve(self, run: Run, op: Control) -> Answer:
        """The provider's word: it happened is believed, it did not happen only when nobody can still make it happen."""
        entry = run.ledger.get(op.body["key"])
        if entry is None:
            raise UnknownActivity
        if entry.state in ("SUCCEEDED", "RUNNING") or (entry.state != "UNKNOWN" and not op.body["happened"]):
            return self._known(run, entry, op.body)
        if op.body["happened"]:
            entry.state, entry.response, entry.provider_ref, entry.error = "SUCCEEDED", op.payload, op.body.get("providerRef"), None
        elif wait := self._may_still_act(entry):
            return self._decision(entry, "unknown", wait)
        else:
            entry.state = "FAILED"
        run.record("activity.resolved")
        return self._known(run, entry, op.body)

    # ----------------------------------------------------------------------------------------------------- the other operations

    def _spawn(self, run: Run, op: Control) -> Answer:
        key, columns = op.body["key"], op.body["run"]
        if key in run.children:
            return {"child": run.children[key], "existing": True}
        if key in run.journal:
            raise InvalidInput
        if any((r.namespace, r.columns["name"]) == (columns["namespace"], columns["name"]) for r in self.runs.values()):
            raise NameTaken
        _, child = self.create({**columns, "parent_id": run.id}, op.payload or b"null")
        run.children[key] = str(child)
        run.journal[key] = ("spawn", "succeeded", run.record("child.spawned"), None)
        return {"child": str(child), "existing": False}

    def _note(self, run: Run, op: Control) -> Answer:
        if not run.state.terminal:
            run.record(op.body["kind"])
        return {}

    def _event(self, run: Run, op: Control) -> Answer:
        if op.body.get("expectedSeq") not in (None, len(run.log)):
            raise ConcurrentAppend
        return {"seq": run.record("agent." + op.body["kind"])}

    def _checkpoint(self, run: Run, op: Control) -> Answer:
        return {"seq": run.record("checkpoint.saved")}

    def _finish(self, run: Run, op: Control) -> Answer:
        error = (op.body.get("error") or {}).get("type") or ""
        match op.body["outcome"]:
            case "succeeded" | "cancelled" as outcome:
                if run.cancel_requested != (outcome == "cancelled"):
                    raise CancelRequested if run.cancel_requested else IllegalTransition
                run.result = op.payload if outcome == "succeeded" else None
                self._move(run, Event.CANCEL if outcome == "cancelled" else Event.SUCCEED, outcome.capitalize())
            case "failed":
                run.error_type = error or None
                self._end(run, Event.FAIL, error or "Failed")
            case "retry" | "stalled" as outcome:
                self._attempt_failed(run, error if outcome == "retry" else "Stalled")
            case "paused":
                if run.paused or run.spec_paused:
                    run.wake_due, run.reasons = True, ["resume"]
                    self._move(run, Event.PAUSE, "Paused")
                else:
                    self._move(run, Event.YIELD, "Resumed")
        self._settle(run)
        return {"state": run.state}

    def _end(self, run: Run, event: Event, reason: str) -> None:
        """An end that a requested cancel turns into Cancelled."""
        self._move(run, Event.CANCEL, "Cancelled") if run.cancel_requested else self._move(run, event, reason)

    def _attempt_failed(self, run: Run, reason: str) -> None:
        run.failures += 1
        if run.cancel_requested or run.failures > run.columns["max_retries"]:
            run.error_type = run.error_type if run.cancel_requested else "RetriesExhausted"
            return self._end(run, Event.FAIL, "RetriesExhausted")
        run.runnable_at = self.now + timedelta(seconds=self.backoff(run, run.failures))
        run.reasons.append("retry")
        return self._move(run, Event.RETRY, reason)

    def backoff(self, run: Run, n: int) -> float:
        """L5: base * 2^(n-1), capped, times 0.5 to 1. Seconds."""
        longest = min(run.columns["max_backoff_seconds"], run.columns["backoff_seconds"] * 2 ** min(n - 1, 30))
        return float(longest * (0.5 + 0.5 * self.jitter(run.id, n)))

    def _expire(self, run: Run, op: Control) -> Answer:
        silent = timedelta(seconds=op.body.get("silentSeconds") or 0)
        if run.holder is None or run.epoch != op.body["leaseEpoch"] or run.beat_at > self.now - silent:
            return {"expired": False}
        match op.body.get("weight"):
            case Weight.FAILURE:
                self._attempt_failed(run, op.body["reason"])
            case counts:
                self._lost(run, op.body["reason"], counts=counts != Weight.NONE)
        self._settle(run)
        return {"expired": True}

    def _lost(self, run: Run, reason: str, *, counts: bool) -> None:
        """L5: only losses without progress in between add up, and too many park the run for a person."""
        if counts:
            run.losses = 1 if run.worker_seq > run.loss_seq else run.losses + 1
            run.loss_seq = run.worker_seq
        if counts and not run.cancel_requested and run.losses > run.columns["max_losses"]:
            run.paused = run.wake_due = True
            self._move(run, Event.PAUSE, "LossesExhausted")
        else:
            if not run.cancel_requested:
                run.reasons.append("lost")
            self._end(run, Event.LOSE, reason)

    def _verb(self, run: Run, verb: str) -> Answer:
        if run.state.terminal and not (verb == "cancel" and run.state is State.CANCELLED):
            raise RunFinished
        if run.state.terminal:
            return {"state": run.state}
        if verb == "cancel" and not run.cancel_requested:
            self._request_cancel(run)
            run.record("run.cancel_requested")
        elif verb != "cancel" and run.paused != (verb == "pause"):
            run.paused = verb == "pause"
            run.losses = run.losses if run.paused else 0
            run.record(f"run.{verb}_requested")
        self._settle(run)
        return {"state": run.state}

    def _cancel(self, run: Run, op: Control) -> Answer:
        return self._verb(run, "cancel")

    def _pause(self, run: Run, op: Control) -> Answer:
        return self._verb(run, "pause")

    def _resume(self, run: Run, op: Control) -> Answer:
        return self._verb(run, "resume")

    # ------------------------------------------------------------------------------------------------------ leases and pods

    def admits(self, run: Run) -> bool:
        """L4: the one admission rule."""
        running = [r for r in self.runs.values() if r.state is State.RUNNING]
        limit, (_, tenant_limit) = self.pools.get(run.pool), self.tenants.get(run.namespace, (1.0, None))
        return (
            run.state is State.PENDING
            and run.pool in self.pools
            and run.runnable_at <= self.now
            and not run.deadline_passed(self.now)
            and (limit is None or sum(r.pool == run.pool for r in running) < limit)
            and (tenant_limit is None or sum(r.namespace == run.namespace for r in running) < tenant_limit)
        )

    def next_of(self, pool: str) -> Run | None:
        """Who gets the next pod: a tenant that has waited a minute and has none here, else the one with the least running for its
        weight; inside a tenant the first by rank."""
        waiting = sorted((r for r in self.runs.values() if r.pool == pool and self.admits(r)), key=lambda r: r.rank)
        heads = {run.namespace: run for run in reversed(waiting)}

        def urgency(head: Run) -> tuple[float, float]:
            running = [r for r in self.runs.values() if r.state is State.RUNNING and r.namespace == head.namespace]
            if not any(r.pool == pool for r in running) and head.runnable_at <= self.now - STARVING:
                return 0.0, head.rank
            return (len(running) + 1) / self.tenants.get(head.namespace, (1.0, None))[0], head.rank

        return min(heads.values(), key=urgency, default=None)

    def lease(self, run: Run, pod: UUID, gateway: str) -> None:
        self.pods[pod].state, self.pods[pod].run = "leased", run.id
        self._move(run, Event.LEASE, "Leased", pod=pod)

    def _idle(self, pods: Iterable[UUID], pool: str, gateway: str) -> list[UUID]:
        wanted = (pool, "idle", gateway)
        return [pod for pod in pods if pod in self.pods and (self.pods[pod].pool, self.pods[pod].state, self.pods[pod].gateway) == wanted]

    def _direct(self, run: Run, idle: Sequence[UUID], gateway: str) -> UUID | None:
        """The direct path: only when nothing else of the pool is runnable."""
        pods = self._idle(idle, run.pool, gateway)
        queued = (r for r in self.runs.values() if r.pool == run.pool and r.state is State.PENDING and r.runnable_at <= self.now)
        if run.state is not State.PENDING or not pods or not self.admits(run) or any(r is not run for r in queued):
            return None
        self.lease(run, pods[0], gateway)
        return pods[0]

    def dispatch(self, gateway: str, pod: UUID) -> Run | None:
        """The run that this pod gets."""
        if not self._idle([pod], self.pods[pod].pool, gateway):
            return None
        run = self.next_of(self.pods[pod].pool)
        if run is not None:
            self.lease(run, pod, gateway)
        return run

    def hello(self, pod: UUID, pool: str, gateway: str, *, reuse: bool, believes: tuple[UUID, int] | None) -> tuple[str, UUID | None]:
        """Status (leased, idle, lost, retire) and the run."""
        held = next((run for run in self.runs.values() if run.holder == pod), None)
        row = self.pods.setdefault(pod, Pod(pool))
        if held is not None:
            row.gateway, held.beat_at = gateway, self.now
            return "leased", held.id
        if row.pool != pool or row.state == "retiring":
            return "retire", None
        row.gateway, row.reuse = gateway, reuse
        if believes:
            row.state = row.state if reuse else "retiring"
            return "lost", believes[0]
        row.state = "idle" if reuse or row.state in ("starting", "idle") else "retiring"
        return ("idle" if row.state == "idle" else "retire"), None

    def idle(self, pod: UUID, gateway: str) -> bool:
        row = self.pods.get(pod)
        if row is None or row.state == "retiring" or any(run.holder == pod for run in self.runs.values()):
            return False
        row.state, row.gateway = "idle", gateway
        return True

    def gone(self, pod: UUID, reason: str) -> list[UUID]:
        """The pod was seen terminated. Gives the run that lost it."""
        lost = [run for run in self.runs.values() if run.holder == pod]
        self.pods.pop(pod, None)
        self.terminated.add(pod)
        for run in lost:
            self.control(Control(run.id, "expire", {"leaseEpoch": run.epoch, "reason": reason, "weight": weight(reason)}))
        return [run.id for run in lost]

    def beat(self, run: UUID, epoch: int, pod: UUID) -> bool:
        """False: the lease is over."""
        alive = self.runs[run].fence == Fence(epoch, pod)
        if alive:
            self.runs[run].beat_at = self.now
        return alive
