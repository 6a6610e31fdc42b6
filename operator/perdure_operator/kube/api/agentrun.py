"""AgentRun: one durable execution of an agent. Who writes it says what is to be done; how it went is in the status and in the store.

What may change after the creation is stated once, in :data:`CHANGEABLE` and :data:`LIMITS`; a field that is in neither is immutable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from perdure_operator.kube.api.base import (
    RULES,
    Count,
    Distinct,
    Key,
    Model,
    ObjectName,
    PositiveSeconds,
    Rule,
    Seconds,
    Short,
    exactly_one,
)
from perdure_operator.kube.api.meta import ANY_JSON, Names, ObjectMeta
from perdure_operator.kube.api.podtemplate import PodTemplate
from perdure_operator.kube.api.status import AgentRunStatus

MAX_INPUT_BYTES = 16 * 1024
MAX_SUMMARY_BYTES = 200
MAX_OBJECTIVE = 20_000

Money = Annotated[str, Field(max_length=24, pattern=r"^[0-9]{1,12}(\.[0-9]{1,9})?$")]
Answer = Literal["Ask", "Fail"]


class PoolRef(Model):
    name: ObjectName
    """Name of an AgentPool in the same namespace."""


class AgentRef(Model):
    """Where the agent's code is. Exactly one of `poolRef` and `template`."""

    pool_ref: PoolRef | None = None
    """The pool whose pods execute the run."""
    template: PodTemplate | None = None
    """A pod template of this run's own. Makes an AgentPool with no warm pods, which goes when no run needs it; policy may forbid it."""

    rules = (exactly_one("pool_ref", "template"),)


class ConfigMapKey(Model):
    name: ObjectName
    """Name of a ConfigMap in the same namespace."""
    key: Key
    """The key in it; its value is JSON."""


class InputSource(Model):
    config_map_key_ref: ConfigMapKey | None = None
    """A key of a ConfigMap, read once, when the run is created."""
    blob: Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """Digest of a payload that the store holds. Not taken yet: such a run stays Pending."""

    rules = (exactly_one("config_map_key_ref", "blob"),)


class Retry(Model):
    max_retries: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Attempts after the first that may fail. Default 3."""
    backoff_seconds: Seconds | None = None
    """Wait before the first retry, doubled for each further one; up to half of it is left out at random. Default 2."""
    max_backoff_seconds: Seconds | None = None
    """Longest wait between two attempts. Default 120."""
    max_losses: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Lost workers in a row without progress before the run is parked. Default 10."""


class Budgets(Model):
    """Limits over the run and all its descendants."""

    max_steps: Count | None = None
    """Steps that may be executed. Recorded, not in force yet."""
    max_tool_calls: Count | None = None
    """Tool calls that may be made. Recorded, not in force yet."""
    max_retries_per_tool_call: Annotated[int, Field(ge=0, le=100)] | None = None
    """How often one tool call may be tried again. Default 5."""
    max_same_error_repeats: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How often the same error may come in a row. Recorded, not in force yet."""
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000_000_000)] | None = None
    """Model tokens, in and out. Recorded, not in force yet."""
    cost: Money | None = None
    """Money that may be spent, as a decimal number in quotes, such as "5" or "0.25". Recorded, not in force yet."""
    currency: Annotated[str, Field(max_length=3, pattern=r"^[A-Z]{3}$")] | None = None
    """ISO 4217 code of the cost's currency. Default USD. Recorded, not in force yet."""
    max_children: Count | None = None
    """Runs that may be spawned. Recorded, not in force yet."""
    on_exceeded: Literal["Suspend", "Fail"] | None = None
    """What happens when a limit is reached. Default Suspend: raising the budget resumes the run. Recorded, not in force yet."""


class Constraints(Model):
    """What the agent may do. Only tightens what its pool allows."""

    allowed_tools: Names | None = None
    """Tools that may be called; left out, all that the pool allows."""
    forbidden_tools: Names | None = None
    """Tools that may not be called."""
    allowed_domains: Names | None = None
    """Domains that calls through the sidecar may reach. Recorded, not in force yet."""
    side_effect_tools: Names | None = None
    """Tools to treat as having external effects."""


class Escalation(Model):
    """When a person is asked. Recorded, not in force yet."""

    unknown_effect: Answer | None = None
    """When it is not known whether an external effect happened."""
    auth_failure: Answer | None = None
    """When a tool refuses the credentials."""
    repeated_failures: Answer | None = None
    """When the same error keeps coming."""
    pause_deadline: bool | None = None
    """The deadline stands still while a question is open."""


class Artifacts(Model):
    expected: Names | None = None
    """Names of artifacts that must be recorded before the run can succeed."""


_SHORT = Rule(
    f"bytes(self).size() <= {MAX_SUMMARY_BYTES}",
    f"is longer than {MAX_SUMMARY_BYTES} bytes",
    lambda text: len(text.encode()) <= MAX_SUMMARY_BYTES,
)


class AgentRunSpec(Model):
    agent: AgentRef
    idempotency_key: Short | None = None
    """A run that is created again with the same key adopts the existing record instead of starting anew."""
    summary: Annotated[str, Field(max_length=MAX_SUMMARY_BYTES), _SHORT] | None = None
    """One line for people, at most 200 bytes."""
    objective: Annotated[str, Field(max_length=MAX_OBJECTIVE)] | None = None
    """What the agent is to achieve."""
    input: Annotated[Any, Field(json_schema_extra=ANY_JSON)] = None
    """Any JSON up to 16 KiB."""
    input_from: InputSource | None = None
    """Where the input is, when it is not in this resource. Not together with input."""
    desired_state: Literal["Running", "Suspended", "Cancelled"] | None = None
    """What the run shall do: Suspended pauses it, Cancelled ends it and all its descendants. Default Running."""
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    """Runs of a higher priority get a pod first. Default 0."""
    active_deadline_seconds: PositiveSeconds | None = None
    """Running time over all attempts; waits do not count."""
    deadline_seconds: PositiveSeconds | None = None
    """Wall clock from the first start, waits included."""
    stall_timeout_seconds: PositiveSeconds | None = None
    """No operation and no sign of the agent's event loop for so long releases the run from its worker."""
    retry: Retry | None = None
    """What happens after an attempt that failed."""
    budgets: Budgets | None = None
    constraints: Constraints | None = None
    stop_conditions: Annotated[list[Short], Field(max_length=50), Distinct()] | None = None
    """The run cannot succeed before each of these was recorded. Recorded, not in force yet."""
    escalation: Escalation | None = None
    artifacts: Artifacts | None = None
    """What the run has to produce. Recorded, not in force yet."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """How long a cancelled agent has to stop by itself. Default 30."""
    ttl_seconds_after_finished: Seconds | None = None
    """Deletes the resource so long after its end; the record follows the store's retention."""

    # The schema of `input` has no type, and CEL in a schema does not see such a field: admission.py tells the API server these two.

    @field_validator("input")
    @classmethod
    def _small(cls, value: Any) -> Any:
        if value is not None and (size := len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())) > MAX_INPUT_BYTES:
            raise ValueError(f"is {size} bytes of JSON; at most {MAX_INPUT_BYTES} are allowed: pass a reference to larger data")
        return value

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if self.input is not None and self.input_from is not None:
            raise ValueError("set input or inputFrom, not both")
        return self


# What may change once the run is there. Only the API server knows what a run was before, so these rules are CEL alone.

CHANGEABLE = {"desired_state", "priority", "ttl_seconds_after_finished"}
LIMITS = {"budgets", "active_deadline_seconds", "deadline_seconds"}
UNSEEN = {"input"}
"""Fields that CEL in a schema does not see; admission.py holds them still."""


def _unchanged(field: str) -> dict[str, str]:
    # Shorter with optionals, but the API server cannot tell what comparing two of them costs, and refuses it.
    return {
        "rule": f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        "message": f"{field} cannot change after the run was created; create another run",
    }


def _once_set(path: str, comparison: str, message: str) -> dict[str, str]:
    """What can be set late, and not removed: it may stand in for something of the pool, which only the store knows."""
    field, compared = path.replace(".", ".?"), comparison.format(after=f"self.{path}", before=f"oldSelf.{path}")
    return {
        "rule": f"!oldSelf.?{field}.hasValue() || (self.?{field}.hasValue() && {compared})",
        "message": f"{path} {message}",
    }


def _kept(path: str) -> dict[str, str]:
    return _once_set(path, "{after} == {before}", "cannot change once it is set")


def _grown(path: str) -> dict[str, str]:
    money = path.endswith(".cost")
    comparison = "!quantity({after}).isLessThan(quantity({before}))" if money else "{after} >= {before}"
    return _once_set(path, comparison, "can only grow once it is set, and cannot be removed")


def _changes() -> Iterator[dict[str, str]]:
    for name in AgentRunSpec.model_fields:
        if name not in CHANGEABLE | LIMITS | UNSEEN:
            yield _unchanged(to_camel(name))
    yield _grown("activeDeadlineSeconds")
    yield _grown("deadlineSeconds")
    for name in Budgets.model_fields:
        if name in {"currency", "on_exceeded"}:
            yield _kept(f"budgets.{to_camel(name)}")
        else:
            yield _grown(f"budgets.{to_camel(name)}")
    yield {
        "rule": "oldSelf.?desiredState.orValue('') != 'Cancelled' || self.?desiredState.orValue('') == 'Cancelled'",
        "message": "a cancelled run cannot be resumed; create another run",
    }


class AgentRun(Model):
    """One durable execution of an agent: it survives crashes, and holds no pod while it waits."""

    api_version: Literal["perdure.dev/v1alpha1"]
    kind: Literal["AgentRun"]
    metadata: ObjectMeta
    spec: Annotated[AgentRunSpec, Field(json_schema_extra={RULES: list(_changes())})]
    """What is to be done. Once created, only desiredState, priority and ttlSecondsAfterFinished can change; limits can grow."""
    status: AgentRunStatus | None = None
    """How it goes, as Perdure reports it; the full record is in the store."""
