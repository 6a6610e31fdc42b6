"""The oracle's rules of effects: the ledger (E1-E5). Part of memory.py."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from perdure_operator.domain.errors import UnknownActivity
from perdure_operator.store.memory_records import Answer, Executor, LedgerEntry, Run
from perdure_operator.store.operations import Control

PROOF_SECONDS = 30


class LedgerRules:
    """``jitter`` gives the random part of the n-th backoff of a run, 0 to 1."""

    def __init__(self, now: datetime, jitter: Callable[[UUID, int], float]) -> None:
        self.now = now
        self.jitter = jitter

    def backoff(self, run: Run, n: int) -> float:
        """L5: base * 2^(n-1), capped, times 0.5 to 1. Seconds."""
        longest = min(run.columns["max_backoff_seconds"], run.columns["backoff_seconds"] * 2 ** min(n - 1, 30))
        return float(longest * (0.5 + 0.5 * self.jitter(run.id, n)))

    def _grant_execution(self, run: Run, entry: LedgerEntry, body: dict[str, Any], after: float) -> None:
        """A new token. The executor can act from ``after`` on until the tool's timeout and the lease have passed."""
        entry.past_tokens.add(entry.token)
        entry.token, entry.state, entry.attempts = str(body["token"]), "RUNNING", entry.attempts + 1
        before, entry.epoch = entry.epoch, run.epoch
        entry.holder, entry.executor_ended, entry.error, entry.absent, entry.asked = run.holder, False, None, False, False
        self._forget_executor(run, before)
        entry.safe_at = self.now + timedelta(seconds=after + entry.timeout + body["leaseSeconds"])
        run.record("activity.started")

    def _still_granted(self, run: Run, answer: Answer, body: dict[str, Any]) -> bool:
        """Of a stored answer under its own lease. Who hears of an execution now starts now."""
        if answer.get("decision") not in ("execute", "retry"):
            return True
        entry = run.ledger[answer["key"]]
        if (entry.state, entry.token) != ("RUNNING", answer["token"]):
            return False
        after = timedelta(seconds=answer["retryAfterSeconds"] + entry.timeout + body["leaseSeconds"])
        entry.safe_at = max(entry.safe_at, self.now + after)
        return True

    def _decision(self, entry: LedgerEntry, decision: str, after: float = 0.0, policy: str | None = None) -> Answer:
        token = entry.token if decision in ("execute", "retry") else None
        response = entry.response if decision == "receipt" else None
        return {
            "decision": decision, "key": entry.key, "attempt": entry.attempts, "effect": entry.effect, "token": token,
            "policy": policy or entry.policy, "retryAfterSeconds": max(after, 0.0), "response": response,
            "providerRef": entry.provider_ref, "error": entry.error,
        }  # fmt: skip

    def _activity_begin(self, run: Run, op: Control) -> Answer:
        body = op.body
        entry = run.ledger.get(body["key"])
        if entry is None:
            safe_at = self.now + timedelta(seconds=body["timeoutSeconds"] + body["leaseSeconds"])
            entry = LedgerEntry(
                body["key"], body["effect"], body["policy"], body["fingerprint"], str(body["token"]), safe_at, run.holder, run.epoch,
                body["timeoutSeconds"], body.get("maxRetries"),
            )  # fmt: skip
            run.ledger[entry.key] = entry
            run.record("activity.started")
            return self._decision(entry, "execute")
        if entry.fingerprint != body["fingerprint"] and not body.get("scopeIsIdentity"):
            return self._decision(entry, "conflict")
        if entry.state == "UNKNOWN":
            policy, wait = body["policy"], self._gone_after(run, entry, body["policy"])
            if wait is None and (policy == "assume-not-done" or (policy == "query" and entry.absent)):
                return self._decision(entry, "unknown", policy="ask")
            entry.asked |= policy == "query" and wait == 0
            if policy in ("query", "ask", "fail") or wait:
                return self._decision(entry, "unknown", 0.0 if policy in ("ask", "fail") else wait or 0.0, policy)
            entry.policy, entry.timeout, entry.max_retries = body["policy"], body["timeoutSeconds"], body.get("maxRetries")
            self._grant_execution(run, entry, body, 0.0)
            return self._decision(entry, "execute")
        return self._known(run, entry, body, timeout=body["timeoutSeconds"], max_retries=body.get("maxRetries"))

    def _known(self, run: Run, entry: LedgerEntry, body: dict[str, Any], *, timeout: float, max_retries: int | None) -> Answer:
        """An entry that is not UNKNOWN. FAILED is proven not executed: again, up to the limit, after a backoff."""
        if entry.state == "SUCCEEDED":
            return self._decision(entry, "receipt")
        if entry.state == "RUNNING":
            return self._decision(entry, "busy", 0.2)
        if entry.attempts > (run.columns["max_tool_retries"] if max_retries is None else max_retries):
            return self._decision(entry, "failed")
        entry.timeout, entry.max_retries = timeout, max_retries
        after = self.backoff(run, entry.attempts)
        self._grant_execution(run, entry, body, after)
        return self._decision(entry, "retry", after)

    def _gone_after(self, run: Run, entry: LedgerEntry, policy: str) -> float | None:
        """E5: 0 when the executor of an UNKNOWN entry is proven gone, or where a second call does no harm; else the seconds for which a
        proof may come. None: none is to be expected."""
        executor = run.executors.get(entry.epoch)
        if entry.effect != "external" or entry.executor_ended or (executor and executor.gone):
            return 0.0
        left = (entry.safe_at - self.now).total_seconds()
        if policy == "retry-same-key":
            return max(left, 0.0)
        if executor:
            left = max(left, (executor.lost_at - self.now).total_seconds() + run.columns["grace_seconds"] + PROOF_SECONDS)
        return left if left > 0 else None

    def _forget_executor(self, run: Run, epoch: int) -> None:
        """What nothing UNKNOWN refers to; of a live lease there may be more to come."""
        live = run.holder is not None and run.epoch == epoch
        if not live and not any(entry.state == "UNKNOWN" and entry.epoch == epoch for entry in run.ledger.values()):
            run.executors.pop(epoch, None)

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
            before = entry.state
            entry.past_tokens.add(entry.token)
            entry.token, entry.state = token, state
            entry.response = op.payload if state == "SUCCEEDED" else None
            entry.provider_ref, entry.error = body.get("providerRef"), body.get("error")
            entry.executor_ended |= current and not body.get("stillRunning", False)
            if before == "UNKNOWN":
                self._forget_executor(run, entry.epoch)
            elif state == "UNKNOWN" and entry.executor_ended:
                entry.asked = True
            elif state == "UNKNOWN" and entry.holder is not None:
                run.executors.setdefault(entry.epoch, Executor(entry.holder, self.now))
            if ended:
                run.record("activity.evidence" if evidence else f"activity.{state.lower()}")
        if twice and ended:
            run.record("activity.duplicate_effect")
        return {"state": entry.state, "seq": len(run.log), "evidence": evidence}

    def _activity_resolve(self, run: Run, op: Control) -> Answer:
        """That it happened is believed. That it did not: of a person at once, of a provider only once nobody can make it happen."""
        entry = run.ledger.get(op.body["key"])
        if entry is None:
            raise UnknownActivity
        if entry.state in ("SUCCEEDED", "RUNNING") or (entry.state != "UNKNOWN" and not op.body["happened"]):
            return self._known(run, entry, op.body, timeout=entry.timeout, max_retries=entry.max_retries)
        if op.body["happened"]:
            entry.state, entry.response, entry.provider_ref, entry.error = "SUCCEEDED", op.payload, op.body.get("providerRef"), None
        else:
            person = op.body.get("by") == "person"
            wait = 0.0 if person else self._gone_after(run, entry, "query")
            if wait is None:
                entry.absent = True
                return self._decision(entry, "unknown", policy="ask")
            if wait or (entry.effect == "external" and not entry.asked and not person):
                return self._decision(entry, "unknown", wait or 0.1)
            entry.state = "FAILED"
        self._forget_executor(run, entry.epoch)
        run.record("activity.resolved")
        return self._known(run, entry, op.body, timeout=entry.timeout, max_retries=entry.max_retries)
