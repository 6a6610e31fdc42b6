"""What Perdure reports in a resource's status: bounded, conditions first. The truth is in the store; this is its projection.

A status of any run fits into :data:`MAX_STATUS_BYTES`, however long its log is: it counts, and shows the last of everything. Lengths in the
schema are in characters and generous; :func:`fitted` cuts by bytes what still is too much together.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from perdure_operator.kube.api.base import Count, Distinct, Model, ObjectName

MAX_STATUS_BYTES = 8 * 1024
MAX_RESULT_BYTES = 1024

RUN_CONDITIONS = ("Succeeded", "Suspended", "PodScheduled", "Finished", "Stalled")
"""All are set from the first status on. Succeeded is Unknown while the run is active."""
READY = "Ready"
"""The condition of pools and triggers."""

_OF_PARTS = {"conditions", "waitingFor", "progress", "questions"}
_SHORTENED_LISTS = {"waitingFor", "questions", "questions.choices"}
_SHORTENED_TEXTS = {"conditions.message", "waitReason", "waitingFor.name", "progress.current", "questions.text", "questions.choices"}

Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
Line = Annotated[str, Field(max_length=1024)]
Word = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
Json = dict[str, Any]
Revision = Annotated[str, Field(max_length=128, pattern=r"^[-A-Za-z0-9_.:@/]*$")]
Total = Annotated[int, Field(ge=0, le=2**53 - 1)]


class Condition(Model):
    """The condition of the Kubernetes API conventions."""

    type: Annotated[Word, Field(max_length=64)]
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Word
    """Why, in one word for programs."""
    message: Line
    """Why, in words for people."""
    last_transition_time: Time
    """When status changed last."""
    observed_generation: Count | None = None
    """The generation of the spec that this is about."""


Conditions = Annotated[list[Condition], Field(max_length=8), Distinct(("type",))]


class WaitingFor(Model):
    kind: Annotated[Word, Field(max_length=64)]
    """timer, signal, message, child_done, approval or resume."""
    name: Annotated[str, Field(max_length=253)]
    """Which one."""
    at: Time | None = None
    """When it is due, if time alone can end the wait."""
    since: Time | None = None
    """Since when it is waited for."""


class Progress(Model):
    done: Count
    """Steps, or items of the plan, that are done."""
    total: Count | None = None
    """How many there are, if that is known."""
    current: Annotated[str, Field(max_length=253)] | None = None
    """The step that is being done."""


class Usage(Model):
    """What was used of the budgets, by the run and its descendants."""

    steps: Total | None = None
    """Steps that were executed."""
    tool_calls: Total | None = None
    """Tool calls that were made."""
    tokens: Total | None = None
    """Model tokens, in and out."""
    cost: Annotated[str, Field(max_length=24)] | None = None
    """Money that was spent, in the budget's currency."""


class Children(Model):
    """How many runs this one has spawned."""

    active: Count
    """Not finished."""
    succeeded: Count
    """Succeeded."""
    failed: Count
    """Failed or cancelled."""


class Question(Model):
    id: Annotated[str, Field(min_length=1, max_length=64)]
    """Name the question by this in the answer."""
    text: Line
    """What is asked."""
    choices: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=16)] | None = None
    """Answers to choose from."""


class ParentRef(Model):
    name: ObjectName
    """Name of the AgentRun that has spawned this one."""


Observed = Annotated[int, Field(ge=-1, le=2**53 - 1)]


class AgentRunStatus(Model):
    observed_generation: Observed | None = None
    """The generation of the spec that this status is about; -1 until somebody has looked at it."""
    run_id: Annotated[str | None, Field(alias="runID", max_length=36)] = None
    """The run's id in the store."""
    revision: Revision | None = None
    """Revision of the agent's code that the last attempt ran on."""
    conditions: Conditions | None = None
    """Succeeded, Suspended, PodScheduled, Finished and Stalled. Wait for Finished if a failure shall end the wait too."""
    phase: Literal["Pending", "Running", "Suspended", "Succeeded", "Failed", "Cancelled"] | None = None
    """The state in one word; conditions say more."""
    attempt: Count | None = None
    """How many attempts there were."""
    pod_name: ObjectName | None = None
    """The pod that holds the run."""
    wait_reason: Annotated[str, Field(max_length=253)] | None = None
    """What the run waits for, or why it does not run, in a few words, such as `signal approved`, `timer` or `BackOff`."""
    waiting_for: Annotated[list[WaitingFor], Field(max_length=16)] | None = None
    """What a suspended run waits for; the first that comes wakes it, or all together."""
    progress: Progress | None = None
    """How far the run is."""
    usage: Usage | None = None
    children: Children | None = None
    questions: Annotated[list[Question], Field(max_length=8), Distinct(("id",))] | None = None
    """What a person is asked: answer with `kubectl agentrun answer`."""
    result: Annotated[Any, Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] = None
    """What the agent returned, if it is at most 1 KiB of JSON; else resultRef."""
    result_ref: Annotated[str, Field(max_length=128)] | None = None
    """Where a larger result is."""
    parent_ref: ParentRef | None = None
    """The run that has spawned this one."""
    start_time: Time | None = None
    """When the first attempt began."""
    completion_time: Time | None = None
    """When the run ended."""
    last_sequence: Total | None = None
    """The last entry of the run's log that this status knows of."""
    projected_at: Time | None = None
    """When this status was written."""

    @field_validator("result")
    @classmethod
    def _small(cls, value: Any) -> Any:
        if value is not None and (size := _size(value)) > MAX_RESULT_BYTES:
            raise ValueError(f"is {size} bytes of JSON; at most {MAX_RESULT_BYTES} are allowed: use resultRef")
        return value


class AgentPoolStatus(Model):
    observed_generation: Observed | None = None
    """The generation of the spec that this status is about; -1 until somebody has looked at it."""
    conditions: Conditions | None = None
    """Ready: pods of the pool start, as far as any were wanted. False says what keeps them from it."""
    idle: Count | None = None
    """Pods that wait for a run."""
    starting: Count | None = None
    """Pods that are not connected yet."""
    leased: Count | None = None
    """Pods that hold a run."""
    retiring: Count | None = None
    """Pods that are being deleted."""
    runnable: Count | None = None
    """Runs that wait for a pod."""
    revision: Revision | None = None
    """Revision of the template."""


class Delivery(Model):
    id: Annotated[str, Field(max_length=512)]
    """Its deduplication key."""
    state: Literal["Pending", "Claimed", "Done", "Failed", "Dead"]
    """What has become of it."""
    at: Time
    """When it came in."""
    run: ObjectName | None = None
    """Name of the run that it made."""
    message: Line | None = None
    """What went wrong, or what superseded it."""


class TriggerStatus(Model):
    observed_generation: Observed | None = None
    """The generation of the spec that this status is about; -1 until somebody has looked at it."""
    conditions: Conditions | None = None
    """Ready: the trigger fires when its source says so."""
    url: Annotated[str, Field(max_length=2048)] | None = None
    """Where a webhook is sent to."""
    last_schedule_time: Time | None = None
    """The scheduled instant that fired last."""
    next_schedule_time: Time | None = None
    """The scheduled instant that fires next."""
    last_delivery: Delivery | None = None
    """The last firing."""
    active: Count | None = None
    """Runs that are not finished."""
    pending: Count | None = None
    """Deliveries that have no run yet."""
    dead: Count | None = None
    """Deliveries that were given up."""


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())


def fitted(status: Json) -> Json:
    """A run's status in at most :data:`MAX_STATUS_BYTES` of JSON: of a longer one, texts and lists are shortened as little as need be."""
    for entries, length in ((8, 512), (4, 256), (2, 128), (1, 64)):
        if _size(status) <= MAX_STATUS_BYTES:
            break
        status = {name: _cut(name, value, entries, length) for name, value in status.items()}
    return status


def _cut(name: str, value: Any, entries: int, length: int) -> Any:
    """Of the field ``name``: what people read is cut, what programs compare is not."""
    if isinstance(value, list):
        kept = value[:entries] if name in _SHORTENED_LISTS else value
        return [_cut(name, entry, entries, length) for entry in kept]
    if isinstance(value, dict) and name in _OF_PARTS:
        return {part: _cut(f"{name}.{part}", inner, entries, length) for part, inner in value.items()}
    if isinstance(value, str) and name in _SHORTENED_TEXTS:
        while _size(value) > length:
            value = f"{value[: len(value) * 3 // 4]}…"
    return value
