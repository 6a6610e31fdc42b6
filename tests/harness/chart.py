"""The chart as Helm renders it: objects instead of text, over the combinations of values that its templates distinguish."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster import binaries

CHART = Path(__file__).parents[2] / "charts" / "perdure"
RELEASE = "perdure"
NAMESPACE = "perdure-system"

Object = dict[str, Any]

QUICKSTART: Object = {"quickstart": {"enabled": True}}
OWN_POSTGRES: Object = {"postgres": {"dsnSecret": {"name": "database"}}}

MATRIX: dict[str, Object] = {
    "quickstart": QUICKSTART,
    "quickstart-emptydir": {"quickstart": {"enabled": True, "persistence": {"enabled": False}}},
    "own-postgres": OWN_POSTGRES,
    "namespaced": {**OWN_POSTGRES, "watchNamespaces": ["team-a", "team-b"], "networkPolicy": {"workers": {"enabled": True}}},
    "cert-manager": {**OWN_POSTGRES, "tls": {"mode": "CertManager", "certManager": {"issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}}},
    "public-authority": {
        **OWN_POSTGRES,
        "tls": {"mode": "Secret", "secret": {"name": "public"}, "caKey": ""},
        "gateway": {"url": "https://perdure.example.com", "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
    },
    "database-with-certificates": {
        "postgres": {
            "dsnSecret": {"name": "cluster-app", "key": "uri"},
            "caSecret": {"name": "cluster-ca"},
            "clientSecret": {"name": "perdure-client"},
        },
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        **{part: {"serviceAccountAnnotations": {"cloud.example/role": part}} for part in ("operator", "gateway", "migrations")},
        "tls": {"mode": "Secret", "secret": {"name": "public"}, "caKey": ""},
    },
    "everything": {
        **QUICKSTART,
        "image": {
            "registry": "registry.example.com/perdure",
            "tag": "1.2.3",
            "pullSecrets": ["pull"],
            "sidecar": {"digest": "sha256:" + "0" * 64},
        },
        "inlineTemplates": {"mode": "Listed", "namespaces": ["trusted"]},
        "operator": {
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "nodeSelector": {"e": "f"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "high",
            "extraEnv": [{"name": "X", "value": "y"}],
        },
        "gateway": {
            "replicas": 1,
            "webhookSecrets": [{"namespace": "team-a", "names": ["hook"]}],
            "extraEnv": [{"name": "X", "value": "y"}],
            "podLabels": {"c": "d"},
        },
        "tls": {"extraNames": ["perdure.example.com"]},
        "networkPolicy": {
            "gatewayFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "workers": {
                "enabled": True,
                "namespaces": ["team-a"],
                "egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 5432}]}],
            },
        },
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"x": "y"}}, "prometheusRule": {"enabled": True}},
    },
    "nothing-optional": {
        **OWN_POSTGRES,
        "podDisruptionBudgets": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "admissionPolicy": {"enabled": False},
        "peopleRoles": {"enabled": False},
        "releaseFinalizers": {"enabled": False},
        "inputFromConfigMaps": {"enabled": False},
        "crds": {"install": False},
    },
}


class Refused(Exception):
    """Helm did not render it; the message is Helm's."""


@dataclass(frozen=True)
class Rendered:
    objects: list[Object]

    def of(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        [found] = [found for found in self.of(kind) if found["metadata"]["name"] == name]
        return found

    def pods(self) -> Iterator[tuple[str, Object]]:
        """``kind/name`` of who makes it, and the pod: ``metadata`` and ``spec``."""
        for found in self.objects:
            where = f"{found['kind']}/{found['metadata']['name']}"
            if found["kind"] == "Pod":
                yield where, {"metadata": found["metadata"], "spec": found["spec"]}
            elif found["kind"] in ("Deployment", "StatefulSet", "Job"):
                yield where, found["spec"]["template"]

    def containers(self) -> Iterator[tuple[str, Object]]:
        for where, pod in self.pods():
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
                yield f"{where}/{container['name']}", container


def render(values: Object, *, release: str = RELEASE, namespace: str = NAMESPACE) -> Rendered:
    """Raises Refused."""
    helm = [binaries.HELM.folder / "helm", "template", release, CHART, "--namespace", namespace, "--values", "-"]
    done = subprocess.run(helm, input=json.dumps(values), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    return Rendered([found for found in yaml.safe_load_all(done.stdout) if found])


def environment(container: Object) -> dict[str, Object]:
    return {entry["name"]: entry for entry in container.get("env", [])}
