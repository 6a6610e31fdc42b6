"""A run's row as the status of its resource: bounded whatever the run does, conditions first, the phase derived."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec.json import decode

from perdure_operator.domain.run import TERMINAL
from perdure_operator.kube.api.status import fitted
from perdure_operator.kube.names import pod_name
from perdure_operator.services.conditions import STALLED, Verdict, condition, rfc3339
from perdure_operator.services.events import Event
from perdure_operator.services.why import POOL_NOT_FOUND, in_words, pool_fails, trouble_of_pool
from perdure_operator.store.payload import in_place
from perdure_operator.store.reads import Row

Json = dict[str, Any]

MAX_WAITS = 8
MAX_WAIT_REASON = 253
MAX_RESULT_BYTES = 1024


def status_of(row: Row, generation: int, resource: Json) -> Json:
    """``resource``: what it says now; conditions that stay keep the time of their last change."""
    old = resource.get("status") or {}
    state, waits = row["state"], decode(row["waiting_for"]) if row["waiting_for"] else []
    status: Json = {
        "observedGeneration": generation,
        "runID": str(row["run_id"]),
        "revision": row["revision"],
        "conditions": _conditions(row, generation, resource),
        "phase": state,
        "attempt": row["attempt"],
        "podName": pod_name(row["pool"].partition("/")[2], row["holder"]) if row["holder"] else None,
        "waitReason": _wait_reason(row, waits)[:MAX_WAIT_REASON] or None,
        "waitingFor": [_wait(wait) for wait in waits[:MAX_WAITS]] if state == "Suspended" else None,
        "progress": {"done": row["steps"]},
        "usage": {"steps": row["steps"]},
        "children": _children(row),
        "parentRef": {"name": row["parent_name"]} if row["parent_name"] else None,
        "startTime": rfc3339(row["started_at"]),
        "completionTime": rfc3339(row["finished_at"]),
        "lastSequence": row["last_seq"],
        "projectedAt": rfc3339(datetime.now(UTC)),
        **_result(row),
    }
    # A merge patch keeps what it does not name: what is over must be said to be over.
    return fitted({key: value for key, value in status.items() if value is not None or key in old})


def _conditions(row: Row, generation: int, resource: Json) -> list[Json]:
    state = row["state"]
    reason, message = in_words(row) if state in ("Pending", "Suspended") else (row["reason"], row["message"])
    if trouble := trouble_of_pool(row):
        # Without the time of the next try: nobody writes this again for each.
        message = pool_fails(row, trouble)
    reason = reason or state
    error = decode(row["error"]) if row["error"] else {}
    message = message or error.get("message", "")
    finished = state in TERMINAL
    known = {
        "Succeeded": ("True" if state == "Succeeded" else "False" if finished else "Unknown", reason),
        "Suspended": ("True" if state == "Suspended" else "False", reason if state == "Suspended" else state),
        "PodScheduled": ("True" if state == "Running" else "False", reason if state in ("Pending", "Suspended") else state),
        "Finished": ("True" if finished else "False", state),
        STALLED: ("True" if state == "Failed" or (state == "Pending" and reason == POOL_NOT_FOUND) else "False", reason),
    }
    return [
        condition(kind, Verdict(truth, _identifier(why), message), resource, since=row["state_since"], generation=generation)
        for kind, (truth, why) in known.items()
    ]


def _identifier(text: str) -> str:
    """A reason as the API wants it: an agent's error type may be any text."""
    word = "".join(part[:1].upper() + part[1:] for part in re.findall(r"[A-Za-z0-9_,:]+", text))[:200].rstrip(",:")
    return word if word[:1].isalpha() else f"Error{word}"


def _wait_reason(row: Row, waits: list[Json]) -> str:
    """The column WAITING-FOR."""
    if row["state"] == "Pending":
        return in_words(row)[0]
    if row["state"] != "Suspended":
        return ""
    if row["paused"] or row["spec_paused"]:
        return "resume"
    words: dict[str, int] = {}
    for wait in waits:
        tool = wait.get("tool")
        word = f"decision about {tool}" if tool else f"signal {wait['name']}" if wait["kind"] == "signal" else wait["kind"]
        words[word] = words.get(word, 0) + 1
    return ", ".join(word if count == 1 else f"{count} × {word}" for word, count in words.items())


def _wait(wait: Json) -> Json:
    return {"kind": wait["kind"], "name": (wait["name"] or "")[:253]} | {
        key: rfc3339(datetime.fromisoformat(value)) for key in ("at", "since") if (value := wait.get(key)) is not None
    }


def _children(row: Row) -> Json | None:
    counts = {"active": row["children_active"], "succeeded": row["children_succeeded"], "failed": row["children_failed"]}
    return counts if any(counts.values()) else None


def _result(row: Row) -> Json:
    stored = row["result"]
    if stored is None:
        return {}
    if (small := in_place(stored)) is not None and len(small) <= MAX_RESULT_BYTES:
        return {"result": decode(small)}
    return {"resultRef": f"perdure:run/{row['run_id']}/result"}


def events_of(row: Row, status: Json, old: Json) -> Iterator[Event]:
    """What this change of status is worth telling. A start is told even if more has happened since."""
    if status["phase"] != "Running" and status.get("startTime") and not old.get("startTime"):
        yield Event("Normal", "Started", f"attempt {status['attempt']}")
    if (event := _transition(status, old) or _obstacle(row, status, old)) is not None:
        yield event


def _transition(status: Json, old: Json) -> Event | None:
    phase, before = status["phase"], old.get("phase")
    message = _message(status)
    if phase == before and status["attempt"] == old.get("attempt"):
        return None
    if phase == "Running":
        reason = "Resumed" if before == "Suspended" or old.get("startTime") else "Started"
        return Event("Normal", reason, f"attempt {status['attempt']} on pod {status.get('podName')}")
    if phase == "Suspended":
        return Event("Normal", "Suspended", message or f"waits for {status.get('waitReason')}")
    if phase in TERMINAL:
        return Event("Normal" if phase == "Succeeded" else "Warning", phase, message or f"after {status['attempt']} attempts")
    if before == "Running":
        return Event("Warning", "Retrying", message)
    return None


def _obstacle(row: Row, status: Json, old: Json) -> Event | None:
    """Why a queued run gets no pod, if that is more than a queue and news."""
    if status["phase"] != "Pending" or (message := _message(status)) == _message(old):
        return None
    if trouble := trouble_of_pool(row):
        return Event("Warning", _identifier(trouble["reason"]), message)
    return Event("Warning", POOL_NOT_FOUND, message) if row["not_admitted"] == POOL_NOT_FOUND else None


def _message(status: Json) -> str:
    return next((c.get("message", "") for c in status.get("conditions") or [] if c["type"] == "Succeeded"), "")
