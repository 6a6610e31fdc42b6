"""The columns of a run, as the tests of the store make them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

_COLUMNS: dict[str, Any] = {
    "namespace": "ns",
    "parent_policy": "cancel",
    "max_retries": 1,
    "backoff_seconds": 2,
    "max_backoff_seconds": 5,
    "max_losses": 1,
    "max_tool_retries": 1,
    "grace_seconds": 10,
    "spec": {},
}


def columns(run: UUID, pool: str, **more: Any) -> dict[str, Any]:
    """Named by its id, unless ``more`` says otherwise."""
    return {**_COLUMNS, "run_id": str(run), "name": str(run), "pool": pool, **more}
