"""The JSON that people and programs read of a run. The OpenAPI file (docs/openapi) is made from it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from perdure_operator.services.why import why_pending
from perdure_operator.store.reads import EventRow, Row


class RunView(Struct, rename="camel", kw_only=True):
    run_id: str
    namespace: str
    name: str
    pool: str
    state: str
    reason: str
    message: str
    epoch: int
    attempt: int
    failures: int
    summary: str
    objective: str
    parent: str | None
    root: str
    pod_id: str | None
    created_at: str
    state_since: str
    started_at: str | None
    finished_at: str | None
    deadline_at: str | None
    waiting_for: list[dict[str, Any]]
    result: Raw | None
    error: dict[str, Any] | None
    last_seq: int
    steps: int
    cancel_requested: bool
    paused: bool
    priority: int
    labels: dict[str, str]
    children: dict[str, int]


def _time(value: datetime | None) -> str | None:
    return value.isoformat() if value is not None else None


def run_view(row: Row, result: bytes | None = None) -> RunView:
    """``result``: the output's JSON, when it was read."""
    reason, message = row["reason"], row["message"]
    if row["state"] == "Pending":
        reason, message = why_pending(row)
    elif row["state"] == "Running":
        message = f"runs on pod {row['holder']}"
    return RunView(
        run_id=str(row["run_id"]),
        namespace=row["namespace"],
        name=row["name"],
        pool=row["pool"],
        state=row["state"],
        reason=reason,
        message=message,
        epoch=row["epoch"],
        attempt=row["attempt"],
        failures=row["failures"],
        summary=row["summary"],
        objective=row["objective"],
        parent=str(row["parent_id"]) if row["parent_id"] else None,
        root=str(row["root_id"]),
        pod_id=str(row["holder"]) if row["holder"] else None,
        created_at=row["created_at"].isoformat(),
        state_since=row["state_since"].isoformat(),
        started_at=_time(row["started_at"]),
        finished_at=_time(row["finished_at"]),
        deadline_at=_time(row["expires_at"]),
        waiting_for=[
            {k: v for k, v in item.items() if v is not None}
            for item in (msgspec.json.decode(row["waiting_for"]) if row["waiting_for"] else [])
        ],
        result=Raw(result) if result is not None else None,
        error=msgspec.json.decode(row["error"]) if row["error"] else None,
        last_seq=row["last_seq"],
        steps=row["steps"],
        cancel_requested=row["cancel_requested"],
        paused=row["paused"] or row["spec_paused"],
        priority=row["priority"],
        labels=msgspec.json.decode(row["labels"]),
        children={"active": row["children_active"], "succeeded": row["children_succeeded"], "failed": row["children_failed"]},
    )


def why(view: RunView) -> dict[str, Any]:
    """W6: what the run waits for, since when, and what would wake it; or why it does not run."""
    paused = view.paused and view.state == "Suspended"
    return {
        "name": view.name,
        "state": view.state,
        "reason": "Paused" if paused else view.reason,
        "message": "paused; resume it to go on" if paused else view.message or (view.error or {}).get("message", ""),
        "since": view.state_since,
        "waitingFor": view.waiting_for,
        "deadlineAt": view.deadline_at,
    }


def event_view(event: EventRow) -> dict[str, Any]:
    view: dict[str, Any] = {"seq": event.seq, "at": event.at, "epoch": event.epoch, "kind": event.kind, "data": event.data}
    if event.payload is not None:
        view["payload"] = Raw(event.payload)
    return view


def record(row: Row) -> dict[str, Any]:
    """A ledger or journal row in camelCase; JSON columns decoded, empty ones left out."""
    view: dict[str, Any] = {}
    for name, value in row.items():
        if value is None:
            continue
        head, *rest = name.split("_")
        view[head + "".join(word.capitalize() for word in rest)] = msgspec.json.decode(value) if name in ("data", "error") else value
    return view
