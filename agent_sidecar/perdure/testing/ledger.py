"""The ledger of effects in memory: the decisions that a gateway takes, UNKNOWN included (E1-E5).

Simpler than a gateway in one way: there are no pools, so a tool that declares no effect class is external.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import msgspec

from perdure import protocol
from perdure.protocol import ActivityBegin, ActivityDecision, ActivityEnd, ActivityRecorded, ActivityResolve
from perdure.testing.clock import Clock

LEASE_SECONDS = 15.0
DEFAULT_RETRIES = 5
_POLICY = {"read_only": "assume-not-done", "local": "assume-not-done", "memory": "retry-same-key", "external": "ask"}


class UnknownToken(Exception):  # becomes a problem
    """No execution was granted with this token."""


@dataclass
class Entry:
    """``executor_gone``: whoever executed it cannot act any more. ``grants``: how often an execution was permitted."""

    key: str
    tool: str
    effect: str
    policy: str
    fingerprint: str
    occurrence: int
    step: str | None
    token: str
    safe_at: float
    max_retries: int
    seq: int = 0
    state: str = "RUNNING"
    attempts: int = 1
    executor_gone: bool = False
    absent: bool = False
    response: bytes = b"null"
    provider_ref: str | None = None
    error: protocol.ErrorInfo | None = None
    past_tokens: list[str] = field(default_factory=list)


class MemoryLedger:
    def __init__(self, run_id: str, clock: Clock) -> None:
        self.entries: dict[str, Entry] = {}
        self._run_id = run_id
        self._clock = clock
        self._tokens = 0

    def begin(self, body: ActivityBegin) -> ActivityDecision:
        arguments: Any = msgspec.json.decode(body.arguments)
        key, print_ = self._identify(body, arguments)
        entry = self.entries.get(key)
        if entry is None:
            effect = body.effect or "external"
            entry = Entry(
                key=key,
                tool=body.tool,
                effect=effect,
                policy=body.on_unknown or _POLICY[effect],
                fingerprint=print_,
                occurrence=body.occurrence,
                step=body.step,
                token=self._token(),
                safe_at=self._clock.now + body.timeout_seconds + LEASE_SECONDS,
                max_retries=DEFAULT_RETRIES if body.max_retries is None else body.max_retries,
            )
            self.entries[key] = entry
            return self._answer(entry, "execute")
        if entry.fingerprint != print_ and not body.scope_is_identity:
            message = "the same effect was begun with other arguments: call it with those, or raise the occurrence if a second one is meant"
            return self._answer(entry, "conflict", message=message)
        return self._again(entry, body.timeout_seconds)

    def end(self, body: ActivityEnd, *, live: bool) -> ActivityRecorded:
        entry = self.entries.get(body.key)
        if entry is None or body.token not in (entry.token, *entry.past_tokens):
            raise UnknownToken(body.key)
        current = body.token == entry.token
        evidence = not (live and current and entry.state == "RUNNING")
        taken = current and entry.state in ("RUNNING", "UNKNOWN")
        if taken or (entry.state == "UNKNOWN" and body.state == "succeeded"):
            entry.state = body.state.upper()
            entry.response = bytes(body.response)
            entry.provider_ref = body.provider_ref
            entry.error = body.error
            entry.executor_gone = entry.executor_gone or (current and not body.still_running)
        return ActivityRecorded(state=entry.state, evidence=evidence)

    def resolve(self, body: ActivityResolve) -> ActivityDecision:
        entry = self.entries[body.key]
        if entry.state == "UNKNOWN":
            if body.happened:
                entry.state, entry.response, entry.provider_ref = "SUCCEEDED", bytes(body.response), body.provider_ref
                entry.error = None  # it was that of the call of which nobody knew
            elif body.by == "query" and (left := self._gone_after(entry, "query")) != 0:
                entry.absent = left is None
                message = "not found, but the earlier executor may still act"
                return self._answer(entry, "unknown", after=left or 0.0, message=message, policy="query" if left else "ask")
            else:
                entry.state = "FAILED"
        return self._again(entry, 300.0)

    def running(self) -> str:
        """The tools whose calls are under way."""
        return ", ".join(sorted({entry.tool for entry in self.entries.values() if entry.state == "RUNNING"}))

    def executor_lost(self, *, gone: bool) -> None:
        """The lease ended. ``gone``: its process was seen to be dead."""
        for entry in self.entries.values():
            if entry.state == "RUNNING":
                entry.state = "UNKNOWN"
                entry.executor_gone = gone

    def listed(self) -> list[protocol.LedgerEntry]:
        return [
            protocol.LedgerEntry(
                key=entry.key,
                seq=entry.seq,
                tool=entry.tool,
                effect=entry.effect,
                state=entry.state,
                occurrence=entry.occurrence,
                step=entry.step,
                provider_ref=entry.provider_ref,
            )
            for entry in self.entries.values()
        ]

    def _again(self, entry: Entry, timeout: float) -> ActivityDecision:
        if entry.state == "SUCCEEDED":
            return self._answer(entry, "receipt", message="this effect has happened; raise the occurrence if a second one is meant")
        if entry.state == "RUNNING":
            return self._answer(entry, "busy", after=0.2)
        if entry.state == "UNKNOWN":
            left = self._gone_after(entry, entry.policy)
            if left is None and (entry.policy == "assume-not-done" or (entry.policy == "query" and entry.absent)):
                message = "nothing proves that the earlier executor is gone, so it may still act: a person must decide"
                return self._answer(entry, "unknown", message=message, policy="ask")
            if entry.policy in ("query", "ask", "fail"):
                after = left or 0.0 if entry.policy == "query" else 0.0
                return self._answer(entry, "unknown", after=after, message="nobody knows whether this effect happened")
            if left:
                return self._answer(entry, "unknown", after=left)
            return self._grant(entry, "execute", timeout)
        if entry.attempts > entry.max_retries:
            return self._answer(entry, "failed", message="the retries of this call are used up")
        return self._grant(entry, "retry", timeout)

    def _grant(self, entry: Entry, decision: str, timeout: float) -> ActivityDecision:
        entry.past_tokens.append(entry.token)
        entry.token = self._token()
        entry.state, entry.error, entry.executor_gone = "RUNNING", None, False
        entry.absent = False
        entry.attempts += 1
        entry.safe_at = self._clock.now + timeout + LEASE_SECONDS
        return self._answer(entry, decision, after=0.1 if decision == "retry" else 0.0)

    def _gone_after(self, entry: Entry, policy: str) -> float | None:
        """0: the old executor is proven gone, or a second call would do no harm. Else the seconds for which a proof is waited for; None
        when that is over."""
        if entry.effect != "external" or entry.executor_gone:
            return 0.0
        left = max(0.0, entry.safe_at - self._clock.now)
        return left if left > 0 or policy == "retry-same-key" else None

    def _identify(self, body: ActivityBegin, arguments: Any) -> tuple[str, str]:
        counted = (
            {name: value for name, value in arguments.items() if name not in body.ignore} if isinstance(arguments, dict) else arguments
        )
        identity = counted if body.scope is None else {name: arguments[name] for name in body.scope}
        return (
            _digest([self._run_id, body.namespace, body.tool, identity, body.occurrence]),
            _digest(counted)[:32],
        )

    def _token(self) -> str:
        self._tokens += 1
        return str(UUID(int=self._tokens))

    def _answer(self, entry: Entry, decision: Any, *, message: str = "", after: float = 0.0, policy: str = "") -> ActivityDecision:
        return ActivityDecision(
            decision=decision,
            key=entry.key,
            token=entry.token if decision in ("execute", "retry") else None,
            attempt=entry.attempts,
            effect=entry.effect,
            policy=policy or entry.policy,
            retry_after_seconds=after,
            response=msgspec.Raw(entry.response) if decision == "receipt" else msgspec.UNSET,
            provider_ref=entry.provider_ref,
            error=entry.error,
            message=message,
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(_plain(value), order="sorted")).hexdigest()


def _plain(value: Any) -> Any:
    """Equal numbers look equal, as they do to a gateway: 1.0 is 1, and 1e20 is 100000000000000000000."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
