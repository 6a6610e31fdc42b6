"""The largest status of a run."""

from __future__ import annotations

import json
from typing import Any

from perdure_operator.kube.api.status import MAX_RESULT_BYTES, AgentRunStatus

TIME = "2026-11-22T03:04:05Z"


def size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())


def longest_status(text: str) -> dict[str, Any]:
    """As long as the schema lets it be, of characters ``text``."""
    condition = {"status": "Unknown", "reason": "R" * 256, "message": text * 1024, "lastTransitionTime": TIME, "observedGeneration": 10**9}
    full = {
        "observedGeneration": 10**9,
        "runID": "0" * 36,
        "revision": "r" * 128,
        "conditions": [{"type": kind, **condition} for kind in ("Succeeded", "Suspended", "PodScheduled", "Finished")],
        "phase": "Suspended",
        "attempt": 10**9,
        "podName": "p" * 253,
        "waitReason": text * 253,
        "waitingFor": [{"kind": "child_done", "name": text * 253, "at": TIME, "since": TIME}] * 16,
        "progress": {"done": 10_000, "total": 10_000, "current": text * 253},
        "usage": {"steps": 10_000, "toolCalls": 10_000, "tokens": 10**12, "cost": "9" * 24},
        "children": {"active": 10**9, "succeeded": 10**9, "failed": 10**9},
        "questions": [{"id": f"{n:064}", "text": text * 1024, "choices": [text * 253] * 16} for n in range(8)],
        "result": "r" * (MAX_RESULT_BYTES - 2),
        "parentRef": {"name": "p" * 253},
        "startTime": TIME,
        "completionTime": TIME,
        "lastSequence": 2**53 - 1,
        "projectedAt": TIME,
    }
    assert AgentRunStatus.model_validate(full, by_alias=True, by_name=False).to_json() == full
    return full
