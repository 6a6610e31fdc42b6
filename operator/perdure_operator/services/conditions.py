"""Conditions and times as the conventions of Kubernetes' API want them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

MAX_MESSAGE = 1000


@dataclass(frozen=True)
class Verdict:
    """``status``: True, False or Unknown. ``reason``: one word in CamelCase."""

    status: str
    reason: str
    message: str = ""


READY = Verdict("True", "Ready")
STALLED = "Stalled"
"""The condition by which kstatus, and so Helm and Flux, know that nothing goes on before somebody does something."""


def condition(kind: str, verdict: Verdict, resource: Json, *, since: datetime | None = None, generation: int | None = None) -> Json:
    """The condition of ``resource`` from now on. One whose status stays keeps the time of its last change; otherwise that is ``since``,
    by default now. ``generation``: of the spec that was looked at, by default the resource's."""
    before = condition_of(resource, kind)
    return {
        "type": kind,
        "status": verdict.status,
        "reason": verdict.reason,
        "message": verdict.message[:MAX_MESSAGE],
        "lastTransitionTime": before["lastTransitionTime"]
        if before.get("status") == verdict.status
        else rfc3339(since or datetime.now(UTC)),
        "observedGeneration": resource["metadata"]["generation"] if generation is None else generation,
    }


def condition_of(resource: Json, kind: str) -> Json:
    """Empty where the resource has none of this kind."""
    return next((c for c in (resource.get("status") or {}).get("conditions") or [] if c["type"] == kind), {})


def rfc3339(value: datetime | None) -> str | None:
    """Whole seconds, as Kubernetes writes them."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if value is not None else None
