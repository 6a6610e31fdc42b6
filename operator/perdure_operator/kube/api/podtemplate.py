"""The part of PodTemplateSpec that an agent's template may use, leaf by leaf.

An allow-list: what is not here is refused (no host namespaces, no hostPath, no privileged or root containers, no projected tokens),
so that the right to create a pool or a run is not the right to create any pod. Names and nesting are those of Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from perdure_operator.kube.api.base import (
    GROUP,
    Annotations,
    DnsLabel,
    EnvName,
    Ident,
    Key,
    LabelKey,
    Labels,
    LabelValue,
    Model,
    ObjectName,
    Path,
    Quantity,
    Seconds,
    Short,
)

AGENT_CONTAINER = "agent"
SIDECAR_CONTAINER = "perdure-sidecar"
"""Name of the container that the operator adds; a template may not use it."""

Text = Annotated[str, Field(max_length=32_768)]
_FIELD_PATH = r"^(metadata\.(name|namespace|uid|(labels|annotations)\['.+'\])|spec\.nodeName|status\.podIP)$"
Args = Annotated[list[Text], Field(max_length=200)]


class LocalObjectReference(Model):
    name: ObjectName


class KeySelector(Model):
    name: ObjectName
    key: Key
    optional: bool | None = None


class FieldSelector(Model):
    field_path: Annotated[str, Field(max_length=400, pattern=_FIELD_PATH)]
    api_version: Literal["v1"] | None = None


class EnvSource(Model):
    secret_key_ref: KeySelector | None = None
    config_map_key_ref: KeySelector | None = None
    field_ref: FieldSelector | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("set exactly one of secretKeyRef, configMapKeyRef, fieldRef")
        return self


class EnvVar(Model):
    name: EnvName
    value: Text | None = None
    value_from: EnvSource | None = None

    @field_validator("name")
    @classmethod
    def _not_ours(cls, name: str) -> str:
        if name.startswith("PERDURE_"):
            raise ValueError("names that begin with PERDURE_ are set by Perdure itself; choose another name")
        return name

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.value is not None and self.value_from is not None:
            raise ValueError("set value or valueFrom, not both")
        return self


class OptionalReference(Model):
    name: ObjectName
    optional: bool | None = None


class EnvFrom(Model):
    prefix: Annotated[str, Field(max_length=253)] | None = None
    config_map_ref: OptionalReference | None = None
    secret_ref: OptionalReference | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.config_map_ref is None) == (self.secret_ref is None):
            raise ValueError("set exactly one of configMapRef, secretRef")
        return self


class VolumeMount(Model):
    name: DnsLabel
    mount_path: Path
    sub_path: Path | None = None
    read_only: bool | None = None


Resources = Annotated[dict[LabelKey, Quantity], Field(max_length=20)]


class ResourceRequirements(Model):
    requests: Resources | None = None
    limits: Resources | None = None


class Capabilities(Model):
    drop: Annotated[list[Short], Field(max_length=64)] | None = None


class SeccompProfile(Model):
    type: Literal["RuntimeDefault", "Localhost"]
    localhost_profile: Path | None = None


class SecurityContext(Model):
    """Only what Pod Security "restricted" allows."""

    allow_privilege_escalation: Literal[False] | None = None
    capabilities: Capabilities | None = None
    read_only_root_filesystem: bool | None = None
    run_as_non_root: Literal[True] | None = None
    run_as_user: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = None
    run_as_group: Ident | None = None
    seccomp_profile: SeccompProfile | None = None


class ContainerPort(Model):
    container_port: Annotated[int, Field(ge=1, le=65_535)]
    name: Annotated[str, Field(min_length=1, max_length=15, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] | None = None


class Container(Model):
    name: DnsLabel
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    command: Args | None = None
    args: Args | None = None
    working_dir: Path | None = None
    env: Annotated[list[EnvVar], Field(max_length=200)] | None = None
    env_from: Annotated[list[EnvFrom], Field(max_length=20)] | None = None
    ports: Annotated[list[ContainerPort], Field(max_length=20)] | None = None
    resources: ResourceRequirements | None = None
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=50)] | None = None
    security_context: SecurityContext | None = None

    @field_validator("name")
    @classmethod
    def _not_ours(cls, name: str) -> str:
        if name == SIDECAR_CONTAINER:
            raise ValueError(f"{SIDECAR_CONTAINER} is the container that Perdure adds; choose another name")
        return name


class InitContainer(Container):
    restart_policy: Literal["Always"] | None = None
    """``Always`` makes it a native sidecar."""


class KeyToPath(Model):
    key: Key
    path: Path
    mode: Annotated[int, Field(ge=0, le=0o777)] | None = None


Items = Annotated[list[KeyToPath], Field(max_length=100)]


class EmptyDir(Model):
    medium: Literal["", "Memory"] | None = None
    size_limit: Quantity | None = None


class ConfigMapVolume(Model):
    name: ObjectName
    items: Items | None = None
    default_mode: Annotated[int, Field(ge=0, le=0o777)] | None = None
    optional: bool | None = None


class SecretVolume(Model):
    secret_name: ObjectName
    items: Items | None = None
    default_mode: Annotated[int, Field(ge=0, le=0o777)] | None = None
    optional: bool | None = None


class ClaimVolume(Model):
    claim_name: ObjectName
    read_only: bool | None = None


class Volume(Model):
    name: DnsLabel
    empty_dir: EmptyDir | None = None
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_fields_set - {"name"}) != 1:
            raise ValueError("set exactly one of emptyDir, configMap, secret, persistentVolumeClaim")
        return self


class PodSecurityContext(Model):
    run_as_non_root: Literal[True] | None = None
    run_as_user: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = None
    run_as_group: Ident | None = None
    fs_group: Ident | None = None
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    supplemental_groups: Annotated[list[Ident], Field(max_length=32)] | None = None
    seccomp_profile: SeccompProfile | None = None


class Toleration(Model):
    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Seconds | None = None


class Requirement(Model):
    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Annotated[list[LabelValue], Field(max_length=100)] | None = None


Requirements = Annotated[list[Requirement], Field(max_length=50)]
Weight = Annotated[int, Field(ge=1, le=100)]


class LabelSelector(Model):
    match_labels: Labels | None = None
    match_expressions: Requirements | None = None


class NodeSelectorTerm(Model):
    match_expressions: Requirements | None = None
    match_fields: Requirements | None = None


class NodeSelector(Model):
    node_selector_terms: Annotated[list[NodeSelectorTerm], Field(min_length=1, max_length=20)]


class PreferredNode(Model):
    weight: Weight
    preference: NodeSelectorTerm


class NodeAffinity(Model):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredNode], Field(max_length=20)] | None = None


class PodAffinityTerm(Model):
    label_selector: LabelSelector | None = None
    namespaces: Annotated[list[DnsLabel], Field(max_length=20)] | None = None
    topology_key: LabelKey


class PreferredPod(Model):
    weight: Weight
    pod_affinity_term: PodAffinityTerm


class PodAffinity(Model):
    required_during_scheduling_ignored_during_execution: Annotated[list[PodAffinityTerm], Field(max_length=20)] | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredPod], Field(max_length=20)] | None = None


class Affinity(Model):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpread(Model):
    max_skew: Annotated[int, Field(ge=1, le=1000)]
    topology_key: LabelKey
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    label_selector: LabelSelector | None = None


class PodSpec(Model):
    containers: Annotated[list[Container], Field(min_length=1, max_length=10)]
    init_containers: Annotated[list[InitContainer], Field(max_length=10)] | None = None
    volumes: Annotated[list[Volume], Field(max_length=50)] | None = None
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=10)] | None = None
    service_account_name: ObjectName | None = None
    automount_service_account_token: Literal[False] | None = None
    security_context: PodSecurityContext | None = None
    node_selector: Labels | None = None
    affinity: Affinity | None = None
    tolerations: Annotated[list[Toleration], Field(max_length=50)] | None = None
    topology_spread_constraints: Annotated[list[TopologySpread], Field(max_length=10)] | None = None
    priority_class_name: ObjectName | None = None
    runtime_class_name: ObjectName | None = None
    termination_grace_period_seconds: Seconds | None = None

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        names = [c.name for c in (*self.containers, *(self.init_containers or ()))]
        if AGENT_CONTAINER not in [c.name for c in self.containers]:
            raise ValueError(f"one of the containers must be named {AGENT_CONTAINER!r}; here they are named {', '.join(names)}")
        if len(set(names)) != len(names):
            raise ValueError("two containers have the same name")
        return self

    @property
    def agent(self) -> Container:
        return next(c for c in self.containers if c.name == AGENT_CONTAINER)


class PodMetadata(Model):
    labels: Labels | None = None
    annotations: Annotations | None = None

    @field_validator("labels", "annotations")
    @classmethod
    def _not_reserved(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for key in value or ():
            domain = key.partition("/")[0]
            if "/" in key and (domain == GROUP or domain.endswith("." + GROUP)):
                raise ValueError(f"{key} is reserved: {GROUP} labels and annotations are set by Perdure itself")
        return value


class PodTemplate(Model):
    metadata: PodMetadata | None = None
    spec: PodSpec
