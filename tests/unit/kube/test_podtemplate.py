"""What a template may not say of a pod: every field that Kubernetes has and the allow-list has not, and every value that a rule forbids."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.unit.kube.pod_fields import CONTAINER, REFUSED_VALUES, TEMPLATE, Path, refused_fields, template_with, unknown_fields

from perdure_operator.kube.api.problems import InvalidManifest
from perdure_operator.kube.api.v1alpha1 import AgentPool, AgentRun, implicit_pool, parse_manifest

REFUSED = list(refused_fields())


def dotted(path: Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def resource(template: dict[str, Any], kind: str) -> dict[str, Any]:
    spec = {"template": template} if kind == "AgentPool" else {"agent": {"template": template}}
    return {"apiVersion": "perdure.dev/v1alpha1", "kind": kind, "metadata": {"name": "a"}, "spec": spec}


def problems(template: dict[str, Any], kind: str = "AgentPool") -> list[str]:
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(resource(template, kind))
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("path", REFUSED, ids=dotted)
def test_no_other_field_of_a_pod_gets_in(path: Path) -> None:
    assert any(f"spec.template.{dotted(path)}: unknown field" in found for found in problems(template_with(path, True)))


@pytest.mark.parametrize(
    "path",
    """
    spec.hostNetwork spec.hostPID spec.hostIPC spec.hostUsers spec.shareProcessNamespace spec.nodeName spec.schedulerName spec.hostAliases
    spec.ephemeralContainers spec.restartPolicy spec.dnsConfig spec.serviceAccount spec.priority spec.resourceClaims spec.overhead spec.os
    spec.volumes[0].hostPath spec.volumes[0].projected spec.volumes[0].csi spec.volumes[0].nfs spec.volumes[0].image
    spec.volumes[0].downwardAPI spec.volumes[0].ephemeral
    spec.securityContext.sysctls spec.securityContext.seLinuxOptions spec.securityContext.windowsOptions
    spec.securityContext.appArmorProfile
    spec.containers[0].securityContext.privileged spec.containers[0].securityContext.procMount
    spec.containers[0].securityContext.seLinuxOptions spec.containers[0].securityContext.windowsOptions
    spec.containers[0].securityContext.appArmorProfile spec.containers[0].securityContext.capabilities.add
    spec.containers[0].ports[0].hostPort spec.containers[0].ports[0].hostIP spec.containers[0].lifecycle spec.containers[0].volumeDevices
    spec.containers[0].livenessProbe spec.containers[0].terminationMessagePath spec.containers[0].volumeMounts[0].mountPropagation
    spec.initContainers[0].securityContext.privileged spec.initContainers[0].ports[0].hostPort
    """.split(),
)
def test_the_dangerous_ones_are_among_them(path: str) -> None:
    assert path in map(dotted, REFUSED)


def test_every_field_of_a_template_is_one_of_kubernetes() -> None:
    assert list(unknown_fields()) == []


@pytest.mark.parametrize("kind", ["AgentPool", "AgentRun"])
@pytest.mark.parametrize(("path", "value", "message"), [case[1:] for case in REFUSED_VALUES], ids=[case[0] for case in REFUSED_VALUES])
def test_no_other_value_gets_in(kind: str, path: Path, value: Any, message: str) -> None:
    assert any(re.search(message, found) for found in problems(template_with(path, value), kind)), problems(
        template_with(path, value), kind
    )


def test_labels_of_others_are_kept() -> None:
    assert parse_manifest(resource(template_with(("metadata", "labels"), {"kueue.x-k8s.io/queue-name": "team-a"}), "AgentPool"))


def test_a_quantity_that_yaml_made_a_fraction_is_explained() -> None:
    path: Path = ("spec", "containers", 0, "resources", "limits")
    assert problems(template_with(path, {"cpu": 1.5})) == [
        f"spec.template.{dotted(path)}.cpu: must be a quantity such as 2, '500m' or '1Gi', got 1.5: put it in quotes"
    ]


def test_the_same_template_is_the_same_implicit_pool() -> None:
    run = parse_manifest(resource(TEMPLATE, "AgentRun"))
    other = parse_manifest(resource({"spec": {"containers": [{**CONTAINER, "image": "example/agent:2"}]}}, "AgentRun"))
    assert isinstance(run, AgentRun)
    assert isinstance(other, AgentRun)
    assert run.spec.agent.template is not None
    assert other.spec.agent.template is not None
    first, second = implicit_pool(run.spec.agent.template), implicit_pool(other.spec.agent.template)
    assert first[0] == implicit_pool(run.spec.agent.template)[0] != second[0]
    assert first[1].capacity is not None
    assert first[1].capacity.min_idle == 0


def test_a_full_template_survives_the_round_trip() -> None:
    template = {
        "metadata": {"labels": {"a": "b"}, "annotations": {"example.org/a": "b"}},
        "spec": {
            "containers": [{**CONTAINER, "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}],
            "initContainers": [
                {"name": "proxy", "image": "p", "restartPolicy": "Always", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
            ],
            "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}],
            "automountServiceAccountToken": False,
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"},
                {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"},
            ],
        },
    }
    found = parse_manifest(resource(template, "AgentPool"))
    assert isinstance(found, AgentPool)
    assert found.spec.template.to_json() == template
