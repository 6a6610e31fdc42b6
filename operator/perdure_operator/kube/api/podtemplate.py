"""The part of PodTemplateSpec that an agent's template may use, leaf by leaf.

An allow-list: what is not here is refused (no host namespaces, no hostPath, no privileged or root containers, no projected tokens),
so that the right to create a pool or a run is not the right to create any pod. Names and nesting are those of Kubernetes.

Containers, volumes and variables that Perdure adds have a prefix of their own that a template may not use, neither to take their place nor
to mount them: the sidecar's token stays the sidecar's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from perdure_operator.kube.api.base import (
    Annotations,
    Distinct,
    DnsLabel,
    EnvName,
    Ident,
    Key,
    LabelKey,
    Labels,
    Model,
    ObjectName,
    Path,
    Quantity,
    Rule,
    Seconds,
    Short,
    at_most_one,
    exactly_one,
)
from perdure_operator.kube.api.scheduling import Affinity, Toleration, TopologySpreads
from perdure_operator.kube.names import AGENT_CONTAINER, GROUP, RESERVED_PREFIX

_PROFILES = ("container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/")
"""Begin annotations that older versions of Kubernetes let override the security context."""

_OWN_NAME = Rule(
    f"!self.startsWith('{RESERVED_PREFIX}')",
    f"names that begin with {RESERVED_PREFIX} are for what Perdure adds to a pod; choose another name",
    lambda name: not name.startswith(RESERVED_PREFIX),
)
_OWN_VARIABLE = Rule(
    "!self.startsWith('PERDURE_')",
    "names that begin with PERDURE_ are set by Perdure itself; choose another name",
    lambda name: not name.startswith("PERDURE_"),
)
_OWN_CLASS = Rule(
    "!self.startsWith('system-')",
    "priority classes that begin with system- are for the cluster's own pods",
    lambda name: not name.startswith("system-"),
)


def _reserved(key: str) -> bool:
    domain = key.partition("/")[0]
    return "/" in key and (domain == GROUP or domain.endswith("." + GROUP))


_OWN_LABELS = Rule(
    rf"self.all(key, !key.matches('^([^/]*[.])?{GROUP.replace('.', '[.]')}/'))",
    f"labels and annotations of {GROUP} are reserved: Perdure itself sets them",
    lambda labels: not any(map(_reserved, labels)),
)
_NO_PROFILES = Rule(
    f"self.all(key, !{' && !'.join(f'key.startsWith({prefix!r})' for prefix in _PROFILES)})",
    "security profiles are not chosen by annotations; use securityContext",
    lambda annotations: not any(key.startswith(_PROFILES) for key in annotations),
)

Text = Annotated[str, Field(max_length=32_768)]
OwnName = Annotated[DnsLabel, _OWN_NAME]
_FIELD_PATH = r"^(metadata\.(name|namespace|uid|(labels|annotations)\['.+'\])|spec\.nodeName|status\.podIP)$"
Args = Annotated[list[Text], Field(max_length=200)]


class LocalObjectReference(Model):
    name: ObjectName
    """Name of the object, in the same namespace."""


class KeySelector(Model):
    name: ObjectName
    """Name of the object, in the same namespace."""
    key: Key
    """The key in it."""
    optional: bool | None = None
    """Whether the object or the key may be missing. Default false."""


class FieldSelector(Model):
    field_path: Annotated[str, Field(max_length=400, pattern=_FIELD_PATH)]
    """metadata.name, metadata.namespace, metadata.uid, metadata.labels['KEY'], metadata.annotations['KEY'], spec.nodeName, status.podIP."""
    api_version: Literal["v1"] | None = None
    """Version of the pod's API; v1."""


class EnvSource(Model):
    secret_key_ref: KeySelector | None = None
    """A key of a Secret."""
    config_map_key_ref: KeySelector | None = None
    """A key of a ConfigMap."""
    field_ref: FieldSelector | None = None
    """A field of the pod itself."""

    rules = (exactly_one("secret_key_ref", "config_map_key_ref", "field_ref"),)


class EnvVar(Model):
    name: Annotated[EnvName, _OWN_VARIABLE]
    """Name of the variable. Names that begin with PERDURE_ are reserved."""
    value: Text | None = None
    """Its value; $(NAME) stands for another variable."""
    value_from: EnvSource | None = None
    """Where the value comes from. Not together with value."""

    rules = (at_most_one("value", "value_from"),)


class OptionalReference(Model):
    name: ObjectName
    """Name of the object, in the same namespace."""
    optional: bool | None = None
    """Whether it may be missing. Default false."""


class EnvFrom(Model):
    prefix: Annotated[str, Field(max_length=253)] | None = None
    """Goes before each name."""
    config_map_ref: OptionalReference | None = None
    """All keys of a ConfigMap."""
    secret_ref: OptionalReference | None = None
    """All keys of a Secret."""

    rules = (exactly_one("config_map_ref", "secret_ref"),)


class VolumeMount(Model):
    name: OwnName
    """Name of one of the volumes."""
    mount_path: Path
    """Where the container sees it."""
    sub_path: Path | None = None
    """A path in the volume to mount instead of its root."""
    read_only: bool | None = None
    """Whether the container may only read. Default false."""


Resources = Annotated[dict[LabelKey, Quantity], Field(max_length=20)]


class ResourceRequirements(Model):
    requests: Resources | None = None
    """What the scheduler reserves, such as cpu: 500m."""
    limits: Resources | None = None
    """What the container may use at most."""


class Capabilities(Model):
    drop: Annotated[list[Short], Field(max_length=64)] | None = None
    """Capabilities that the container does without. None can be added."""


class SeccompProfile(Model):
    type: Literal["RuntimeDefault", "Localhost"]
    """Which profile; Unconfined is not allowed."""
    localhost_profile: Path | None = None
    """File of the profile below the kubelet's folder, for type Localhost."""


class SecurityContext(Model):
    """Security settings; only those that Pod Security "restricted" allows."""

    allow_privilege_escalation: Literal[False] | None = None
    """May only be false."""
    capabilities: Capabilities | None = None
    """Linux capabilities; may only be dropped."""
    read_only_root_filesystem: bool | None = None
    """Whether the container's own file system is read-only."""
    run_as_non_root: Literal[True] | None = None
    """May only be true."""
    run_as_user: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = None
    """User id; not 0."""
    run_as_group: Ident | None = None
    """Group id."""
    seccomp_profile: SeccompProfile | None = None
    """System calls that are allowed."""


class ContainerPort(Model):
    container_port: Annotated[int, Field(ge=1, le=65_535)]
    """The port that the container listens on."""
    name: Annotated[str, Field(min_length=1, max_length=15, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] | None = None
    """A name for it."""
    protocol: Literal["TCP", "UDP", "SCTP"] | None = None
    """Default TCP."""


class Container(Model):
    name: OwnName
    """Name of the container; that of the agent is `agent`."""
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Name of the image."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled. Default: Always if its tag is latest, else IfNotPresent."""
    command: Args | None = None
    """The program and its first arguments. Default: the image's entrypoint."""
    args: Args | None = None
    """Arguments of the program. Default: the image's."""
    working_dir: Path | None = None
    """Default: the image's."""
    env: Annotated[list[EnvVar], Field(max_length=200), Distinct(("name",))] | None = None
    """Variables of the environment."""
    env_from: Annotated[list[EnvFrom], Field(max_length=20)] | None = None
    """Objects whose keys become variables of the environment."""
    ports: Annotated[list[ContainerPort], Field(max_length=20)] | None = None
    """Ports that the container listens on; for information."""
    resources: ResourceRequirements | None = None
    """What the container needs, and how much it may use."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=50), Distinct(("mountPath",))] | None = None
    """Volumes that the container sees."""
    security_context: SecurityContext | None = None


class InitContainer(Container):
    restart_policy: Literal["Always"] | None = None
    """`Always` makes it a native sidecar."""


class KeyToPath(Model):
    key: Key
    """The key in the object."""
    path: Path
    """The file's path in the volume."""
    mode: Annotated[int, Field(ge=0, le=0o777)] | None = None
    """The file's mode, in YAML octal (0644) or decimal."""


Items = Annotated[list[KeyToPath], Field(max_length=100)]
Mode = Annotated[int, Field(ge=0, le=0o777)]


class EmptyDir(Model):
    """A folder that lives as long as the pod."""

    medium: Literal["", "Memory"] | None = None
    """Memory: a tmpfs, counted as the container's memory."""
    size_limit: Quantity | None = None
    """How much may be in it, such as 1Gi."""


class ConfigMapVolume(Model):
    name: ObjectName
    """Name of the ConfigMap."""
    items: Items | None = None
    """Which keys become files, and where; left out, all."""
    default_mode: Mode | None = None
    """Mode of the files. Default 0644."""
    optional: bool | None = None
    """Whether it may be missing. Default false."""


class SecretVolume(Model):
    secret_name: ObjectName
    """Name of the Secret."""
    items: Items | None = None
    """Which keys become files, and where; left out, all."""
    default_mode: Mode | None = None
    """Mode of the files. Default 0644."""
    optional: bool | None = None
    """Whether it may be missing. Default false."""


class ClaimVolume(Model):
    claim_name: ObjectName
    """Name of the PersistentVolumeClaim."""
    read_only: bool | None = None
    """Default false."""


class Volume(Model):
    name: OwnName
    """The name that volumeMounts refer to."""
    empty_dir: EmptyDir | None = None
    """A folder that lives as long as the pod."""
    config_map: ConfigMapVolume | None = None
    """The keys of a ConfigMap as files."""
    secret: SecretVolume | None = None
    """The keys of a Secret as files."""
    persistent_volume_claim: ClaimVolume | None = None
    """A volume that outlives the pod."""

    rules = (exactly_one("empty_dir", "config_map", "secret", "persistent_volume_claim"),)


class PodSecurityContext(Model):
    """Security settings of all containers; only those that Pod Security "restricted" allows."""

    run_as_non_root: Literal[True] | None = None
    """May only be true."""
    run_as_user: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = None
    """User id; not 0."""
    run_as_group: Ident | None = None
    """Group id."""
    fs_group: Ident | None = None
    """Group that owns the files of volumes."""
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    """When the owner of a volume's files is changed. Default Always."""
    supplemental_groups: Annotated[list[Ident], Field(max_length=32)] | None = None
    """Further groups of the processes."""
    seccomp_profile: SeccompProfile | None = None
    """System calls that are allowed."""


def _no_name_twice(spec: Any) -> bool:
    return not {c.name for c in spec.containers} & {c.name for c in spec.init_containers or ()}


class PodSpec(Model):
    containers: Annotated[list[Container], Field(min_length=1, max_length=10), Distinct(("name",))]
    """The containers; one of them is named `agent`."""
    init_containers: Annotated[list[InitContainer], Field(max_length=10), Distinct(("name",))] | None = None
    """Containers that run before the others, or, with restartPolicy Always, beside them."""
    volumes: Annotated[list[Volume], Field(max_length=50), Distinct(("name",))] | None = None
    """Volumes that containers can mount."""
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=10), Distinct(("name",))] | None = None
    """Secrets for pulling the images."""
    service_account_name: ObjectName | None = None
    """The service account of the pod. Its token is not mounted in any container of the template."""
    automount_service_account_token: Literal[False] | None = None
    """May only be false."""
    security_context: PodSecurityContext | None = None
    node_selector: Labels | None = None
    """Labels that the node must have."""
    affinity: Affinity | None = None
    tolerations: Annotated[list[Toleration], Field(max_length=50)] | None = None
    """Taints of nodes that the pod tolerates."""
    topology_spread_constraints: TopologySpreads | None = None
    """How the pods are spread over the cluster."""
    priority_class_name: Annotated[ObjectName, _OWN_CLASS] | None = None
    """Name of the pod's PriorityClass. For the order of runs there is the run's own priority."""
    runtime_class_name: ObjectName | None = None
    """Name of the RuntimeClass, such as one for sandboxed containers."""
    termination_grace_period_seconds: Seconds | None = None
    """How long the pod has to stop once it is deleted. Default 30."""

    rules = (
        Rule(
            f"self.containers.exists(container, container.name == '{AGENT_CONTAINER}')",
            f"one of the containers must be named {AGENT_CONTAINER!r}: that is where runs are executed",
            lambda spec: any(container.name == AGENT_CONTAINER for container in spec.containers),
        ),
        Rule(
            "!has(self.initContainers) || self.initContainers.all(first, !self.containers.exists(other, other.name == first.name))",
            "a container and an initContainer have the same name",
            _no_name_twice,
        ),
    )

    @property
    def agent(self) -> Container:
        return next(c for c in self.containers if c.name == AGENT_CONTAINER)


class TemplateMetadata(Model):
    labels: Annotated[Labels, _OWN_LABELS] | None = None
    """Labels of what is made from the template."""
    annotations: Annotated[Annotations, _OWN_LABELS, _NO_PROFILES] | None = None
    """Annotations of what is made from the template."""


class PodTemplate(Model):
    """A pod template: the part of Kubernetes' own that is safe to give to everybody who may create this resource."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the pods."""
    spec: PodSpec
    """What runs in the pods."""
