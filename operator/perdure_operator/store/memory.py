"""The rules of the store once more, in plain Python: the oracle that property tests compare the Postgres store with.

It is no adapter: nothing is durable, nothing concurrent, nothing fast. One operation after the other changes Python objects, and what it
does is meant to be seen at a glance. It takes what the store takes (``Control``, ``JournalStep``) and answers with the same codes and
comparable answers; states move by ``domain/transitions.py``, the one table that both have in common. Time stands in ``now`` and moves
only when the caller moves it. Payloads are raw JSON. A refusal is decided before anything is changed, so nothing is rolled back; but for
one, of a suspend under a call: what decides it is whether a wait is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from perdure_operator.domain import errors
from perdure_operator.domain.errors import PerdureError
from perdure_operator.domain.lease import Weight, taken_away, weight
from perdure_operator.domain.run import Effect, Event, State
from perdure_operator.domain.transitions import transition
from perdure_operator.store.memory_ledger import LedgerRules
from perdure_operator.store.memory_records import (
    APPLIED,
    LOGGED,
    SECONDS_PER_PRIORITY,
    Answer,
    Condition,
    Executor,
    Fired,
    Pod,
    Run,
    Wait,
    Wakeup,
)
from perdure_operator.store.operations import Control, Fence, JournalStep, Limits, Outcome
from perdure_operator.store.payload import weight as payload_weight

LAST_WORDS = timedelta(seconds=5)
STARVING = timedelta(seconds=60)
LIMITS = {"active_limit_ms": "activeLimitMs", "deadline_seconds": "deadlineSeconds", "max_tool_retries": "maxToolRetries"}


def _over(value: int, limit: int | None, times: int = 1) -> bool:
    return limit is not None and value > limit * times


class Oracle(LedgerRules):
    """``pools``: limit of running runs by pool; ``tenants``: weight and limit of running runs by namespace."""

    def __init__(self, now: datetime, jitter: Callable[[UUID, int], float]) -> None:
        super().__init__(now, jitter)
        self.runs: dict[UUID, Run] = {}
        self.pods: dict[UUID, Pod] = {}
        self.pools: dict[str, int | None] = {}
        self.tenants: dict[str, tuple[float, int | None]] = {}
        self.limits = Limits()

    # ------------------------------------------------------------------------------------------------------ operations

    def create(self, columns: dict[str, Any], input_json: bytes) -> tuple[str, UUID]:
        """Code (ok, or existing: the same idempotency key) and run. Raises NameTaken."""
        key = columns.get("idempotency_key")
        mine = [run for run in self.runs.values() if run.namespace == columns["namespace"]]
        if key is not None and (same := next((run for run in mine if run.columns.get("idempotency_key") == key), None)):
            return "existing", same.id
        if any(run.columns["name"] == columns["name"] for run in mine):
            raise errors.NameTaken
        run = Run(columns, input_json, self.now)
        self.runs[run.id] = run
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
            if overdue := self._overdue(run):
                raise overdue
            raw, stored = self._room_for(run, step)
        except PerdureError as error:
            return Outcome(error.code, {"seq": None, "existing": False})
        run.raw_bytes, run.stored_bytes = run.raw_bytes + raw, run.stored_bytes + stored
        seq = run.record(f"step.{step.state}")
        run.worker_seq, run.steps = seq, run.steps + 1
        run.journal[step.key] = ("step", step.state, seq, step.request)
        run.slices += [(seq, piece) for piece in step.slices]
        return Outcome("ok", {"seq": seq, "existing": False})

    def control(self, op: Control, idle: Sequence[UUID] = (), gateway: str = "") -> Outcome:
        run = self.runs.get(op.run)
        if run is None:
            return Outcome(errors.RunNotFound.code, {})
        if op.request in run.requests:
            if self._still_answered(run, op):
                code, answer = run.requests[op.request]
                return Outcome(code, answer, state=run.state)
            if op.fence == run.fence and (entry := run.ledger[run.requests[op.request][1]["key"]]).state != "SUCCEEDED":
                # What it was granted is over, and nobody might hear of another one.
                return Outcome("ok", self._decision(entry, "busy", 0.2), state=run.state)
        code, before, holds = "ok", len(run.log), op.fence is not None and op.fence == run.fence
        calls = [entry for entry in run.ledger.values() if entry.state == "RUNNING"]
        untouched = deepcopy(vars(run)) if calls and op.kind in ("wait", "suspend") else {}
        try:
            if op.fence is not None and op.kind != "activity.end":
                self._fenced(run.id, op.fence)
            overdue = self._overdue(run) if holds and op.kind not in ("activity.end", "finish") else None
            if overdue:
                code, answer = overdue.code, self._settle(run)
            else:
                raw, stored = self._room_for(run, op) if op.fence is not None else (0, 0)
                answer = getattr(self, "_" + op.kind.replace(".", "_"))(run, op)
                if holds and op.slices:
                    seq = run.record("session.saved") if len(run.log) == before else len(run.log)
                    run.slices += [(seq, piece) for piece in op.slices]
                if len(run.log) > before:
                    run.raw_bytes, run.stored_bytes = run.raw_bytes + raw, run.stored_bytes + stored
                self._tell_size(run)
        except PerdureError as error:
            if isinstance(error, errors.EffectRunning):
                vars(run).update(untouched)
            return Outcome(error.code, {}, state=run.state)
        if holds and len(run.log) > before and op.kind not in ("activity.begin", "event", "finish"):
            run.worker_seq = len(run.log)
        leased = self._direct(run, idle, gateway)
        if op.request is not None and (len(run.log) > before or not op.kind.startswith("activity.")):
            run.requests[op.request] = (code, answer)
        return Outcome(code, answer, state=run.state, leased=leased, epoch=run.epoch if leased else None)

    def _still_answered(self, run: Run, op: Control) -> bool:
        """Whether the stored answer holds. One that grants an execution does so under its own lease, while that execution is open."""
        if op.kind not in ("activity.begin", "activity.resolve"):
            return True
        assert op.request is not None
        return op.fence is not None and run.fence == op.fence and self._still_granted(run, run.requests[op.request][1], op.body)

    def _room_for(self, run: Run, op: Control | JournalStep) -> tuple[int, int]:
        """Bytes that it writes, as JSON and as they are stored. What ends a run, and what became of an effect, is taken in any case."""
        own = [op.output if isinstance(op, JournalStep) else op.payload, *(piece.value for piece in op.slices)]
        of = op.run if isinstance(op, JournalStep) else op.payload_run or op.run
        sizes = [payload_weight(of, raw) for raw in own if raw is not None]
        error = len(op.error.encode()) if isinstance(op, JournalStep) and op.error is not None else 0
        raw, stored = error + sum(size for size, _ in sizes), error + sum(size for _, size in sizes)
        closing = isinstance(op, Control) and op.kind in ("finish", "activity.end", "activity.resolve")
        passes = _over(run.raw_bytes + raw, self.limits.raw) or _over(run.stored_bytes + stored, self.limits.stored)
        if raw and not closing and passes:
            raise errors.RunTooLarge
        return raw, stored

    def _tell_size(self, run: Run) -> None:
        near = _over(run.raw_bytes * 5 + 1, self.limits.raw, 4) or _over(run.stored_bytes * 5 + 1, self.limits.stored, 4)
        if near and not run.size_told and not run.state.terminal:
            run.size_told = True
            run.record("run.nearly_full")

    def _fenced(self, run_id: UUID, fence: Fence) -> Run:
        run = self.runs.get(run_id)
        if run is None:
            raise errors.RunNotFound
        if run.fence != fence:
            raise errors.RunFinished if run.state.terminal else errors.StaleFence
        return run

    def _overdue(self, run: Run) -> type[PerdureError] | None:
        """What a worker hears whose run should have ended."""
        late = errors.DeadlineExceeded if run.deadline_passed(self.now) else None
        return errors.CancelRequested if run.cancel_is_due(self.now) else late

    # ------------------------------------------------------------------------------------------------------- transitions

    def _move(self, run: Run, event: Event, reason: str, *, pod: UUID | None = None) -> None:
        move = transition(run.state, event)
        if move.state is run.state and not move.effects:
            return
        run.state, run.reason = move.state, reason
        for effect in move.effects:
            self._effect(run, effect, pod)
        run.record(LOGGED[event])

    def _effect(self, run: Run, effect: Effect, pod: UUID | None) -> None:
        match effect:
            case Effect.GRANT:
                run.epoch, run.holder, run.beat_at, run.wake_due = run.epoch + 1, pod, self.now, False
                run.started_at = run.started_at or self.now
                seconds = run.columns.get("deadline_seconds")
                if run.deadline_at is None and seconds is not None:
                    run.deadline_at = self.now + timedelta(seconds=seconds)
            case Effect.REVOKE:
                run.epoch += 1
            case Effect.RELEASE:
                self._released(run)
            case Effect.ORPHAN:
                for entry in run.ledger.values():
                    if entry.state == "RUNNING" and entry.holder is not None:
                        entry.state = "UNKNOWN"
                        run.executors.setdefault(entry.epoch, Executor(entry.holder, self.now))
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

    def _released(self, run: Run) -> None:
        run.holder = None
        for pod in self.pods.values():
            if pod.run == run.id:
                pod.run, pod.state = None, "leased" if pod.reuse and pod.state == "leased" else "retiring"

    def _finished(self, run: Run) -> None:
        run.reasons, run.wake_due = [], False
        unknown = {entry.epoch for entry in run.ledger.values() if entry.state == "UNKNOWN"}
        run.executors = {epoch: executor for epoch, executor in run.executors.items() if epoch in unknown}
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
        if run.columns.get("parent_policy") == "detach":
            for wakeup in run.wakeups:
                if wakeup.seq is None and wakeup.kind == "cancel":
                    wakeup.seq = 0
        fresh = sorted((w for w in run.wakeups if w.seq is None), key=lambda w: (w.at, w.kind, w.source))
        for wakeup in fresh:
            wakeup.seq = 0 if run.state.terminal else run.record(APPLIED[wakeup.kind])
        if run.state.terminal:
            return {}
        if any(w.kind == "cancel" for w in fresh):
            self._request_cancel(run)
        late = "DeadlineExceeded" if run.deadline_passed(self.now) else None
        failed = late or ("ChildFailed" if any(w.policy == "fail_parent" and w.status != State.SUCCEEDED for w in fresh) else None)
        if failed or (run.cancel_requested and (run.state is not State.RUNNING or run.cancel_is_due(self.now))):
            self._end(run, Event.FAIL, failed or "", error=failed)
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

    def _end(self, run: Run, event: Event, reason: str, *, error: str | None = None) -> None:
        """An end that a requested cancel turns into Cancelled."""
        if run.cancel_requested:
            self._move(run, Event.CANCEL, "Cancelled")
        else:
            run.error_type = error
            self._move(run, event, reason)

    def _request_cancel(self, run: Run) -> None:
        if not run.cancel_requested:
            run.cancel_requested = True
            run.cancel_due = self.now + timedelta(seconds=run.columns["grace_seconds"]) + LAST_WORDS

    # -------------------------------------------------------------------------------------------------------------- waits

    def _met(self, run: Run, wait: Wait) -> list[Fired]:
        """The conditions that hold now. A signal counts for one condition; a child's end can be joined again and again."""
        met, taken = [], set()
        for index, condition in enumerate(wait.on):
            if condition.at is not None and condition.at <= self.now:
                met.append(Fired(index, "timer", condition.at, (self.now - condition.at).total_seconds()))
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
            raise errors.WaitConflict
        if wait is not None and None not in (wait.fingerprint, print_) and wait.fingerprint != print_:
            raise errors.WaitConflict
        if wait is None:
            on = [Condition(c["kind"], c.get("name", ""), self._at(c.get("at"), c.get("seconds"))) for c in op.body["on"]]
            children = {str(child.id) for child in self.runs.values() if child.parent == run.id}
            if any(condition.kind == "child_done" and condition.name not in children for condition in on):
                raise errors.InvalidInput
            wait = Wait(key, op.body["mode"], on, self._at(None, op.body.get("timeoutSeconds")), print_)
            if (before := op.body.get("insteadOf")) is not None:
                given_back = self._give_back_signals(run, before, print_, op.body["dropped"])
                wait = Wait(key, given_back.mode, given_back.on, given_back.timeout_at, print_)
            run.waits[key] = wait
            run.journal[key] = ("wait", "open", run.record("wait.opened"), None)
        self._abandon(run, op.body.get("abandoned", ()))
        self._listen_again(run, [key])
        self._decide_waits(run)
        if wait.state == "open" and not op.body.get("suspend"):
            return {"status": "open"}
        return self._give_back(run, [key])

    def _give_back_signals(self, run: Run, key: str, print_: str | None, dropped: Sequence[int]) -> Wait:
        """A wait was satisfied by what its run cannot use: it keeps only that."""
        before = run.waits.get(key)
        if before is None or before.state != "satisfied" or before.fingerprint != print_:
            raise errors.WaitConflict
        for fired in before.fired:
            if fired.wakeup and fired.wakeup.bound == key and fired.index not in dropped:
                fired.wakeup.bound = None
        before.fired = [fired for fired in before.fired if fired.index in dropped]
        return before

    def _abandon(self, run: Run, waits: Iterable[dict[str, Any]]) -> None:
        """Nobody listens there any more: what they took is there again."""
        keys = {abandoned["key"] for abandoned in waits}
        for wait in run.waits.values():
            if wait.key in keys and wait.state != "closed":
                for wakeup in run.wakeups:
                    if wakeup.bound == wait.key:
                        wakeup.bound = None
                wait.state, wait.fired = "closed", []
                run.journal[wait.key] = ("wait", "abandoned", run.record("wait.abandoned"), None)

    def _listen_again(self, run: Run, keys: Iterable[str]) -> None:
        for wait in (run.waits[key] for key in keys):
            if wait.state == "closed":
                wait.state = "open"
                run.journal[wait.key] = ("wait", "open", *run.journal[wait.key][2:])

    def _at(self, at: str | None, seconds: float | None) -> datetime | None:
        if at is not None:
            return datetime.fromisoformat(at)
        return None if seconds is None else self.now + timedelta(seconds=seconds)

    def _suspend(self, run: Run, op: Control) -> Answer:
        if any(key not in run.waits for key in op.body["waits"]):
            raise errors.WaitConflict
        self._abandon(run, op.body.get("abandoned", ()))
        self._listen_again(run, op.body["waits"])
        self._decide_waits(run)
        return self._give_back(run, op.body["waits"])

    def _give_back(self, run: Run, keys: Iterable[str]) -> Answer:
        """A decided wait returns at once (W2); otherwise the pod goes."""
        done = {key: run.waits[key] for key in keys if run.waits[key].state in ("satisfied", "timed_out")}
        if done:
            return {"status": "done", "outcomes": {key: self.outcome(wait) for key, wait in done.items()}}
        if any(entry.state == "RUNNING" for entry in run.ledger.values()):
            raise errors.EffectRunning
        run.reasons = []
        self._move(run, Event.SUSPEND, "Waiting")
        self._settle(run)
        return {"status": "suspended"}

    def outcome(self, wait: Wait) -> Answer:
        """Of each fired condition: index, kind, id, lateness in seconds, payload, and the status of a child."""
        nothing = Wakeup("", "", self.now)
        of = [(fired, fired.wakeup or nothing) for fired in wait.fired]
        return {"status": wait.state, "fired": [(f.index, f.kind, w.id, round(f.late, 3), w.payload, w.status) for f, w in of]}

    def _signal(self, run: Run, op: Control) -> Answer:
        name, id_ = op.body["name"], op.body["id"]
        known = next((w for w in run.wakeups if w.kind == "signal" and (w.name, w.id) == (name, id_)), None)
        if known is not None:
            return {"seq": known.seq, "duplicate": True, "state": run.state}
        if run.state.terminal:
            raise errors.RunFinished
        seq = run.record("signal.received")
        run.wakeups.append(Wakeup("signal", f"{len(run.wakeups)}", self.now, name, id_, op.payload, seq=seq))
        self._settle(run)
        return {"seq": seq, "duplicate": False, "state": run.state}

    def _spawn(self, run: Run, op: Control) -> Answer:
        key, columns = op.body["key"], op.body["run"]
        if key in run.children:
            return {"child": run.children[key], "existing": True}
        if key in run.journal:
            raise errors.InvalidInput
        if any((r.namespace, r.columns["name"]) == (columns["namespace"], columns["name"]) for r in self.runs.values()):
            raise errors.NameTaken
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
            raise errors.ConcurrentAppend
        return {"seq": run.record("agent." + op.body["kind"])}

    def _checkpoint(self, run: Run, op: Control) -> Answer:
        return {"seq": run.record("checkpoint.saved")}

    def _finish(self, run: Run, op: Control) -> Answer:
        error = (op.body.get("error") or {}).get("type") or ""
        match op.body["outcome"]:
            case "succeeded" | "cancelled" as outcome:
                if run.cancel_requested != (outcome == "cancelled"):
                    raise errors.CancelRequested if run.cancel_requested else errors.IllegalTransition
                run.result = op.payload if outcome == "succeeded" else None
                self._move(run, Event.CANCEL if outcome == "cancelled" else Event.SUCCEED, outcome.capitalize())
            case "failed":
                self._end(run, Event.FAIL, error or "Failed", error=error or None)
            case "yielded":
                pod, counts = self.pods.get(run.holder) if run.holder else None, not self._taken_away(run)
                self._lost(run, "Terminated", counts=counts)
                if pod is not None and counts:
                    pod.charged, pod.charged_seq = run.id, run.loss_seq
            case "retry" if error == "AgentDisconnected" and self._taken_away(run):
                self._lost(run, "Terminated", counts=False)
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

    def _taken_away(self, run: Run) -> bool:
        return run.holder in self.pods and self.pods[run.holder].state == "retiring"

    def _attempt_failed(self, run: Run, reason: str) -> None:
        run.failures += 1
        if run.cancel_requested or run.failures > run.columns["max_retries"]:
            self._end(run, Event.FAIL, "RetriesExhausted", error="RetriesExhausted")
        else:
            run.runnable_at = self.now + timedelta(seconds=self.backoff(run, run.failures))
            run.reasons.append("retry")
            self._move(run, Event.RETRY, reason)

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

    def _undo_loss(self, run: Run, op: Control) -> Answer:
        pod = self.pods.get(UUID(op.body["pod"]))
        if pod is None or pod.charged != run.id:
            return {"undone": False}
        pod.charged = None
        if run.state.terminal or pod.charged_seq != run.loss_seq:
            return {"undone": False}
        run.losses = max(0, run.losses - 1)
        if run.state is State.SUSPENDED and run.paused and run.reason == "LossesExhausted":
            run.paused = False
            run.record("run.resume_requested")
        self._settle(run)
        return {"undone": True}

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

    def _verb(self, run: Run, op: Control) -> Answer:
        verb = op.kind
        if run.state.terminal:
            if verb == "cancel" and run.state is State.CANCELLED:
                return {"state": run.state}
            raise errors.RunFinished
        if verb == "cancel" and not run.cancel_requested:
            self._request_cancel(run)
            run.record("run.cancel_requested")
        elif verb != "cancel" and (run.paused != (verb == "pause") or (verb == "pause" and run.reason == "LossesExhausted")):
            run.reason = "Paused" if run.paused and verb == "pause" else run.reason
            run.paused = verb == "pause"
            run.losses = run.losses if run.paused else 0
            run.record(f"run.{verb}_requested")
        self._settle(run)
        return {"state": run.state}

    _cancel = _pause = _resume = _verb

    def _spec(self, run: Run, op: Control) -> Answer:
        """The resource's spec, as a whole, over whatever it was before; a limit that it does not name stays."""
        body = op.body
        if run.state.terminal:
            return {"state": run.state}
        run.rank -= (body["priority"] - run.columns.get("priority", 0)) * SECONDS_PER_PRIORITY
        run.columns["priority"] = body["priority"]
        run.columns |= {column: body[name] for column, name in LIMITS.items() if body.get(name) is not None}
        seconds = run.columns.get("deadline_seconds")
        run.deadline_at = run.started_at + timedelta(seconds=seconds) if run.started_at and seconds is not None else None
        paused = body["desiredState"] == "Suspended"
        if paused != run.spec_paused:
            run.spec_paused = paused
            run.record("run.pause_requested" if paused else "run.resume_requested")
        if body["desiredState"] == "Cancelled" and not run.cancel_requested:
            self._request_cancel(run)
            run.record("run.cancel_requested")
        self._settle(run)
        return {"state": run.state}

    def _detach(self, run: Run, op: Control) -> Answer:
        if run.columns.get("parent_policy", "cancel") != "detach" and not run.state.terminal:
            if run.cancel_requested:
                raise errors.CancelRequested
            run.columns["parent_policy"] = "detach"
            run.record("run.detached")
        return {}

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

    def _next_of(self, pool: str) -> Run | None:
        """L4: first a tenant that starves here, then the one with the least running for its weight; inside a tenant by rank."""
        waiting = sorted((r for r in self.runs.values() if r.pool == pool and self.admits(r)), key=lambda r: r.rank)
        heads = {run.namespace: run for run in reversed(waiting)}

        def urgency(head: Run) -> tuple[float, float]:
            running = [r for r in self.runs.values() if r.state is State.RUNNING and r.namespace == head.namespace]
            if not any(r.pool == pool for r in running) and head.runnable_at <= self.now - STARVING:
                return 0.0, head.rank
            return (len(running) + 1) / self.tenants.get(head.namespace, (1.0, None))[0], head.rank

        return min(heads.values(), key=urgency, default=None)

    def _lease(self, run: Run, pod: UUID) -> None:
        self.pods[pod].state, self.pods[pod].run, self.pods[pod].charged = "leased", run.id, None
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
        self._lease(run, pods[0])
        return pods[0]

    def dispatch(self, gateway: str, pod: UUID) -> Run | None:
        """The run that this pod gets."""
        pool = self.pods[pod].pool
        run = self._next_of(pool) if self._idle([pod], pool, gateway) else None
        if run is not None:
            self._lease(run, pod)
        return run

    def hello(
        self, pod: UUID, pool: str, gateway: str, *, reuse: bool, ready: bool, believes: tuple[UUID, int] | None
    ) -> tuple[str, UUID | None]:
        """Status (leased, starting, idle, lost, retire) and the run."""
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
        if not reuse and row.state not in ("starting", "idle"):
            row.state = "retiring"
            return "retire", None
        row.state = "idle" if ready else "starting"
        return row.state, None

    def idle(self, pod: UUID, gateway: str, ended: tuple[UUID, int] | None = None) -> bool:
        """``ended``: the lease of which no process is left, by the pod's own word."""
        if ended is not None:
            run, epoch = self.runs[ended[0]], ended[1]
            executor, live = run.executors.get(epoch), run.holder is not None and run.epoch == epoch
            if executor is not None and executor.pod == pod and not live:
                executor.gone = True
        row = self.pods.get(pod)
        if row is None or row.state == "retiring" or any(run.holder == pod for run in self.runs.values()):
            return False
        row.state, row.gateway = "idle", gateway
        return True

    def take_away(self, pod: UUID) -> None:
        if pod in self.pods:
            self.pods[pod].state = "retiring"
            self._undo_loss_of(pod)

    def _undo_loss_of(self, pod: UUID) -> None:
        if pod in self.pods and (charged := self.pods[pod].charged) is not None:
            self.control(Control(charged, "undo_loss", {"pod": str(pod)}))

    def gone(self, pod: UUID, reason: str, *, proven: bool = True) -> list[UUID]:
        """The pod is gone. Gives the run that lost it. ``proven``: it was seen terminated, so nothing of what it held is left."""
        lost = [run for run in self.runs.values() if run.holder == pod]
        if taken_away(reason):
            self._undo_loss_of(pod)
        self.pods.pop(pod, None)
        if proven:
            for run in lost:
                run.executors.setdefault(run.epoch, Executor(pod, self.now))
            for executor in (executor for run in self.runs.values() for executor in run.executors.values() if executor.pod == pod):
                executor.gone = True
        for run in lost:
            self.control(Control(run.id, "expire", {"leaseEpoch": run.epoch, "reason": reason, "weight": weight(reason)}))
        return [run.id for run in lost]

    def beat(self, run: UUID, epoch: int, pod: UUID) -> bool:
        """False: the lease is over."""
        alive = self.runs[run].fence == Fence(epoch, pod)
        self.runs[run].beat_at = self.now if alive else self.runs[run].beat_at
        return alive
