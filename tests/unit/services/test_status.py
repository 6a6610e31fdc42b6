"""Which Kubernetes events a change of status is worth."""

from __future__ import annotations

from typing import Any

import pytest

from perdure_operator.services.status import events_of

QUEUED: dict[str, Any] = {"pool": "default/p", "pool_trouble": None, "not_admitted": None}
NEW: dict[str, Any] = {"phase": "Pending", "attempt": 0}
RUNNING = {"phase": "Running", "attempt": 1, "startTime": "2026-11-22T12:00:00Z", "podName": "p-1"}
SUSPENDED = {**RUNNING, "phase": "Suspended"}


@pytest.mark.parametrize(
    ("old", "new", "reasons"),
    [
        ({}, NEW, []),
        (NEW, RUNNING, ["Started"]),
        (RUNNING, SUSPENDED, ["Suspended"]),
        (SUSPENDED, RUNNING, ["Resumed"]),
        (SUSPENDED, SUSPENDED, []),
        (RUNNING, {**RUNNING, "phase": "Pending"}, ["Retrying"]),
        # What happened between two looks is told all the same.
        (NEW, SUSPENDED, ["Started", "Suspended"]),
        ({}, {**RUNNING, "phase": "Failed"}, ["Started", "Failed"]),
        (SUSPENDED, {**RUNNING, "phase": "Succeeded"}, ["Succeeded"]),
    ],
)
def test_events(old: dict[str, Any], new: dict[str, Any], reasons: list[str]) -> None:
    assert [event.reason for event in events_of(QUEUED, {"conditions": [], **new}, old)] == reasons


def _pending(message: str) -> dict[str, Any]:
    return {**NEW, "conditions": [{"type": "Succeeded", "message": message}]}


@pytest.mark.parametrize(
    ("row", "reasons"),
    [
        ({}, []),
        ({"not_admitted": "PoolLimit"}, []),
        ({"not_admitted": "PoolNotFound"}, ["PoolNotFound"]),
        ({"pool_trouble": b'{"reason":"ErrImagePull","message":"no such image"}'}, ["ErrImagePull"]),
    ],
)
def test_what_keeps_a_queued_run_from_a_pod_is_told_once(row: dict[str, Any], reasons: list[str]) -> None:
    found = {**QUEUED, **row}
    assert [event.reason for event in events_of(found, _pending("why"), _pending("queued"))] == reasons
    assert list(events_of(found, _pending("why"), _pending("why"))) == []
