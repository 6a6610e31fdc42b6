"""Where a pod may run: the scheduling part of a pod template, named and nested as Kubernetes does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perdure_operator.kube.api.base import Distinct, DnsLabel, LabelKey, Labels, LabelValue, Model, Seconds


class Toleration(Model):
    key: LabelKey | None = None
    """Key of the taint; left out, with operator Exists, all taints."""
    operator: Literal["Exists", "Equal"] | None = None
    """How the key relates to the value. Default Equal."""
    value: LabelValue | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; left out, all effects."""
    toleration_seconds: Seconds | None = None
    """How long a NoExecute taint is tolerated; left out, for ever."""


class Requirement(Model):
    key: LabelKey
    """The label that is looked at."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the label relates to the values. Gt and Lt are for nodes only."""
    values: Annotated[list[LabelValue], Field(max_length=100)] | None = None
    """Values to compare with; none for Exists and DoesNotExist."""


Requirements = Annotated[list[Requirement], Field(max_length=50)]
Weight = Annotated[int, Field(ge=1, le=100)]


class LabelSelector(Model):
    """Selects by labels; all that is given must hold."""

    match_labels: Labels | None = None
    """Labels and the values that they must have."""
    match_expressions: Requirements | None = None
    """Further requirements."""


class NodeSelectorTerm(Model):
    """Requirements of a node; all must hold."""

    match_expressions: Requirements | None = None
    """Requirements of the node's labels."""
    match_fields: Requirements | None = None
    """Requirements of the node's fields."""


class NodeSelector(Model):
    node_selector_terms: Annotated[list[NodeSelectorTerm], Field(min_length=1, max_length=20)]
    """Terms of which one must hold."""


class PreferredNode(Model):
    weight: Weight
    """How much this counts, 1 to 100."""
    preference: NodeSelectorTerm
    """The nodes that are preferred."""


class NodeAffinity(Model):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes that the pod may run on."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredNode], Field(max_length=20)] | None = None
    """Nodes that the scheduler prefers."""


class PodAffinityTerm(Model):
    """Pods to be near to, or away from."""

    label_selector: LabelSelector | None = None
    """Which pods."""
    namespaces: Annotated[list[DnsLabel], Field(max_length=20)] | None = None
    """Namespaces of those pods; left out, this one."""
    topology_key: LabelKey
    """Label of a node whose value says what near is, such as kubernetes.io/hostname."""


class PreferredPod(Model):
    weight: Weight
    """How much this counts, 1 to 100."""
    pod_affinity_term: PodAffinityTerm


class PodAffinity(Model):
    required_during_scheduling_ignored_during_execution: Annotated[list[PodAffinityTerm], Field(max_length=20)] | None = None
    """Must hold, or the pod is not scheduled."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredPod], Field(max_length=20)] | None = None
    """The scheduler tries to make these hold."""


class Affinity(Model):
    """Which nodes and which other pods this pod is drawn to or kept from."""

    node_affinity: NodeAffinity | None = None
    """Which nodes the pod may or should run on."""
    pod_affinity: PodAffinity | None = None
    """Which pods it should be near to."""
    pod_anti_affinity: PodAffinity | None = None
    """Which pods it should be away from."""


class TopologySpread(Model):
    max_skew: Annotated[int, Field(ge=1, le=1000)]
    """How uneven the spread may be, in pods."""
    topology_key: LabelKey
    """Label of a node whose value says which nodes belong together, such as topology.kubernetes.io/zone."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """What to do with a pod that would make the spread more uneven than that."""
    label_selector: LabelSelector | None = None
    """Which pods are counted."""


TopologySpreads = Annotated[list[TopologySpread], Field(max_length=10), Distinct(("topologyKey", "whenUnsatisfiable"))]
