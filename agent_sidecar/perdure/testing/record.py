"""The record of one simulated run: what a gateway would keep, and the answer to each operation on it.

Every operation is one commit, fenced by the epoch, and answered once: the same request id gets the same answer again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from perdure import protocol
from perdure.protocol import ChildResult, ErrorInfo, JournalEntry, Problem, Reason, RunContext, WaitOutcome, encode_json
from perdure.sdk.errors import Refused
from perdure.testing.clock import Clock
from perdure.testing.ledger import MemoryLedger, UnknownToken
from perdure.testing.waits import StoredSignal, Waits

TERMINAL: Final = frozenset({"Succeeded", "Failed", "Cancelled"})
BACKOFF_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Event:
    seq: int
    at: float
    kind: str
    data: Mapping[str, Any]


def refused(code: str, detail: str, *, status: int = 409, retryable: bool = False) -> Refused:
    return Refused(Problem(type=f"urn:perdure:{code}", title=code, status=status, detail=detail, retryable=retryable, action=""))


@dataclass
class RunRecord:
    """``spawn`` makes a child; ``pushed`` is called with what a process that runs is to be told."""

    run_id: str
    pool: str
    input: bytes
    clock: Clock
    max_retries: int
    parent: RunRecord | None
    policy: str
    objective: str
    spec: Mapping[str, Any]
    spawn: Callable[[RunRecord, protocol.Spawn], RunRecord]
    pushed: Callable[[RunRecord, protocol.Poke], None]
    state: str = "Pending"
    epoch: int = 0
    attempt: int = 1
    failures: int = 0
    suspensions: int = 0
    runnable_at: float = 0.0
    cancel_requested: bool = False
    output: bytes = b"null"
    error: ErrorInfo | None = None
    log: list[Event] = field(default_factory=list)
    journal: dict[str, JournalEntry] = field(default_factory=dict)
    slices: dict[str, list[protocol.Slice]] = field(default_factory=dict)
    checkpoint: protocol.CheckpointRef | None = None
    children: list[RunRecord] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger(self.run_id, self.clock)
        self.waits = Waits(self.clock)
        self._answers: dict[str, bytes] = {}
        self.event("run.created", {})

    # ------------------------------------------------------------------------------------------- leases

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    def lease(self) -> bytes:
        """Grants the next epoch; gives the context for it."""
        self.epoch += 1
        self.state = "Running"
        self.event("run.leased", {"epoch": self.epoch, "attempt": self.attempt})
        signals = [
            Reason(kind="signal", name=signal.name, id=signal.id, at=signal.at, payload=msgspec.Raw(signal.payload))
            for signal in self.waits.signals
            if signal.bound_to is None
        ]
        reasons, self.reasons = [*(self.reasons or [Reason(kind="start")]), *signals], []
        return encode_json(
            RunContext(
                run_id=self.run_id,
                namespace="simulation",
                name=self.run_id,
                pool=self.pool,
                epoch=self.epoch,
                attempt=self.attempt,
                objective=self.objective,
                input=msgspec.Raw(self.input),
                spec=msgspec.Raw(encode_json(dict(self.spec))),
                last_seq=len(self.log),
                parent=self.parent.run_id if self.parent else None,
                root=self.root.run_id,
                cancel_requested=self.cancel_requested,
                reasons=reasons,
                journal=list(self.journal.values()),
                slices=[self._slice_state(name, parts) for name, parts in self.slices.items()],
                checkpoint=self.checkpoint,
                ledger=self.ledger.listed(),
            )
        )

    @property
    def root(self) -> RunRecord:
        return self if self.parent is None else self.parent.root

    def lost(self, *, gone: bool) -> None:
        """The worker is lost. ``gone``: it was seen to be dead, so it cannot act any more."""
        if self.state != "Running":
            return
        self.ledger.executor_lost(gone=gone)
        self.attempt += 1
        self.event("run.lost", {"epoch": self.epoch})
        self.reasons.append(Reason(kind="lost"))
        self._leave("Cancelled" if self.cancel_requested else "Pending")

    # ------------------------------------------------------------------------------------------- operations

    def perform(self, epoch: int, req: str, body: protocol.Operation) -> bytes:
        """The answer's JSON. Raises Refused."""
        known = self._answers.get(req)
        if known is not None:
            return known
        live = epoch == self.epoch and self.state == "Running"
        if not live and not isinstance(body, protocol.ActivityEnd):
            raise refused("lease-lost", f"{self.run_id}: epoch {epoch} is over")
        answer = encode_json(self._apply(body, live))
        self._answers[req] = answer
        return answer

    def _apply(self, body: protocol.Operation, live: bool) -> msgspec.Struct:
        match body:
            case protocol.StepEnd():
                return self._step(body)
            case protocol.EventAppend():
                if body.expected_seq not in (None, len(self.log)):
                    raise refused("concurrent-append", f"the log ends at {len(self.log)}", retryable=True)
                return self._recorded(f"agent.{body.kind}", {"data": msgspec.json.decode(body.data)})
            case protocol.CheckpointSave():
                self._save(body.slices)
                recorded = self._recorded("checkpoint.saved", {"type": body.type})
                self.checkpoint = protocol.CheckpointRef(seq=recorded.seq, type=body.type, cursor=body.cursor)
                return recorded
            case protocol.ActivityBegin():
                decision = self._logged("activity.begin", self.ledger.begin(body))
                entry = self.ledger.entries[decision.key]
                entry.seq = entry.seq or len(self.log)
                return decision
            case protocol.ActivityEnd():
                return self._activity_end(body, live)
            case protocol.ActivityResolve():
                return self._logged("activity.resolved", self.ledger.resolve(body), by=body.by)
            case protocol.WaitBegin():
                return self._wait(body)
            case protocol.Suspend():
                self._save(body.slices)
                self._abandon(body.abandoned)
                return self._try_suspend(body.waits)
            case protocol.Spawn():
                return self._spawn(body)
            case protocol.Finish():
                return self._finish(body)
            case _:
                raise refused("invalid-input", f"{type(body).__name__} is for clients without a journal", status=400)

    def _step(self, body: protocol.StepEnd) -> protocol.Recorded:
        existing = body.key in self.journal
        if existing:
            return protocol.Recorded(seq=self.journal[body.key].seq, existing=True)
        self._save(body.slices)
        recorded = self._recorded(f"step.{body.state}", {"key": body.key, "attempts": body.attempts, "phase": body.phase})
        self.journal[body.key] = JournalEntry(
            key=body.key,
            kind="step",
            name=body.name,
            state=body.state,
            seq=recorded.seq,
            fingerprint=body.fingerprint,
            output=body.output,
            error=body.error,
        )
        return recorded

    def _activity_end(self, body: protocol.ActivityEnd, live: bool) -> protocol.ActivityRecorded:
        try:
            recorded = self.ledger.end(body, live=live)
        except UnknownToken as error:
            raise refused("unknown-activity", f"no execution was granted with this token: {error}") from error
        if live:
            self._save(body.slices)
        if not self.terminal:
            recorded.seq = self.event(f"activity.{body.state}", {"key": body.key, "evidence": recorded.evidence}).seq
        return recorded

    def _wait(self, body: protocol.WaitBegin) -> protocol.WaitAnswer:
        self._save(body.slices)
        self._abandon(body.abandoned)
        known = self.journal.get(body.key)
        if known is not None and self.waits.listen_again(body.key):
            known.state = "open"
        if known is None:
            self.waits.register(body)
            seq = self.event("wait.opened", {"key": body.key}).seq
            self.journal[body.key] = JournalEntry(
                key=body.key, kind="wait", name=body.name, state="open", seq=seq, fingerprint=body.fingerprint
            )
        self.settle()
        entry = self.journal[body.key]
        if entry.state != "open":
            return protocol.WaitAnswer(status="done", outcomes={body.key: msgspec.json.decode(entry.output, type=WaitOutcome)})
        return self._try_suspend([body.key]) if body.suspend else protocol.WaitAnswer(status="open")

    def _abandon(self, waits: list[protocol.Abandoned]) -> None:
        for wait in waits:
            if self.waits.abandon(wait.key):
                entry, seq = self.journal[wait.key], self.event("wait.abandoned", {"key": wait.key}).seq
                entry.state, entry.seq, entry.output = "abandoned", seq, msgspec.Raw(encode_json(wait.seconds))

    def _try_suspend(self, keys: list[str]) -> protocol.WaitAnswer:
        self.settle()
        if any(key not in self.journal for key in keys):
            raise refused("wait-conflict", "a wait is registered before the run suspends on it")
        done = {key: msgspec.json.decode(self.journal[key].output, type=WaitOutcome) for key in keys if self.journal[key].state != "open"}
        if done:
            return protocol.WaitAnswer(status="done", outcomes=done)
        if running := self.ledger.running():
            raise refused("effect-running", f"the call of {running} is under way: end it first, then suspend", retryable=True)
        self.event("run.suspended", {"waits": list(self.waits.open)})
        self.suspensions += 1
        self._leave("Cancelled" if self.cancel_requested else "Suspended")
        return protocol.WaitAnswer(status="suspended")

    def _spawn(self, body: protocol.Spawn) -> protocol.Spawned:
        known = self.journal.get(body.key)
        if known is not None:
            return protocol.Spawned(child=msgspec.json.decode(known.output, type=protocol.Spawned).child, existing=True)
        child = self.spawn(self, body)
        self.children.append(child)
        spawned = protocol.Spawned(child=child.run_id)
        seq = self.event("child.spawned", {"key": body.key, "child": child.run_id}).seq
        self.journal[body.key] = JournalEntry(
            key=body.key,
            kind="spawn",
            name=body.pool,
            state="succeeded",
            seq=seq,
            fingerprint=body.fingerprint,
            output=msgspec.Raw(encode_json(spawned)),
        )
        return spawned

    def _finish(self, body: protocol.Finish) -> protocol.Finished:
        if body.outcome == "succeeded" and self.cancel_requested:
            raise refused("cancel-requested", "a cancel was committed before this completion")
        if body.outcome == "cancelled" and not self.cancel_requested:
            raise refused("illegal-transition", "no cancel was requested")
        self._save(body.slices)
        self.error = body.error
        state = {"succeeded": "Succeeded", "cancelled": "Cancelled"}.get(body.outcome, "Failed")
        if self.cancel_requested:
            state = "Cancelled"
        elif body.outcome == "retry" and self.failures < self.max_retries:
            self.failures += 1
            self.attempt += 1
            self.reasons.append(Reason(kind="retry"))
            self.runnable_at = self.clock.now + BACKOFF_SECONDS * 2 ** (self.failures - 1)
            state = "Pending"
        elif body.outcome == "yielded":
            self.attempt += 1
            self.reasons.append(Reason(kind="lost", name="Terminated"))
            state = "Pending"
        self.output = bytes(body.output)
        self.event(f"run.{body.outcome}", {"error": body.error.message if body.error else None})
        self.ledger.executor_lost(gone=True)
        self._leave(state)
        return protocol.Finished(state=self.state)

    # ------------------------------------------------------------------------------------------- effects of others

    def settle(self) -> None:
        """Decides what can be decided, and wakes or tells whoever waits."""
        for key, outcome in self.waits.decide().items():
            event = self.event(f"wait.{outcome.status}", {"key": key})
            entry = self.journal[key]
            entry.state, entry.seq, entry.output = outcome.status, event.seq, msgspec.Raw(encode_json(outcome))
            if self.state == "Running":
                self.pushed(self, protocol.Poke(outcomes={key: outcome}))
            elif self.state == "Suspended":
                fired = outcome.fired[0]
                self.reasons.append(Reason(kind=fired.kind, name=fired.name, id=fired.id, at=fired.at, payload=fired.payload))
                self.event("run.woken", {})
                self.state = "Pending"

    def signal(self, name: str, payload: bytes, id: str) -> None:
        if self.terminal or any((signal.name, signal.id) == (name, id) for signal in self.waits.signals):
            return
        self.waits.signals.append(StoredSignal(name, id, self.clock.rfc3339(), payload))
        self.event("signal.received", {"name": name, "id": id})
        self.settle()

    def cancel(self) -> None:
        if self.terminal or self.cancel_requested:
            return
        self.cancel_requested = True
        self.event("run.cancel_requested", {})
        if self.state == "Running":
            self.pushed(self, protocol.Poke(cancel=True))
        else:
            self._leave("Cancelled")

    def due_times(self) -> list[float]:
        """When something happens to this run by itself."""
        if self.terminal:
            return []
        if self.state == "Pending":
            return [self.runnable_at]
        return [time for wait in self.waits.open.values() for time in wait.times()]

    # ------------------------------------------------------------------------------------------- pieces

    def event(self, kind: str, data: Mapping[str, Any]) -> Event:
        event = Event(len(self.log) + 1, self.clock.now, kind, data)
        self.log.append(event)
        return event

    def _recorded(self, kind: str, data: Mapping[str, Any]) -> protocol.Recorded:
        return protocol.Recorded(seq=self.event(kind, data).seq)

    def _logged(self, kind: str, decision: protocol.ActivityDecision, **more: str) -> protocol.ActivityDecision:
        self.event(kind, {"key": decision.key, "decision": decision.decision, "attempt": decision.attempt, **more})
        return decision

    def _save(self, slices: list[protocol.Slice]) -> None:
        for part in slices:
            if part.append:
                self.slices.setdefault(part.name, []).append(part)
            else:
                self.slices[part.name] = [part]

    @staticmethod
    def _slice_state(name: str, parts: list[protocol.Slice]) -> protocol.SliceState:
        return protocol.SliceState(name=name, version=parts[-1].version, append=parts[0].append, chunks=[part.value for part in parts])

    def _leave(self, state: str) -> None:
        self.state = state
        if self.terminal:
            self._ended()

    def _ended(self) -> None:
        self.event("run.ended", {"state": self.state})
        self.waits.open.clear()
        for child in self.children:
            if child.policy != "detach":
                child.cancel()
        parent = self.parent
        if parent is not None and not parent.terminal:
            result = ChildResult(status=self.state, output=msgspec.Raw(self.output), error=self.error)
            parent.waits.children[self.run_id] = (self.clock.rfc3339(), result)
            parent.event("child.done", {"child": self.run_id, "status": self.state})
            parent.settle()
