"""AgentPool: the agent's code as a pod template, how many pods to keep warm, and what holds for all runs that name the pool."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perdure_operator.kube.api.agentrun import Budgets, Escalation, Retry
from perdure_operator.kube.api.base import Distinct, DnsLabel, Model, PositiveSeconds, Rule, Seconds, Short
from perdure_operator.kube.api.meta import ObjectMeta
from perdure_operator.kube.api.podtemplate import PodTemplate
from perdure_operator.kube.api.status import AgentPoolStatus


class Capacity(Model):
    """How many pods there are."""

    min_idle: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Warm pods kept ready. Default 0."""
    max_idle: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Idle pods above this are retired. Default: minIdle, at least 1."""
    max_pods: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Pods at most, idle and at work. Default 100."""

    rules = (
        Rule(
            "!has(self.minIdle) || !has(self.maxIdle) || self.minIdle <= self.maxIdle",
            "minIdle is larger than maxIdle",
            lambda capacity: capacity.max_idle is None or (capacity.min_idle or 0) <= capacity.max_idle,
        ),
        Rule(
            "!has(self.minIdle) || !has(self.maxPods) || self.minIdle <= self.maxPods",
            "minIdle is larger than maxPods",
            lambda capacity: capacity.max_pods is None or (capacity.min_idle or 0) <= capacity.max_pods,
        ),
    )


class PodReuse(Model):
    """Whether a pod executes one run only."""

    mode: Literal["Never", "ForkPerRun"]
    """Never: a fresh pod for each lease. ForkPerRun: its process forks for each: warm imports, fresh memory, no security boundary."""
    max_runs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Leases after which a pod is retired; left out, no limit."""
    max_age_seconds: PositiveSeconds | None = None
    """Age at which a pod is retired, once it is idle; left out, no limit."""


class RunDefaults(Model):
    """What holds for runs that do not say otherwise."""

    budgets: Budgets | None = None
    retry: Retry | None = None
    """What happens after an attempt that failed."""
    escalation: Escalation | None = None
    active_deadline_seconds: PositiveSeconds | None = None
    """Running time over all attempts; waits do not count."""
    ttl_seconds_after_finished: Seconds | None = None
    """Deletes the resource so long after its end."""


class RunLimits(Model):
    """Ceilings: what a run asks for beyond them, it does not get. Recorded, not in force yet."""

    budgets: Budgets | None = None


class Tool(Model):
    """What Perdure has to know of a tool with an effect; stands above what the agent's code declares."""

    name: Short
    """The tool's name, as the agent calls it."""
    effect: Annotated[Literal["external", "memory", "local", "read_only"] | None, Field(alias="class")] = None
    """What the tool changes: something outside, a memory of the agent, something in its pod, nothing."""
    scope: Annotated[list[Short], Field(max_length=50), Distinct()] | None = None
    """The arguments that identify the effect."""
    on_unknown: Literal["query", "retry-same-key", "ask", "fail", "assume-not-done"] | None = None
    """What happens when it is not known whether the effect happened."""
    on_divergence: Literal["Person", "Agent"] | None = None
    """Who may say that an effect is another one than that of an earlier attempt. Default Person. Recorded, not in force yet."""


class McpServer(Model):
    name: DnsLabel
    """A name for it; goes before the names of its tools."""
    url: Annotated[str, Field(max_length=2048, pattern=r"^https?://")]
    """Its address."""


class AgentPoolSpec(Model):
    template: PodTemplate
    capacity: Capacity | None = None
    pod_reuse: PodReuse | None = None
    """Whether a pod executes one run only. Default: mode Never, a fresh pod for each lease."""
    run_defaults: RunDefaults | None = None
    run_limits: RunLimits | None = None
    tools: Annotated[list[Tool], Field(max_length=500), Distinct(("name",))] | None = None
    """The tools with effects."""
    mcp_servers: Annotated[list[McpServer], Field(max_length=50), Distinct(("name",))] | None = None
    """MCP servers whose tools the agent may call through the sidecar, and so through the ledger. Recorded, not in force yet."""
    spool: Literal["None", "Disk"] | None = None
    """`Disk`: the end of a tool call that an agent tells by plain HTTP (`POST /v1/activities/end`: agents in other languages) is on the
    pod's disk before it is sent, and a sidecar that was killed before the gateway had it sends it when it is started again. It does nothing
    for agents that use the SDK, which send it again themselves, and does not outlive the pod. Default None."""


class AgentPool(Model):
    """Workers of one kind: a pod template, and how many of its pods are kept warm for the runs that name this pool."""

    api_version: Literal["perdure.dev/v1alpha1"]
    kind: Literal["AgentPool"]
    metadata: ObjectMeta
    spec: AgentPoolSpec
    """The workers as they shall be."""
    status: AgentPoolStatus | None = None
    """The workers as they are."""
