"""Why a pool gets no pods at the moment, and when it is tried again: ever more slowly.

The fleet keeps it, and writes it to the store when it changes: a run that waits for a pod that cannot start looks like a queue otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from perdure_operator.kube.names import SIDECAR_CONTAINER
from perdure_operator.store.store import PoolDemand

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
MAX_MESSAGE = 1000
_UNSPECIFIED = re.compile(r"failed quota: (?P<quota>[^:]+): must specify (?P<wanted>.+)")
_EXCEEDED = re.compile(r"exceeded quota: ")
UNSCHEDULABLE = "Unschedulable"
"""The reason of a trouble that is no failure: pods wait for a node. Nothing is tried again, so there is no next try."""


class Told(Protocol):
    """The store, as far as it is told of troubles."""

    async def tell_trouble(self, pool: str, trouble: dict[str, Any] | None, /) -> None: ...


@dataclass
class Trouble:
    """``longest``: seconds between two tries at most; ``until``: monotonic seconds before which nothing is started; ``over``: a pod has
    come up since."""

    longest: float = LONGEST_BACKOFF
    reason: str = ""
    message: str = ""
    last_words: Sequence[str] = ()
    failures: int = 0
    until: float = 0.0
    over: bool = False
    _next_try: str = field(default="", repr=False)

    def failed(self, reason: str, message: str, last_words: Sequence[str] = (), *, now: float) -> float:
        """One more pod could not be started, or broke before it did anything. Gives the pause in seconds."""
        self.reason, self.message, self.last_words, self.over = reason, message, last_words, False
        self.failures += 1
        pause = min(self.longest, FIRST_BACKOFF * 2.0 ** min(self.failures - 1, 16))
        self.until = now + pause
        self._next_try = (datetime.now(UTC) + timedelta(seconds=pause)).isoformat(timespec="seconds")
        return pause

    def in_words(self) -> dict[str, Any]:
        last = next((line.strip() for line in reversed(self.last_words) if line.strip()), "")
        message = f"{self.message}: {last}" if last else self.message
        return {
            "reason": self.reason, "message": message[:MAX_MESSAGE], "lastWords": list(self.last_words), "failures": self.failures,
            "nextTry": self._next_try or None,
        }  # fmt: skip


def without_node(pod: dict[str, Any]) -> tuple[datetime, str] | None:
    """Since when the scheduler finds no node for the pod, and what it says."""
    for said in (pod.get("status") or {}).get("conditions") or []:
        if (said["type"], said["status"], said.get("reason")) == ("PodScheduled", "False", UNSCHEDULABLE):
            since = said.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
            return datetime.fromisoformat(since), said.get("message") or "no node has room for it"
    return None


def is_disrupted(pod: dict[str, Any]) -> bool:
    """Whether the cluster is taking the pod away: a drain, a preemption, a node that is lost."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in conditions)


def quota_in_words(refusal: str) -> tuple[str, str]:
    """Reason and message, from what the API server says when a quota does not let a pod in."""
    if found := _UNSPECIFIED.search(refusal):
        wanted = found["wanted"].strip()
        return "QuotaNeedsResources", (
            f"quota {found['quota']} wants every container to say {wanted}: set resources in the pool's template, "
            f"and those of {SIDECAR_CONTAINER} in spec.sidecar.resources"
        )
    return "QuotaExceeded", refusal[found.start() :] if (found := _EXCEEDED.search(refusal)) else refusal


async def tell(store: Told, demand: Iterable[PoolDemand], troubles: dict[str, Trouble]) -> None:
    """Writes what is not there yet. What an earlier fleet has left there goes: nobody knows any more whether it is so."""
    for pool in demand:
        trouble = troubles.get(pool.pool)
        now = None if trouble is None or trouble.over else trouble.in_words()
        if pool.trouble != now:
            await store.tell_trouble(pool.pool, now)
