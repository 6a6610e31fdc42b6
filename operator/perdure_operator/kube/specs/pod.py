"""The manifest of a worker pod: the agent's template, with the sidecar in front and everything that Pod Security "restricted" asks for.

A pure function of the pool. What makes a pod start late is left out: no probes (readiness is the pod's own connection to the gateway),
and no volume but the sidecar's token, unless the socket or the spool needs one. The token is mounted in the sidecar only, so no container
of the template may mount a volume of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.api.podtemplate import Container, PodTemplate
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.kube.names import (
    AGENT_CONTAINER,
    API_VERSION,
    COMPONENT,
    COMPONENT_LABEL,
    EVICTABLE_VOLUMES,
    GROUP,
    INSTALLATION_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    POD_ID_LABEL,
    POOL_ANNOTATION,
    POOL_LABEL,
    RESERVED_PREFIX,
    SIDECAR_CONTAINER,
    TOKEN_AUDIENCE,
    label_value,
    pod_name,
)

Json = dict[str, Any]

DEFAULT_GRACE_SECONDS = 30
SIDECAR_PORT = 4555
SIDECAR_UID = 65532

_TOKEN_DIR, _SOCKET_DIR, _SPOOL_DIR = "/var/run/secrets/perdure", "/var/run/perdure", "/var/lib/perdure/spool"
_TOKEN_VOLUME, _SOCKET_VOLUME, _SPOOL_VOLUME = f"{RESERVED_PREFIX}token", f"{RESERVED_PREFIX}socket", f"{RESERVED_PREFIX}spool"

_LOOSENING = ("container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/")
"""Annotations of older Kubernetes that loosen what the security context says."""


class ReservedName(PerdureError):
    """The pool's template uses a name that Perdure sets itself."""

    code, status = "reserved-name", 422
    action = "Choose another name in the AgentPool's template."


def _sidecar_resources() -> Mapping[str, Mapping[str, str]]:
    return {"requests": {"cpu": "10m", "memory": "40Mi"}, "limits": {"cpu": "1", "memory": "128Mi"}}


@dataclass(frozen=True)
class PodSettings:
    """What is the same for all worker pods of an installation, and its name, which no other of the cluster has. ``gateway_ca``: PEM text;
    the sidecar trusts exactly these."""

    sidecar_image: str
    gateway_urls: Sequence[str]
    installation: str
    gateway_ca: str = ""
    sidecar_pull_policy: str = "IfNotPresent"
    sidecar_resources: Mapping[str, Mapping[str, str]] = field(default_factory=_sidecar_resources)
    token_audience: str = TOKEN_AUDIENCE
    token_seconds: int = 600


def worker_pod(pool: str, namespace: str, spec: AgentPoolSpec, pod_id: UUID, settings: PodSettings, owner: str | None = None) -> Json:
    """``pool`` is the name without its namespace, ``owner`` the uid of its resource. Raises ReservedName."""
    template = spec.template
    for complaint in _reserved(template):
        raise ReservedName(f"AgentPool {namespace}/{pool}: {complaint}")
    forking = spec.pod_reuse is not None and spec.pod_reuse.mode == "ForkPerRun"
    spooling = spec.spool == "Disk"
    # Both containers are stopped by the kubelet: perdure.sdk.exits says why.
    shared = {"PERDURE_POD_REUSE": "ForkPerRun" if forking else "Never", "PERDURE_AWAIT_SIGTERM": "true"}
    if forking:
        shared["PERDURE_SOCKET"] = f"{_SOCKET_DIR}/agent.sock"
    pod: Json = template.spec.to_json()
    pod["initContainers"] = [
        _sidecar(settings, shared, _resources(spec, settings), spooling=spooling),
        *(_restricted(container) for container in pod.get("initContainers", ())),
    ]
    pod["containers"] = [_restricted(container) for container in pod["containers"]]
    agent = next(container for container in pod["containers"] if container["name"] == AGENT_CONTAINER)
    agent["env"] = _env(shared) + agent.get("env", [])
    if forking:
        agent["volumeMounts"] = [*agent.get("volumeMounts", ()), {"name": _SOCKET_VOLUME, "mountPath": _SOCKET_DIR}]
    pod["volumes"] = [*pod.get("volumes", ()), *_volumes(settings, forking=forking, spooling=spooling)]
    pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}} | pod.get("securityContext", {})
    pod.setdefault("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
    pod |= {"restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False}
    metadata = template.metadata.to_json() if template.metadata else {}
    annotations = {**metadata.get("annotations", {}), POOL_ANNOTATION: f"{namespace}/{pool}"}
    if scratch := _scratch(pod["volumes"], annotations.get(EVICTABLE_VOLUMES)):
        annotations[EVICTABLE_VOLUMES] = scratch
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(pool, pod_id),
            "namespace": namespace,
            "labels": {
                **metadata.get("labels", {}),
                MANAGED_BY_LABEL: MANAGED_BY,
                COMPONENT_LABEL: COMPONENT,
                POOL_LABEL: label_value(pool),
                POD_ID_LABEL: str(pod_id),
                INSTALLATION_LABEL: label_value(settings.installation),
            },
            "annotations": annotations,
            **({"ownerReferences": [_owned_by(pool, owner)]} if owner else {}),
        },
        "spec": pod,
    }


def _owned_by(pool: str, uid: str) -> Json:
    """A pod that has no controller stops a drain and an autoscaler, for nobody would replace it. The pool does not wait for its pods to go:
    its deletion evicts them, and their runs wait for a pool of this name."""
    return {"apiVersion": API_VERSION, "kind": "AgentPool", "name": pool, "uid": uid, "controller": True, "blockOwnerDeletion": False}


def _scratch(volumes: Sequence[Json], allowed: str | None) -> str:
    """The emptyDir volumes that may go with their pod, for the cluster autoscaler, which spares a node with any other. ``allowed``: those
    that the template names; without a word of it all of its own, because what a run needs later is in the store."""
    local = [volume["name"] for volume in volumes if "emptyDir" in volume]
    if allowed is None:
        return ",".join(local)
    ours = [name for name in local if name.startswith(RESERVED_PREFIX)]
    return ",".join([*([allowed] if allowed else []), *ours])


def _resources(spec: AgentPoolSpec, settings: PodSettings) -> Json:
    """Of the sidecar."""
    own = spec.sidecar.resources.to_json() if spec.sidecar and spec.sidecar.resources else {}
    both = {kind: {**settings.sidecar_resources.get(kind, {}), **own.get(kind, {})} for kind in ("requests", "limits")}
    return {kind: amounts for kind, amounts in both.items() if amounts}


def _sidecar(settings: PodSettings, shared: Mapping[str, str], resources: Json, *, spooling: bool) -> Json:
    env = {
        "PERDURE_GATEWAY_URLS": ",".join(settings.gateway_urls),
        "PERDURE_TOKEN_FILE": f"{_TOKEN_DIR}/token",
        "PERDURE_PORT": str(SIDECAR_PORT),
        # Without a volume to share there is nobody who could reach a socket.
        "PERDURE_SOCKET": "off",
        **shared,
    }
    mounts = [{"name": _TOKEN_VOLUME, "mountPath": _TOKEN_DIR, "readOnly": True}]
    if settings.gateway_ca:
        env["PERDURE_GATEWAY_CA"] = settings.gateway_ca
    if shared.get("PERDURE_SOCKET"):
        mounts.append({"name": _SOCKET_VOLUME, "mountPath": _SOCKET_DIR})
    if spooling:
        env["PERDURE_SPOOL_DIR"] = _SPOOL_DIR
        mounts.append({"name": _SPOOL_VOLUME, "mountPath": _SPOOL_DIR})
    return _restricted(
        {
            "name": SIDECAR_CONTAINER,
            "image": settings.sidecar_image,
            "imagePullPolicy": settings.sidecar_pull_policy,
            # Makes it a native sidecar: started before the agent, told to end after it.
            "restartPolicy": "Always",
            "env": _env(env),
            "resources": resources,
            "volumeMounts": mounts,
            "securityContext": {"runAsUser": SIDECAR_UID, "runAsGroup": SIDECAR_UID, "readOnlyRootFilesystem": True},
        }
    )


def _volumes(settings: PodSettings, *, forking: bool, spooling: bool) -> Iterator[Json]:
    token = {"audience": settings.token_audience, "expirationSeconds": settings.token_seconds, "path": "token"}
    yield {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}
    if forking:
        yield {"name": _SOCKET_VOLUME, "emptyDir": {}}
    if spooling:
        yield {"name": _SPOOL_VOLUME, "emptyDir": {}}


def _restricted(container: Json) -> Json:
    """The container with what "restricted" wants of each; the template's model lets nothing through that would be looser."""
    given = container.get("securityContext", {})
    context = {"runAsNonRoot": True, **given, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    # What it said last is all that the operator can tell of it: it reads no logs.
    return {**container, "securityContext": context, "terminationMessagePolicy": "FallbackToLogsOnError"}


def _env(values: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _reserved(template: PodTemplate) -> Iterator[str]:
    """The model refuses some of these already, but not for objects that were stored before it did."""
    metadata = template.metadata
    keys = [*(metadata.labels or ()), *(metadata.annotations or ())] if metadata else []
    for key in keys:
        domain = key.rpartition("/")[0]
        if domain == GROUP or domain.endswith(f".{GROUP}") or key in (MANAGED_BY_LABEL, COMPONENT_LABEL):
            yield f"the label or annotation {key} is set by Perdure itself"
        if key.startswith(_LOOSENING):
            yield f"the annotation {key} may not be used: set securityContext"
    for volume in template.spec.volumes or ():
        if volume.name.startswith(RESERVED_PREFIX):
            yield f"volumes named {RESERVED_PREFIX}… are Perdure's own, {volume.name} cannot be one of yours"
    for container in (*template.spec.containers, *(template.spec.init_containers or ())):
        yield from _reserved_in(container)


def _reserved_in(container: Container) -> Iterator[str]:
    if container.name.startswith(RESERVED_PREFIX):
        yield f"containers named {RESERVED_PREFIX}… are Perdure's own, {container.name} cannot be one of yours"
    for mount in container.volume_mounts or ():
        if mount.name.startswith(RESERVED_PREFIX):
            yield f"the container {container.name} mounts {mount.name}, a volume of Perdure's own"
    for variable in container.env or ():
        if variable.name.startswith("PERDURE_"):
            yield f"the container {container.name} sets {variable.name}; PERDURE_… is set by Perdure itself"
