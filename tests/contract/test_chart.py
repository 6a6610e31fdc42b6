"""What a real API server says about the chart: every object is valid, its pods pass Pod Security, its permissions are what they seem."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster import apiserver, binaries
from tests.cluster.apiserver import ApiServer
from tests.cluster.clients import Clients
from tests.cluster.errors import CommandError
from tests.cluster.unavailable import unavailable
from tests.harness.chart import CHART, MATRIX, QUICKSTART, RELEASE, Rendered, render

from perdure_operator.gateway.kubernetes_auth import RULES

# Of others; their operators bring them.
FOREIGN = {"Certificate": "cert-manager.io/v1", "ServiceMonitor": "monitoring.coreos.com/v1", "PrometheusRule": "monitoring.coreos.com/v1"}
OPERATOR = f"system:serviceaccount:perdure-system:{RELEASE}-operator"


class Helmed(Clients):
    """An API server for which Helm is in the PATH as well."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__(server.kubeconfig)
        self._server = server

    def environment(self) -> dict[str, str]:
        environment = self._server.environment()
        return {**environment, "PATH": f"{binaries.search_path((binaries.HELM,))}:{environment['PATH']}"}

    def apply(self, *objects: dict[str, Any], user: str = "", dry: bool = False) -> str:
        """Raises CommandError."""
        options = [*(["--as", user, "--as-group", "system:serviceaccounts"] if user else []), *(["--dry-run=server"] if dry else [])]
        return self.kubectl(
            "apply", "--server-side", "-f", "-", *options, input=json.dumps({"kind": "List", "apiVersion": "v1", "items": objects})
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Helmed]:
    """An API server of its own: what the release installs would be in the way of the tests of the definitions, and they in its."""
    if not binaries.are_built((binaries.HELM,)):
        unavailable("no Helm has been built yet: run `make cluster-build`")
    with apiserver.running() as alone:
        yield _prepared(Helmed(alone))


def _prepared(server: Helmed) -> Helmed:
    for name in ("perdure-system", "team-a", "team-b", "trusted"):
        labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "latest"}
        server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    return server


def checked_by_kubernetes(rendered: Rendered) -> Iterator[dict[str, Any]]:
    """Pods are what Deployments and Jobs would make of them: admission judges pods."""
    for each in rendered.objects:
        if each["kind"] not in FOREIGN:
            yield each
    for where, pod in rendered.pods():
        name = where.partition("/")[2] + "-of-" + where.partition("/")[0].lower()
        # No controller has made the accounts, and who runs is not the question here.
        spec = {key: value for key, value in pod["spec"].items() if key not in ("serviceAccountName", "priorityClassName")}
        spec = {"restartPolicy": "Always", **spec, "automountServiceAccountToken": False}
        if where.startswith("StatefulSet") and "volumes" not in spec:
            spec["volumes"] = [{"name": "data", "emptyDir": {}}]  # the claim's
        metadata = {"name": name, "namespace": "perdure-system", "labels": pod["metadata"].get("labels", {})}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_every_object_is_valid_and_every_pod_restricted(server: Helmed, values: dict[str, Any]) -> None:
    server.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "perdure-system"}})
    objects = list(checked_by_kubernetes(render(values)))
    told = server.apply(*objects, dry=True)
    assert len(told.splitlines()) == len(objects)
    foreign = {(each["kind"], each["apiVersion"]) for each in render(values).objects if each["kind"] in FOREIGN}
    assert foreign <= set(FOREIGN.items())


def test_pod_security_is_at_work_in_these_tests(server: Helmed) -> None:
    pod = next(each for each in checked_by_kubernetes(render(QUICKSTART)) if each["kind"] == "Pod")
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(CommandError, match='violates PodSecurity "restricted'):
        server.apply(pod, dry=True)


# ------------------------------------------------------------------------------------------------ with the release there


@pytest.fixture(scope="module")
def installed(server: Helmed) -> Helmed:
    server.helm("install", RELEASE, str(CHART), "-n", "perdure-system", "--set", "quickstart.enabled=true", "--wait=hookOnly")
    server.kubectl("wait", "--for=condition=Established", "crd/agentruns.perdure.dev", "--timeout=30s")
    return server


def secret(server: Helmed, name: str) -> dict[str, str]:
    return dict(json.loads(server.kubectl("get", "secret", name, "-n", "perdure-system", "-o", "json"))["data"])


def upgrade(server: Helmed, *options: str) -> None:
    arguments = ["upgrade", RELEASE, str(CHART), "-n", "perdure-system", "--set", "quickstart.enabled=true", "--wait=hookOnly", *options]
    server.helm(*arguments)


def test_an_upgrade_keeps_password_authority_and_certificate(installed: Helmed) -> None:
    names = [f"{RELEASE}-{name}" for name in ("postgres", "gateway-ca", "gateway-tls")]
    before = {name: secret(installed, name) for name in names}
    upgrade(installed, "--set", "image.tag=v2")
    assert {name: secret(installed, name) for name in names} == before


def test_another_name_means_another_certificate_by_the_same_authority(installed: Helmed) -> None:
    before = {name: secret(installed, f"{RELEASE}-gateway-{name}") for name in ("ca", "tls")}
    upgrade(installed, "--set", "tls.extraNames={perdure.example.com}")
    after = {name: secret(installed, f"{RELEASE}-gateway-{name}") for name in ("ca", "tls")}
    assert after["ca"] == before["ca"]
    assert after["tls"]["ca.crt"] == before["tls"]["ca.crt"]
    assert after["tls"]["tls.crt"] != before["tls"]["tls.crt"]
    assert b"BEGIN CERTIFICATE" in base64.b64decode(after["tls"]["tls.crt"])


@pytest.mark.parametrize(
    ("account", "verb", "resource", "allowed"),
    [
        ("operator", "create", "pods", "yes"),
        ("operator", "delete", "agentruns.perdure.dev", "yes"),
        ("operator", "patch", "agentruns.perdure.dev/status", "yes"),
        ("operator", "get", "secrets", "no"),
        ("operator", "create", "pods/exec", "no"),
        ("operator", "create", "tokenreviews.authentication.k8s.io", "no"),
        ("gateway", "create", "tokenreviews.authentication.k8s.io", "yes"),
        ("gateway", "get", "secrets", "no"),
        ("gateway", "list", "agentruns.perdure.dev", "no"),
        ("migrations", "get", "pods", "no"),
    ],
)
def test_permissions(installed: Helmed, account: str, verb: str, resource: str, allowed: str) -> None:
    resource, _, sub = resource.partition("/")
    user = f"system:serviceaccount:perdure-system:{RELEASE}-{account}"
    question = ["auth", "can-i", verb, resource, "--as", user, "-n", "team-a", *(["--subresource", sub] if sub else [])]
    try:
        answer = installed.kubectl(*question)
    except CommandError as error:
        answer = error.stdout  # "no" is a failure to kubectl
    assert answer.strip() == allowed


def run(name: str, **metadata: Any) -> dict[str, Any]:
    spec = {"agent": {"poolRef": {"name": "p"}}}
    return {
        "apiVersion": "perdure.dev/v1alpha1",
        "kind": "AgentRun",
        "metadata": {"name": name, "namespace": "team-a", **metadata},
        "spec": spec,
    }


def pod(name: str, **metadata: Any) -> dict[str, Any]:
    found = next(each for each in checked_by_kubernetes(render(QUICKSTART)) if each["kind"] == "Pod")
    return {**found, "metadata": {"name": name, "namespace": "team-a", **metadata}}


@pytest.mark.parametrize("make", [run, pod])
@pytest.mark.parametrize("field", ["labels", "annotations"])
def test_reserved_metadata_is_perdure_s_alone(installed: Helmed, make: Any, field: str) -> None:
    """Not when an object is made, nor later: set, changed or taken away."""
    installed.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "team-a"}})
    name = f"{make.__name__}-{field}"
    reserved, own = {field: {"perdure.dev/pod-id": "1"}}, {field: {"team": "a"}}
    kind = "agentrun" if make is run else "pod"
    with pytest.raises(CommandError, match=f"{field} that begin with perdure.dev/ are set by Perdure only"):
        installed.apply(make(name, **reserved))
    installed.apply(make(name, **own))
    with pytest.raises(CommandError, match="set by Perdure only"):
        installed.kubectl("patch", kind, name, "-n", "team-a", "--type=merge", "-p", json.dumps({"metadata": reserved}))
    by_operator = ["--as", OPERATOR, "-n", "team-a", "--type=merge", "-p"]
    installed.kubectl("patch", kind, name, *by_operator, json.dumps({"metadata": reserved}))
    for change in ("2", None):
        patch = json.dumps({"metadata": {field: {"perdure.dev/pod-id": change}}})
        with pytest.raises(CommandError, match="set by Perdure only"):
            installed.kubectl("patch", kind, name, "-n", "team-a", "--type=merge", "-p", patch)
    installed.kubectl("patch", kind, name, "-n", "team-a", "--type=merge", "-p", json.dumps({"metadata": {field: {"team": "b"}}}))


def test_people_get_their_verbs_through_the_cluster_s_own_roles(installed: Helmed) -> None:
    """Aggregation itself is the controller manager's work, which is not here: what it would add up is what counts."""
    found = json.loads(installed.kubectl("get", "clusterroles", "-l", "rbac.authorization.k8s.io/aggregate-to-edit=true", "-o", "json"))[
        "items"
    ]
    [edit] = [each for each in found if each["metadata"]["name"].endswith(f"{RELEASE}-edit")]
    [asked] = [rule["resources"] for rule in edit["rules"] if rule["verbs"] == ["create"]]
    assert set(asked) == {f"{resource}/{name}" for _, resource, name in RULES.values() if name}


def test_what_an_uninstall_leaves(installed: Helmed) -> None:
    """Last of all here. The hook's Job would never end without a controller."""
    installed.helm("uninstall", RELEASE, "-n", "perdure-system", "--no-hooks")
    kinds = "serviceaccounts,secrets,services,deployments,statefulsets,jobs,networkpolicies,roles,rolebindings,poddisruptionbudgets"
    left = installed.kubectl("get", kinds, "-A", "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    whole = installed.kubectl(
        "get", "clusterroles,clusterrolebindings,validatingadmissionpolicies", "-l", "app.kubernetes.io/name=perdure", "-o", "name"
    )
    assert left.strip() + whole.strip() == ""
