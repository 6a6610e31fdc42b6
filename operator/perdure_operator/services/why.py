"""Why a run does not run, in words (W6)."""

from __future__ import annotations

from perdure_operator.store.reads import Row

_PENDING = {
    "BackOff": "the last attempt failed; it is tried again at {runnable_at}",
    "PoolNotFound": "there is no AgentPool {pool}",
    "PoolLimit": "pool {pool} runs as many runs as its maxPods allows",
    "TenantLimit": "namespace {namespace} runs as many runs as its limit allows",
    "Paused": "paused; resume it to go on",
    "CancelRequested": "a cancel was requested",
    "DeadlineExceeded": "its deadline has passed",
    None: "queued: waits for an idle pod of pool {pool}",
}


def why_pending(row: Row) -> tuple[str, str]:
    """Reason and message for a run that waits for a lease."""
    code = row["not_admitted"]
    words = _PENDING.get(code, code or "").format(runnable_at=row["runnable_at"].isoformat(), pool=row["pool"], namespace=row["namespace"])
    return code or "Queued", words
