"""Everything that a pod can say and a template may not: fields, by asking Kubernetes' own types; and values, one for each rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kubernetes import client

from perdure_operator.kube.api.podtemplate import PodTemplate
from perdure_operator.kube.api.schema import structural

Path = tuple[str | int, ...]

CONTAINER = {"name": "agent", "image": "example/agent:1", "command": ["python", "-m", "agent"]}
TEMPLATE = {"spec": {"containers": [CONTAINER]}}


def refused_fields() -> Iterator[Path]:
    """Paths below a pod template that Kubernetes knows and our schema does not, down to where the schema ends."""
    return _differences("V1PodTemplateSpec", structural(PodTemplate), known=False)


def unknown_fields() -> Iterator[Path]:
    """Paths that our schema knows and Kubernetes does not."""
    return _differences("V1PodTemplateSpec", structural(PodTemplate), known=True)


def _differences(kind: str, schema: dict[str, Any], *, known: bool, path: Path = ()) -> Iterator[Path]:
    model = getattr(client, kind)
    theirs = {model.attribute_map[name]: found for name, found in model.openapi_types.items()}
    ours = schema["properties"]
    for name in sorted(ours.keys() - theirs.keys() if known else theirs.keys() - ours.keys()):
        yield (*path, name)
    for name in sorted(theirs.keys() & ours.keys()):
        listed = theirs[name].startswith("list[")
        if (inner := re.sub(r"^list\[(.*)\]$", r"\1", theirs[name])) in dir(client):
            below = ours[name]["items"] if listed else ours[name]
            yield from _differences(inner, below, known=known, path=(*path, name, 0) if listed else (*path, name))


def template_with(path: Path, value: Any) -> dict[str, Any]:
    """A good template but for ``value`` at ``path``."""
    return _set(TEMPLATE, path, value)


def _set(where: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(head, int):
        entries = list(where or [{}])
        return [*entries[:head], _set(entries[head], rest, value), *entries[head + 1 :]]
    return {**(where or {}), head: _set((where or {}).get(head), rest, value)}


_SECURITY: Path = ("spec", "containers", 0, "securityContext")
_POD_SECURITY: Path = ("spec", "securityContext")

_INIT: Path = ("spec", "initContainers")
_ENV: Path = ("spec", "containers", 0, "env")
_NO_ROOT, _SECCOMP, _FALSE, _TRUE = "at least 1|equal to 1", "RuntimeDefault", "False|false", "True|true"


def _from(source: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "A", "valueFrom": source}]


def _profile(domain: str) -> dict[str, str]:
    return {f"{domain}.kubernetes.io/agent": "unconfined"}


# Allowed fields with a value that is not: name of the case, path, value, a part of what a person is told (by us, or by the API server).
REFUSED_VALUES: list[tuple[str, Path, Any, str]] = [
    ("token of the service account", ("spec", "automountServiceAccountToken"), True, _FALSE),
    ("escalation", (*_SECURITY, "allowPrivilegeEscalation"), True, _FALSE),
    ("container as root", (*_SECURITY, "runAsUser"), 0, _NO_ROOT),
    ("container maybe as root", (*_SECURITY, "runAsNonRoot"), False, _TRUE),
    ("container without seccomp", (*_SECURITY, "seccompProfile"), {"type": "Unconfined"}, _SECCOMP),
    ("pod as root", (*_POD_SECURITY, "runAsUser"), 0, _NO_ROOT),
    ("pod maybe as root", (*_POD_SECURITY, "runAsNonRoot"), False, _TRUE),
    ("pod without seccomp", (*_POD_SECURITY, "seccompProfile"), {"type": "Unconfined"}, _SECCOMP),
    ("init container as root", _INIT, [{"name": "i", "image": "i", "securityContext": {"runAsUser": 0}}], _NO_ROOT),
    ("our variable", _ENV, [{"name": "PERDURE_SOCKET", "value": "x"}], "begin with PERDURE_"),
    ("our container", _INIT, [{"name": "perdure-sidecar", "image": "x"}], "begin with perdure-"),
    ("our volume", ("spec", "volumes"), [{"name": "perdure-token", "emptyDir": {}}], "begin with perdure-"),
    ("our volume, mounted", (*_ENV[:-1], "volumeMounts"), [{"name": "perdure-token", "mountPath": "/t"}], "begin with perdure-"),
    ("our label", ("metadata", "labels"), {"perdure.dev/pool": "x"}, "reserved"),
    ("a label of a part of ours", ("metadata", "labels"), {"x.perdure.dev/pool": "x"}, "reserved"),
    ("our annotation", ("metadata", "annotations"), {"perdure.dev/pool": "x"}, "reserved"),
    ("AppArmor by annotation", ("metadata", "annotations"), _profile("container.apparmor.security.beta"), "securityContext"),
    ("seccomp by annotation", ("metadata", "annotations"), _profile("seccomp.security.alpha"), "securityContext"),
    ("priority of the system", ("spec", "priorityClassName"), "system-node-critical", "system-"),
    ("no agent", ("spec", "containers", 0, "name"), "main", "must be named 'agent'"),
    ("a name twice", _INIT, [{"name": "agent", "image": "x"}], "the same name"),
    ("a container twice", ("spec", "containers"), [CONTAINER, CONTAINER], "twice|Duplicate"),
    (
        "a volume of two kinds",
        ("spec", "volumes"),
        [{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}],
        "exactly one of emptyDir",
    ),
    ("a volume of no kind", ("spec", "volumes"), [{"name": "v"}], "exactly one of emptyDir"),
    ("a value from two places", _ENV, [{"value": "1", **_from({"fieldRef": {"fieldPath": "metadata.name"}})[0]}], "value or valueFrom"),
    ("a value from nowhere", _ENV, _from({}), "exactly one of secretKeyRef"),
    ("variables from nowhere", (*_ENV[:-1], "envFrom"), [{"prefix": "A"}], "exactly one of configMapRef"),
    ("a field that tells of the node", _ENV, _from({"fieldRef": {"fieldPath": "status.hostIP"}}), "status"),
]
