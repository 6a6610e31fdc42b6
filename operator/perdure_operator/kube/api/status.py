"""What Perdure reports in a resource's status: bounded, conditions first. The truth is in the store; this is its projection."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from perdure_operator.kube.api.base import Count, Model, ObjectName, Short

MAX_RESULT_BYTES = 1024

Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
Line = Annotated[str, Field(max_length=1024)]


class Condition(Model):
    """The condition of the Kubernetes API conventions."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(min_length=1, max_length=256)]
    message: Annotated[str, Field(max_length=2048)]
    last_transition_time: Time
    observed_generation: Count | None = None


Conditions = Annotated[
    list[Condition], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})
]


class WaitingFor(Model):
    kind: Short
    name: Annotated[str, Field(max_length=253)]
    at: Time | None = None
    since: Time | None = None


class Progress(Model):
    done: Count
    total: Count | None = None
    current: Annotated[str, Field(max_length=253)] | None = None


class Usage(Model):
    steps: Count | None = None
    tool_calls: Count | None = None
    tokens: Annotated[int, Field(ge=0)] | None = None
    cost: Annotated[str, Field(max_length=24)] | None = None


class Children(Model):
    active: Count
    succeeded: Count
    failed: Count


class Question(Model):
    id: Short
    text: Line
    choices: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=16)] | None = None


class ParentRef(Model):
    name: ObjectName


class AgentRunStatus(Model):
    observed_generation: Count | None = None
    run_id: Annotated[str | None, Field(alias="runID", max_length=36)] = None
    revision: Annotated[str, Field(max_length=128)] | None = None
    conditions: Conditions | None = None
    phase: Literal["Pending", "Running", "Suspended", "Succeeded", "Failed", "Cancelled"] | None = None
    attempt: Count | None = None
    pod_name: ObjectName | None = None
    wait_reason: Annotated[str, Field(max_length=253)] | None = None
    waiting_for: Annotated[list[WaitingFor], Field(max_length=16)] | None = None
    progress: Progress | None = None
    usage: Usage | None = None
    children: Children | None = None
    questions: Annotated[list[Question], Field(max_length=8)] | None = None
    result: Annotated[Any, Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] = None
    """At most 1 KiB of JSON; a larger result has ``resultRef``."""
    result_ref: Annotated[str, Field(max_length=512)] | None = None
    parent_ref: ParentRef | None = None
    start_time: Time | None = None
    completion_time: Time | None = None
    last_sequence: Annotated[int, Field(ge=0)] | None = None
    projected_at: Time | None = None


class AgentPoolStatus(Model):
    observed_generation: Count | None = None
    conditions: Conditions | None = None
    idle: Count | None = None
    starting: Count | None = None
    leased: Count | None = None
    retiring: Count | None = None
    runnable: Count | None = None
