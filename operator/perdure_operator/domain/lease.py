"""What the end of a worker says about the attempt (L5)."""

from __future__ import annotations

from enum import StrEnum


class Weight(StrEnum):
    """How much the end of a worker counts.

    ``failure``: the attempt failed by its own doing; it counts against maxRetries and is tried again after a backoff. ``loss``: the worker
    was lost; only losses without progress in between add up. ``none``: somebody ended it on purpose.
    """

    FAILURE = "failure"
    LOSS = "loss"
    NONE = "none"


_FAILURES = frozenset({"AgentExited", "AgentKilled", "OOMKilled"})
_ON_PURPOSE = frozenset({"Stopped", "DevStopped", "Evicted", "PodDeleted"})


_TAKEN = frozenset({"Evicted", "PodDeleted"})


def taken_away(reason: str) -> bool:
    """Whether somebody else than the pod itself has ended it, by the reason for which it was seen ended."""
    return reason in _TAKEN


def weight(reason: str) -> Weight:
    """By the reason for which a pod was seen ended. Unknown reasons are losses."""
    if reason in _FAILURES:
        return Weight.FAILURE
    return Weight.NONE if reason in _ON_PURPOSE else Weight.LOSS
