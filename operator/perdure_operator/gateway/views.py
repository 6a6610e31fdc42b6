"""The JSON that people and programs read of a run. The OpenAPI file (docs/openapi) is made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from perdure.protocol import asked_about
from perdure_operator.services.why import in_words, paused_by
from perdure_operator.store.operations import Limits
from perdure_operator.store.payload import in_place
from perdure_operator.store.reads import Call, EventRow, Row


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
    revision: str | None
    created_at: str
    state_since: str
    started_at: str | None
    finished_at: str | None
    deadline_at: str | None
    waiting_for: list[dict[str, Any]]
    spec: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    result: Raw | UnsetType | None
    error: dict[str, Any] | None
    last_seq: int
    steps: int
    bytes: int
    stored_bytes: int
    cancel_requested: bool
    paused: bool
    paused_by: list[str]
    priority: int
    labels: dict[str, str]
    children: dict[str, int]


def _time(value: datetime | None) -> str | None:
    return value.isoformat() if value is not None else None


def run_view(row: Row, *, given: tuple[bytes, bytes] | None = None, result: bytes | None = None) -> RunView:
    """``given``: spec and input as JSON, when they were read; ``result``: that of the output. Without it a large one is left out: that is
    not the same as none."""
    reason, message = in_words(row)
    paused = paused_by(row)
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
        revision=row["revision"],
        created_at=row["created_at"].isoformat(),
        state_since=row["state_since"].isoformat(),
        started_at=_time(row["started_at"]),
        finished_at=_time(row["finished_at"]),
        deadline_at=_time(row["expires_at"]),
        waiting_for=[
            {k: v for k, v in item.items() if v is not None}
            for item in (msgspec.json.decode(row["waiting_for"]) if row["waiting_for"] else [])
        ],
        spec=UNSET if given is None else Raw(given[0]),
        input=UNSET if given is None else Raw(given[1]),
        result=_result(row["result"], result),
        error=msgspec.json.decode(row["error"]) if row["error"] else None,
        last_seq=row["last_seq"],
        steps=row["steps"],
        bytes=row["raw_bytes"],
        stored_bytes=row["stored_bytes"],
        cancel_requested=row["cancel_requested"],
        paused=bool(paused),
        paused_by=paused,
        priority=row["priority"],
        labels=msgspec.json.decode(row["labels"]),
        children={"active": row["children_active"], "succeeded": row["children_succeeded"], "failed": row["children_failed"]},
    )


def _result(stored: bytes | None, read: bytes | None) -> Raw | UnsetType | None:
    if stored is None:
        return None
    found = in_place(stored) if read is None else read
    return UNSET if found is None else Raw(found)


def why(
    view: RunView, calls: Sequence[Call], refusals: Mapping[str, Any], trouble: dict[str, Any] | None, limits: Limits | None
) -> dict[str, Any]:
    """W6: what the run waits for, since when, and what would wake it; or why it does not run. ``calls``: those that a person is asked
    about; ``refusals``: of signals that came and were of no use, by name; ``trouble``: why the pool has no pod for it; ``limits``: of
    what it may write, when it comes near to them."""
    about = {call.key: call for call in calls}

    def told(wait: dict[str, Any]) -> dict[str, Any]:
        key, refused = question_of(wait), refusals.get(wait["name"]) if wait["kind"] == "signal" else None
        return wait | ({"call": about[key]} if key in about else {}) | ({"refused": refused} if refused else {})

    return {
        "name": view.name,
        "state": view.state,
        "reason": view.reason,
        "message": view.message or (view.error or {}).get("message", ""),
        "since": view.state_since,
        "pausedBy": view.paused_by,
        "poolTrouble": trouble,
        "waitingFor": [told(wait) for wait in view.waiting_for],
        "deadlineAt": view.deadline_at,
        "size": {"bytes": view.bytes, "maxBytes": limits.raw, "storedBytes": view.stored_bytes, "maxStoredBytes": limits.stored}
        if limits is not None
        else None,
    }


def question_of(wait: dict[str, Any]) -> str | None:
    """Key of the effect that a person is asked about, if that is what is waited for."""
    return asked_about(wait["name"]) if wait["kind"] == "signal" else None


def event_view(event: EventRow) -> dict[str, Any]:
    view: dict[str, Any] = {"seq": event.seq, "at": event.at, "epoch": event.epoch, "kind": event.kind, "data": event.data}
    if event.payload is not None:
        view["payload"] = Raw(event.payload)
    return view


def record(row: Row) -> dict[str, Any]:
    """A ledger or journal row in camelCase; JSON columns decoded, empty ones left out, and payloads that are not at hand with the row."""
    view: dict[str, Any] = {}
    for name, value in row.items():
        if value is None:
            continue
        head, *rest = name.split("_")
        shown = head + "".join(word.capitalize() for word in rest)
        if name in ("response", "output"):
            if (small := in_place(value)) is not None:
                view[shown] = Raw(small)
        else:
            view[shown] = msgspec.json.decode(value) if name in ("data", "error") else value
    return view
