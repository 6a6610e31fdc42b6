"""Which Kubernetes events a change of status is worth."""

from __future__ import annotations

from typing import Any

import pytest

from perdure_operator.services.status import events_of

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
    assert [reason for _, reason, _ in events_of({"conditions": [], **new}, old)] == reasons
