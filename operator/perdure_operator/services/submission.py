"""From a run that somebody asks for to the columns that are stored: the pool's defaults come before the general ones, its limits cap them.

One place for all ways in: the public API, a manifest, a spawn.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from perdure_operator.domain.errors import InvalidInput, PoolNotFound
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec, AgentRunSpec, Retry, implicit_pool
from perdure_operator.store.store import NewRun

DEFAULT_RETRY = {"max_retries": 3, "backoff_seconds": 2, "max_backoff_seconds": 120, "max_losses": 10}
DEFAULT_TOOL_RETRIES = 5
DEFAULT_GRACE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Parent:
    """Who spawns. The child is stored under its root, and ends with it by ``policy``."""

    run: UUID
    name: str
    policy: str


def child_name(parent: Parent, key: str) -> str:
    """A name that the same spawn always gets and no other: the parent's, and a digest of the parent's id and the redo identity."""
    return f"{parent.name[:240]}-{hashlib.sha256(f'{parent.run}/{key}'.encode()).hexdigest()[:10]}"


def pool_name(spec: AgentRunSpec) -> str:
    """Name of the pool within the run's namespace."""
    if spec.agent.pool_ref is not None:
        return spec.agent.pool_ref.name
    if spec.agent.template is None:  # the model refuses it before
        raise InvalidInput("spec.agent needs a poolRef or a template")
    return implicit_pool(spec.agent.template)[0]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def new_run(
    run_id: UUID,
    namespace: str,
    name: str,
    spec: AgentRunSpec,
    pool: AgentPoolSpec,
    *,
    input_json: bytes,
    labels: dict[str, str] | None = None,
    idempotency_key: str | None = None,
    parent_policy: str = "cancel",
) -> NewRun:
    """The row of a run. ``input_json`` is checked JSON."""
    retry, defaults = spec.retry or Retry(), pool.run_defaults
    pool_retry = (defaults.retry if defaults else None) or Retry()
    budgets, pool_budgets = spec.budgets, defaults.budgets if defaults else None
    active = _first(spec.active_deadline_seconds, defaults.active_deadline_seconds if defaults else None)
    columns: dict[str, Any] = {
        "run_id": run_id,
        "namespace": namespace,
        "name": name,
        "pool": f"{namespace}/{pool_name(spec)}",
        "parent_policy": parent_policy,
        "idempotency_key": idempotency_key or spec.idempotency_key,
        "priority": spec.priority or 0,
        "spec_paused": spec.desired_state == "Suspended",
        "active_limit_ms": active * 1000 if active is not None else None,
        "deadline_seconds": spec.deadline_seconds,
        "max_tool_retries": _first(
            budgets.max_retries_per_tool_call if budgets else None,
            pool_budgets.max_retries_per_tool_call if pool_budgets else None,
            DEFAULT_TOOL_RETRIES,
        ),
        "grace_seconds": _first(spec.termination_grace_period_seconds, DEFAULT_GRACE_SECONDS),
        "stall_seconds": spec.stall_timeout_seconds,
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"input"}),
        "labels": labels or {},
        "summary": spec.summary or "",
        "objective": spec.objective or "",
    }
    for field, default in DEFAULT_RETRY.items():
        columns[field] = _first(getattr(retry, field), getattr(pool_retry, field), default)
    return NewRun(columns, input_json)


def require_pool(pools: dict[str, AgentPoolSpec], namespace: str, name: str) -> AgentPoolSpec:
    """Raises PoolNotFound."""
    try:
        return pools[f"{namespace}/{name}"]
    except KeyError:
        raise PoolNotFound(f"there is no AgentPool {name} in namespace {namespace}") from None
