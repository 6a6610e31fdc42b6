"""Why a run does not run, in words (W6)."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from perdure_operator.services.conditions import rfc3339
from perdure_operator.services.trouble import UNSCHEDULABLE
from perdure_operator.store.reads import Row

POOL_NOT_FOUND = "PoolNotFound"
_PENDING = {
    "BackOff": "the last attempt failed{failure}; the next one is at {runnable_at}",
    POOL_NOT_FOUND: "there is no AgentPool {pool}",
    "PoolLimit": "pool {pool} runs as many runs as its maxPods allows",
    "TenantLimit": "namespace {namespace} runs as many runs as its limit allows",
    "Paused": "paused; resume it to go on",
    "CancelRequested": "a cancel was requested",
    "DeadlineExceeded": "its deadline has passed",
    None: "queued{failed}: waits for an idle pod of pool {pool}",
}
LOSSES = "LossesExhausted"
UNDELIVERABLE = "LeaseUndeliverable"
"""What its workers are to be told cannot be told to them."""
_WENT_ON = frozenset({"", "Woken", "Resumed"})
"""Reasons of a run that is queued and has not just failed."""


def in_words(row: Row) -> tuple[str, str]:
    """Reason and message of the state that a run is in."""
    match row["state"]:
        case "Pending":
            return _pending(row)
        case "Running":
            return row["reason"], f"runs on pod {row['holder']}"
        case "Suspended" if row["reason"] != LOSSES and (by := paused_by(row)):
            return "Paused", _PAUSED[by[-1]]
    return row["reason"], row["message"]


_PAUSED = {"person": "paused; resume it to go on", "losses": "paused", "spec": "paused by spec.desiredState: Suspended"}


def paused_by(row: Row) -> list[str]:
    """Who must say that the run may go on: a ``person`` who paused it, the ``spec`` of its resource, or ``losses`` of too many workers."""
    verb = "losses" if row["reason"] == LOSSES else "person"
    return ([verb] if row["paused"] else []) + (["spec"] if row["spec_paused"] else [])


def trouble_of_pool(row: Row) -> dict[str, Any] | None:
    """Why there is no pod for a run that is queued for one."""
    stored = row["pool_trouble"]
    return msgspec.json.decode(stored) if stored is not None and row["not_admitted"] is None else None


def pool_fails(row: Row, trouble: dict[str, Any]) -> str:
    what = f"are {UNSCHEDULABLE}" if trouble["reason"] == UNSCHEDULABLE else "fail"
    return f"queued, but pods of pool {row['pool']} {what}: {trouble['message']}"


def _next_try(at: str | None) -> str:
    if at is None:
        return ""
    left = (datetime.fromisoformat(at) - datetime.now(UTC)).total_seconds()
    return f"; the next try is in {math.ceil(left)} s" if left > 0 else "; it is being tried again"


def _pending(row: Row) -> tuple[str, str]:
    code = row["not_admitted"]
    if trouble := trouble_of_pool(row):
        return "PoolNotReady", pool_fails(row, trouble) + _next_try(trouble["nextTry"])
    failure = ": ".join(part for part in (row["reason"], row["message"]) if part)
    told = row["reason"] == UNDELIVERABLE or (row["failures"] and row["reason"] not in _WENT_ON)
    failed = f" again after attempt {row['attempt']} failed ({failure[:300]})" if told else ""
    words = _PENDING.get(code, code or "").format(
        runnable_at=rfc3339(row["runnable_at"]), pool=row["pool"], namespace=row["namespace"], failure=failure and f" ({failure[:300]})",
        failed=failed,
    )  # fmt: skip
    return code or "Queued", words
