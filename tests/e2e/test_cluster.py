"""The test cluster itself is a real one: what the other end-to-end tests rely on, each thing once."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.clients import Clients
from tests.cluster.cluster import Cluster

HERE = Path(__file__).parent
AUDIENCE = "gateway.test"
# Whoever comes first waits for an image to be built.


@pytest.fixture(scope="module")
def hello(own_cluster: Cluster) -> str:
    """An image with a small server and its client."""
    return own_cluster.build_image("", "perdure-test-hello:1", context=HERE / "image", dockerfile=HERE / "image" / "Dockerfile")


def test_the_node_is_ready(cluster: Clients) -> None:
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]

    assert nodes
    for node in nodes:
        assert condition(node, "Ready") == "True"


def test_a_pod_with_a_native_sidecar_reaches_a_service_by_name(own_cluster: Cluster, namespace: str, hello: str) -> None:
    server = container("server", hello, "serve", "8000") | {"readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    apply(own_cluster, namespace, pod("server", server), service)
    own_cluster.kubectl("wait", "--for=condition=Ready", "pod/server", "-n", namespace, "--timeout=60s", seconds=70)

    sidecar = container("sidecar", hello, "serve", "9000") | {
        "restartPolicy": "Always",
        "startupProbe": {"tcpSocket": {"port": 9000}, "periodSeconds": 1},
    }
    client = pod("client", container("by-name", hello, "ask", "http://server"), container("at-home", hello, "ask", "http://127.0.0.1:9000"))
    # A Service's rules reach the node a moment after its pod is ready.
    client["spec"] |= {"initContainers": [sidecar], "restartPolicy": "OnFailure"}
    apply(own_cluster, namespace, client)

    # The sidecar, which would go on for ever, ends with the pod's work.
    finished(own_cluster, namespace, "client")
    assert [own_cluster.kubectl("logs", "client", "-n", namespace, "-c", name).strip() for name in ("by-name", "at-home")] == ["hello"] * 2


def test_a_projected_token_passes_review_for_its_audience_only(own_cluster: Cluster, namespace: str, hello: str) -> None:
    reader = pod("reader", container("reader", hello, "serve", "8000") | {"volumeMounts": [{"name": "token", "mountPath": "/token"}]})
    source = {"serviceAccountToken": {"path": "token", "audience": AUDIENCE, "expirationSeconds": 600}}
    reader["spec"] |= {"volumes": [{"name": "token", "projected": {"sources": [source]}}]}
    apply(own_cluster, namespace, reader)
    own_cluster.kubectl("wait", "--for=condition=Ready", "pod/reader", "-n", namespace, "--timeout=60s", seconds=70)

    token = own_cluster.kubectl("exec", "reader", "-n", namespace, "--", "cat", "/token/token")

    right = review(own_cluster, token, AUDIENCE)
    assert right["authenticated"]
    assert right["audiences"] == [AUDIENCE]
    assert right["user"]["username"] == f"system:serviceaccount:{namespace}:default"
    assert right["user"]["extra"]["authentication.kubernetes.io/pod-name"] == ["reader"]
    assert not review(own_cluster, token, "somebody.else").get("authenticated")


def test_helm_installs_a_chart(cluster: Clients, namespace: str) -> None:
    cluster.helm("install", "trivial", str(HERE / "chart"), "-n", namespace, "--set", "answer=42", "--wait")

    assert cluster.kubectl("get", "configmap", "trivial", "-n", namespace, "-o", "jsonpath={.data.answer}") == "42"


def test_a_killed_process_is_a_restarted_container(own_cluster: Cluster, namespace: str, hello: str) -> None:
    victim = pod("victim", container("victim", hello, "serve", "8000"))
    victim["spec"]["restartPolicy"] = "Always"
    apply(own_cluster, namespace, victim)
    own_cluster.kubectl("wait", "--for=condition=Ready", "pod/victim", "-n", namespace, "--timeout=60s", seconds=70)

    own_cluster.kill_container_process("victim", "victim", signal.SIGKILL, namespace=namespace)

    restarted = "--for=jsonpath={.status.containerStatuses[0].restartCount}=1"
    own_cluster.kubectl("wait", restarted, "pod/victim", "-n", namespace, "--timeout=60s", seconds=70)
    ended = "jsonpath={.status.containerStatuses[0].lastState.terminated.exitCode}"
    assert own_cluster.kubectl("get", "pod", "victim", "-n", namespace, "-o", ended) == str(128 + signal.SIGKILL)


def test_control_plane_and_kubelet_restart_under_a_running_pod(own_cluster: Cluster, namespace: str, hello: str) -> None:
    apply(own_cluster, namespace, pod("steady", container("steady", hello, "serve", "8000")))
    own_cluster.kubectl("wait", "--for=condition=Ready", "pod/steady", "-n", namespace, "--timeout=60s", seconds=70)
    before = container_ids(own_cluster, namespace, "steady")

    own_cluster.restart_kubelet()
    own_cluster.restart_apiserver()

    apply(own_cluster, namespace, pod("later", container("later", hello, "ask", f"http://{pod_ip(own_cluster, namespace, 'steady')}:8000")))
    finished(own_cluster, namespace, "later")
    assert container_ids(own_cluster, namespace, "steady") == before


def test_the_audit_log_tells_who_did_what(own_cluster: Cluster, namespace: str) -> None:
    own_cluster.kubectl("create", "configmap", "audited", "-n", namespace)

    entries = [json.loads(line) for line in own_cluster.audit_log.read_text().splitlines()]
    [created] = [entry for entry in entries if entry["verb"] == "create" and entry["objectRef"].get("namespace") == namespace
                 and entry["objectRef"].get("name") == "audited"]  # fmt: skip
    assert (created["level"], created["stage"], created["user"]["username"]) == ("Metadata", "ResponseComplete", "admin")


@pytest.mark.parametrize(("target", "package"), [("operator", "perdure_operator.main"), ("sidecar", "perdure.sidecar")])
def test_the_projects_own_image_runs(own_cluster: Cluster, namespace: str, target: str, package: str) -> None:
    image = own_cluster.build_image(target, f"perdure-{target}:test")
    own = container("own", image) | {"command": ["python", "-c", f"import {package}, os; print(os.getuid())"]}

    apply(own_cluster, namespace, pod("own", own))

    finished(own_cluster, namespace, "own")
    assert own_cluster.kubectl("logs", "own", "-n", namespace).strip() == "65532"


def pod(name: str, *containers: dict[str, Any]) -> dict[str, Any]:
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": list(containers)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def container(name: str, image: str, *args: str) -> dict[str, Any]:
    return {"name": name, "image": image, "imagePullPolicy": "Never", "args": list(args)}


def apply(cluster: Clients, namespace: str, *objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def finished(cluster: Clients, namespace: str, name: str) -> None:
    cluster.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "-n", namespace, "--timeout=60s", seconds=70)


def condition(thing: dict[str, Any], kind: str) -> str:
    return str(next(item["status"] for item in thing["status"]["conditions"] if item["type"] == kind))


def container_ids(cluster: Clients, namespace: str, name: str) -> str:
    return cluster.kubectl("get", "pod", name, "-n", namespace, "-o", "jsonpath={.status.containerStatuses[*].containerID}")


def pod_ip(cluster: Clients, namespace: str, name: str) -> str:
    return cluster.kubectl("get", "pod", name, "-n", namespace, "-o", "jsonpath={.status.podIP}")


def review(cluster: Clients, token: str, audience: str) -> dict[str, Any]:
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token, "audiences": [audience]}}
    answer: dict[str, Any] = json.loads(cluster.kubectl("create", "-f", "-", "-o", "json", input=json.dumps(asked)))["status"]
    return answer
