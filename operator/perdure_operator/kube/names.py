"""Every name that Perdure puts on objects of a cluster: the group, labels, annotations, finalizers, containers, pods.

Names that two programs have to agree on stand here and nowhere else; the chart repeats some of them and its tests compare. Nothing is
imported: each call of the command line needs names, and not the models.
"""

from __future__ import annotations

import hashlib
from uuid import UUID

GROUP = "perdure.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

AGENT_CONTAINER = "agent"
SIDECAR_CONTAINER = "perdure-sidecar"
RESERVED_PREFIX = "perdure-"
"""Names of containers, volumes and mounts that begin so are for what Perdure adds to a pod."""

POOL_LABEL = f"{GROUP}/pool"
POD_ID_LABEL = f"{GROUP}/pod-id"
"""Our own id of a pod, minted before the pod is created."""
INSTALLATION_LABEL = f"{GROUP}/installation"
"""On worker pods: whose they are, where several installations share a cluster; ``label_value`` writes it."""
RUN_ID_LABEL = f"{GROUP}/run-id"
"""On AgentRuns that the projector made, and only there."""
TRIGGER_LABEL = f"{GROUP}/trigger"
"""On AgentRuns that a trigger made: its name, as ``label_value`` writes it."""
SCHEDULED_AT_ANNOTATION = f"{GROUP}/scheduled-at"
"""On AgentRuns that a calendar made: the instant that they were due."""
IMPLICIT_LABEL = f"{GROUP}/implicit"
"""On AgentPools that the operator made of inline templates, and only there."""
MANAGED_BY_LABEL, MANAGED_BY = "app.kubernetes.io/managed-by", "perdure"
COMPONENT_LABEL, COMPONENT = "app.kubernetes.io/component", "worker"

POOL_ANNOTATION = f"{GROUP}/pool"
"""``namespace/name`` in full, which a label value may be too short for."""

EVICTABLE_VOLUMES = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
"""Of the cluster autoscaler: names of volumes, with commas between them, that do not keep it from removing a node."""

CANCEL_FINALIZER = f"{GROUP}/cancel"
FIELD_MANAGER = "perdure-operator"
TOKEN_AUDIENCE = "perdure-gateway"  # noqa: S105 (a name, no secret)

_MAX_LABEL_VALUE = 63


def label_value(name: str) -> str:
    """``name``, or, where it is longer than a label value may be, its first 52 characters and 10 of its SHA-256."""
    if len(name) <= _MAX_LABEL_VALUE:
        return name
    return f"{name[:52]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def workers(installation: str) -> str:
    """The selector of its worker pods."""
    return f"{MANAGED_BY_LABEL}={MANAGED_BY},{COMPONENT_LABEL}={COMPONENT},{INSTALLATION_LABEL}={label_value(installation)}"


def pod_name(pool: str, pod_id: UUID) -> str:
    """Of a worker pod of ``pool`` (its name without the namespace)."""
    return f"{pool[:40].rstrip('-.')}-{pod_id.hex[:10]}"
