"""The custom resources of Perdure, ``perdure.dev/v1alpha1``: what a person writes to have a run.

The same models read manifests from files, objects from the API server and bodies of the public API, and the CRDs are generated from
them (:mod:`schema`). A field that was left out stays ``None`` here: an AgentPool's ``runDefaults`` come before the defaults that the
field descriptions name, and ``runLimits`` cap them, when the run is stored.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from perdure_operator.kube.api.base import (
    API_VERSION,
    Annotations,
    Count,
    DnsLabel,
    Key,
    Labels,
    Model,
    ObjectName,
    PositiveSeconds,
    Seconds,
    Short,
    cel,
)
from perdure_operator.kube.api.podtemplate import PodTemplate
from perdure_operator.kube.api.problems import InvalidManifest, Problem, check_json, explain
from perdure_operator.kube.api.status import AgentPoolStatus, AgentRunStatus

MAX_INPUT_BYTES = 16 * 1024
MAX_SUMMARY_BYTES = 200
MAX_OBJECTIVE = 20_000

ANY_JSON: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}

Names = Annotated[list[Short], Field(max_length=200)]
Money = Annotated[str, Field(max_length=24, pattern=r"^[0-9]{1,12}(\.[0-9]{1,9})?$")]
Answer = Literal["Ask", "Fail"]


def _immutable(field: str) -> tuple[str, str]:
    return (
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"{field} cannot change after the run was created; create another run",
    )


class ObjectMeta(Model):
    """What people write, and what the API server adds (accepted as it comes)."""

    name: ObjectName | None = None
    generate_name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[a-z0-9]([-a-z0-9.]*)$")] | None = None
    namespace: DnsLabel | None = None
    labels: Labels | None = None
    annotations: Annotations | None = None
    uid: Short | None = None
    resource_version: Short | None = None
    generation: int | None = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    finalizers: list[str] | None = None
    owner_references: list[dict[str, Any]] | None = None
    managed_fields: Any = None
    self_link: Any = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not (self.name or self.generate_name):
            raise ValueError("set name (or generateName, which makes a new object each time)")
        return self


class PoolRef(Model):
    name: ObjectName


class AgentRef(Model):
    """Where the agent's code is. Exactly one of ``poolRef`` and ``template``."""

    pool_ref: PoolRef | None = None
    template: PodTemplate | None = None
    """A pod template of this run's own. Makes an implicit pool with no warm pods; policy may forbid it."""

    model_config = cel(("has(self.poolRef) != has(self.template)", "set exactly one of poolRef, template"))

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.pool_ref is None) == (self.template is None):
            raise ValueError("set exactly one of poolRef, template")
        return self


class ConfigMapKey(Model):
    name: ObjectName
    key: Key


class InputSource(Model):
    config_map_key_ref: ConfigMapKey | None = None
    blob: Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.config_map_key_ref is None) == (self.blob is None):
            raise ValueError("set exactly one of configMapKeyRef, blob")
        return self


class Retry(Model):
    max_retries: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Attempts after the first that may fail. Default 3."""
    backoff_seconds: Seconds | None = None
    """Wait before the first retry, doubled for each further one. Default 2."""
    max_backoff_seconds: Seconds | None = None
    """Longest wait between two attempts. Default 120."""
    max_losses: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Lost workers in a row without progress before the run is parked. Default 10."""


class Budgets(Model):
    """Limits over the run and all its descendants."""

    max_steps: Count | None = None
    max_tool_calls: Count | None = None
    max_retries_per_tool_call: Annotated[int, Field(ge=0, le=100)] | None = None
    max_same_error_repeats: Annotated[int, Field(ge=1, le=1000)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000_000_000)] | None = None
    cost: Money | None = None
    currency: Annotated[str, Field(max_length=3, pattern=r"^[A-Z]{3}$")] | None = None
    max_children: Count | None = None
    on_exceeded: Literal["Suspend", "Fail"] | None = None
    """Default Suspend: raising the budget resumes the run."""


class Constraints(Model):
    """What the agent may do. Only tightens what its pool allows."""

    allowed_tools: Names | None = None
    forbidden_tools: Names | None = None
    allowed_domains: Names | None = None
    side_effect_tools: Names | None = None


class Escalation(Model):
    """When a person is asked."""

    unknown_effect: Answer | None = None
    auth_failure: Answer | None = None
    repeated_failures: Answer | None = None
    pause_deadline: bool | None = None
    """The deadline stands still while a question is open."""


class Artifacts(Model):
    expected: Names | None = None


class AgentRunSpec(Model):
    agent: AgentRef
    idempotency_key: Short | None = None
    """A run that is created again with the same key adopts the existing record instead of starting anew."""
    summary: Annotated[str, Field(max_length=MAX_SUMMARY_BYTES)] | None = None
    """One line for people, at most 200 bytes."""
    objective: Annotated[str, Field(max_length=MAX_OBJECTIVE)] | None = None
    input: Annotated[Any, Field(json_schema_extra=ANY_JSON)] = None
    """Any JSON up to 16 KiB."""
    input_from: InputSource | None = None
    desired_state: Literal["Running", "Suspended", "Cancelled"] | None = None
    """Default Running."""
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    active_deadline_seconds: PositiveSeconds | None = None
    """Running time over all attempts; waits do not count."""
    deadline_seconds: PositiveSeconds | None = None
    """Wall clock from the first start, waits included."""
    stall_timeout_seconds: PositiveSeconds | None = None
    """No operation and no sign of the agent's event loop for so long releases the run from its worker."""
    retry: Retry | None = None
    budgets: Budgets | None = None
    constraints: Constraints | None = None
    stop_conditions: Annotated[list[Short], Field(max_length=50)] | None = None
    """The run cannot succeed before each of these was recorded."""
    escalation: Escalation | None = None
    artifacts: Artifacts | None = None
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """How long a cancelled agent has to stop by itself. Default 30."""
    ttl_seconds_after_finished: Seconds | None = None
    """Deletes the resource; the record follows the store's retention."""

    model_config = cel(
        ("!(has(self.input) && has(self.inputFrom))", "set input or inputFrom, not both"),
        *map(_immutable, ("idempotencyKey", "objective", "constraints", "stopConditions", "escalation", "artifacts")),
    )

    @field_validator("summary")
    @classmethod
    def _short(cls, summary: str | None) -> str | None:
        if summary is not None and len(summary.encode()) > MAX_SUMMARY_BYTES:
            raise ValueError(f"is {len(summary.encode())} bytes long; at most {MAX_SUMMARY_BYTES} are allowed")
        return summary

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


class AgentRun(Model):
    api_version: Literal["perdure.dev/v1alpha1"]
    kind: Literal["AgentRun"]
    metadata: ObjectMeta
    spec: AgentRunSpec
    status: AgentRunStatus | None = None


class Capacity(Model):
    min_idle: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Warm pods kept ready. Default 0."""
    max_idle: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Idle pods above this are retired. Default: minIdle, at least 1."""
    max_pods: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Default 100."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = self.min_idle or 0, self.max_idle
        if high is not None and low > high:
            raise ValueError(f"minIdle ({low}) is larger than maxIdle ({high})")
        if self.max_pods is not None and low > self.max_pods:
            raise ValueError(f"minIdle ({low}) is larger than maxPods ({self.max_pods})")
        return self


class PodReuse(Model):
    mode: Literal["Never", "ForkPerRun"]
    max_runs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    max_age_seconds: PositiveSeconds | None = None


class RunDefaults(Model):
    budgets: Budgets | None = None
    retry: Retry | None = None
    escalation: Escalation | None = None
    active_deadline_seconds: PositiveSeconds | None = None
    ttl_seconds_after_finished: Seconds | None = None


class RunLimits(Model):
    budgets: Budgets | None = None


class Tool(Model):
    """What Perdure has to know of a tool with an effect; stands above what the agent's code declares."""

    name: Short
    effect: Annotated[Literal["external", "memory", "local", "read_only"] | None, Field(alias="class")] = None
    scope: Annotated[list[Short], Field(max_length=50)] | None = None
    """The arguments that identify the effect."""
    on_unknown: Literal["query", "retry-same-key", "ask", "fail", "assume-not-done"] | None = None
    on_divergence: Literal["Person", "Agent"] | None = None


class McpServer(Model):
    name: DnsLabel
    url: Annotated[str, Field(max_length=2048, pattern=r"^https?://")]


class AgentPoolSpec(Model):
    template: PodTemplate
    capacity: Capacity | None = None
    pod_reuse: PodReuse | None = None
    """Default: mode Never, a fresh pod for each lease."""
    run_defaults: RunDefaults | None = None
    run_limits: RunLimits | None = None
    tools: Annotated[list[Tool], Field(max_length=500)] | None = None
    mcp_servers: Annotated[list[McpServer], Field(max_length=50)] | None = None
    spool: Literal["None", "Disk"] | None = None
    """``Disk``: the sidecar keeps receipts in a write-ahead log. Default None."""


class AgentPool(Model):
    api_version: Literal["perdure.dev/v1alpha1"]
    kind: Literal["AgentPool"]
    metadata: ObjectMeta
    spec: AgentPoolSpec
    status: AgentPoolStatus | None = None


Manifest = AgentRun | AgentPool
KINDS: dict[str, type[AgentRun | AgentPool]] = {"AgentRun": AgentRun, "AgentPool": AgentPool}


def parse_manifest(document: object) -> Manifest:
    """The typed resource of one decoded YAML or JSON document. Raises :class:`InvalidManifest` with every problem found."""
    if not isinstance(document, dict):
        raise InvalidManifest([Problem((), f"must be a mapping with apiVersion, kind, metadata and spec, not {type(document).__name__}")])
    problems = []
    if document.get("apiVersion") != API_VERSION:
        problems.append(Problem(("apiVersion",), f"must be {API_VERSION!r}, got {document.get('apiVersion')!r}"))
    model = KINDS.get(kind) if isinstance(kind := document.get("kind"), str) else None
    if model is None:
        problems.append(Problem(("kind",), f"must be one of {', '.join(KINDS)}, got {kind!r}"))
    problems += check_json(document)
    if problems or model is None:
        raise InvalidManifest(problems)
    try:
        return model.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidManifest(explain(error, model)) from None


def implicit_pool(template: PodTemplate) -> tuple[str, AgentPoolSpec]:
    """Name and spec of the pool that a run with an inline template belongs to: the same template is the same pool."""
    canonical = json.dumps(template.to_json(), sort_keys=True, separators=(",", ":"))
    name = f"inline-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"
    return name, AgentPoolSpec(template=template, capacity=Capacity(min_idle=0, max_idle=0))
