"""The commands on a cluster: an apiserver that the test plays, and behind its port-forward a gateway with TLS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from tests.harness.authority import Authority
from tests.unit.cli.fake_apiserver import FakeApiServer
from tests.unit.cli.fake_gateway import EVENTS, POD_ID, RUN_ID, FakeGateway, problem, run
from typer.testing import CliRunner, Result

from perdure_operator.cli.main import app, kubectl_app
from perdure_operator.local.state import Session, StateDir

POD_NAME = "worker-6f1f3c0e6c"
Call = Callable[..., Result]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture
def gateway(authority: Authority) -> Iterator[FakeGateway]:
    with FakeGateway(authority.issue("gateway", "perdure-gateway.perdure.svc")) as found:
        for name in ("weekly", RUN_ID):
            path = f"GET /v1/namespaces/team/runs/{name}"
            found.answers[path] = run(namespace="team", pool="team/worker")
            found.answers[f"{path}/events"] = {"items": EVENTS, "next": None}
        found.answers["GET /v1/namespaces/team/runs"] = {"items": [run(namespace="team", pool="team/worker")], "next": None}
        yield found


@pytest.fixture
def server(gateway: FakeGateway, authority: Authority) -> Iterator[FakeApiServer]:
    with FakeApiServer() as found:
        found.target = gateway.port
        data = {"url": "", "namespace": "perdure", "service": "perdure-gateway", "port": "443", "ca.crt": authority.pem}
        found.add("configmaps", "perdure", "perdure-cli", metadata={"labels": {"app.kubernetes.io/name": "perdure"}}, data=data)
        ports = [{"name": "https", "port": 443, "targetPort": "https"}]
        found.add("services", "perdure", "perdure-gateway", spec={"selector": {"app": "gateway"}, "ports": ports})
        for name, ready in (("gateway-a", "False"), ("gateway-b", "True")):
            containers = [{"name": "gateway", "ports": [{"name": "https", "containerPort": 8443}]}]
            state = {"conditions": [{"type": "Ready", "status": ready}]}
            found.add("pods", "perdure", name, metadata={"labels": {"app": "gateway"}}, spec={"containers": containers}, status=state)
        yield found


def kubeconfig(server: FakeApiServer, **user: Any) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": user or {"token": "the-token"}}],
    }


@pytest.fixture
def call(server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs `kubectl agentrun`, with a kubeconfig for the fake cluster in KUBECONFIG."""
    for name in ("PERDURE_STATE", "PERDURE_SERVER", "PERDURE_NAMESPACE", "PERDURE_SYSTEM_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(kubeconfig(server)))
    monkeypatch.setenv("KUBECONFIG", str(file))
    return lambda *words, application=kubectl_app: CliRunner().invoke(application, list(words))


# ------------------------------------------------------------------------------------------------ which one is meant


def a_local_session(folder: Path) -> None:
    state = StateDir(folder / ".perdure")
    state.create()
    state.write_session(Session(1, "2026-11-21T12:00:00+00:00", ["http://127.0.0.1:9"], "t", "", "/tmp/x"))


def test_perdure_means_the_cluster_where_there_is_no_dev(call: Call, gateway: FakeGateway) -> None:
    result = call("get", application=app)
    assert result.exit_code == 0, result.output
    assert "weekly" in result.stdout
    assert POD_NAME in result.stdout
    assert gateway.last()[0] == "GET /v1/namespaces/team/runs"


def test_perdure_means_the_nearest_dev_and_says_so(call: Call, tmp_path: Path) -> None:
    a_local_session(tmp_path)
    result = call("get", application=app)
    assert result.exit_code == 5
    assert "no gateway answers at http://127.0.0.1:9" in result.stderr
    assert "Meant was the `perdure dev` of " in result.stderr
    assert "For a cluster: --context NAME, or `kubectl agentrun`." in result.stderr


def test_a_stopped_dev_is_meant_all_the_same(call: Call, tmp_path: Path, server: FakeApiServer) -> None:
    a_local_session(tmp_path)
    StateDir(tmp_path / ".perdure").end_session()
    result = call("cancel", "weekly", application=app)
    assert result.exit_code == 5
    assert f"the `perdure dev` of {tmp_path} is stopped" in result.stderr
    assert server.asked == []


@pytest.mark.parametrize("words", [("get", "--context", "here"), ("--context", "here", "get"), ("get", "--kubeconfig", "kubeconfig")])
def test_an_option_means_the_cluster_although_there_is_a_dev(call: Call, tmp_path: Path, words: tuple[str, ...]) -> None:
    a_local_session(tmp_path)
    result = call(*words, application=app)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("-n", "before", "get"), "before"),
        (("get", "-n", "after"), "after"),
        (("-n", "before", "get", "-n", "after"), "after"),
        (("get",), "environment"),
    ],
)
def test_the_namespace_before_or_after_the_verb(
    call: Call, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], meant: str
) -> None:
    monkeypatch.setenv("PERDURE_NAMESPACE", "environment")
    gateway.answers[f"GET /v1/namespaces/{meant}/runs"] = {"items": [], "next": None}
    result = call(*words)
    assert result.exit_code == 0, result.output
    assert gateway.last()[0] == f"GET /v1/namespaces/{meant}/runs"


def test_kubectl_agentrun_means_the_cluster_although_there_is_a_dev(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_local_session(tmp_path)
    monkeypatch.setenv("PERDURE_SERVER", "http://127.0.0.1:9")
    assert call("get").exit_code == 0


def test_no_context_of_that_name(call: Call) -> None:
    result = call("get", "--context", "there", application=app)
    assert result.exit_code == 5
    assert "there is no context there" in result.stderr
    assert "Contexts that there are: here." in result.stderr
    assert "Meant was a cluster. For a `perdure dev`" in result.stderr


# ------------------------------------------------------------------------------------------------ resources that are no runs

VERBS = [
    ("why", "inl"), ("get", "inl"), ("report", "inl"), ("cancel", "inl"), ("events", "inl"), ("events", "inl", "-f"), ("logs", "inl"),
    ("signal", "inl", "go"), ("tree", "inl"), ("why", "team/inl"),
]  # fmt: skip
HINT = "`kubectl describe agentrun inl -n team` shows all of it; `kubectl agentrun get` lists the runs that there are.\n"


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_an_agentrun_without_a_record_is_not_denied(call: Call, server: FakeApiServer, words: tuple[str, ...]) -> None:
    said = {"type": "Succeeded", "status": "Unknown", "reason": "PoolNotFound", "message": "there is no AgentPool nope in namespace team"}
    server.add("agentruns", "team", "inl", spec={}, status={"phase": "Pending", "waitReason": "PoolNotFound", "conditions": [said]})
    result = call(*words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith(
        "error: there is no record of a run inl in namespace team, but the AgentRun is there: "
        f"Pending, PoolNotFound: there is no AgentPool nope in namespace team\n{HINT}"
    )


def test_an_agentrun_that_no_operator_has_looked_at(call: Call, server: FakeApiServer) -> None:
    server.add("agentruns", "team", "inl", spec={})
    result = call("why", "inl")
    assert result.exit_code == 3
    assert result.stderr.startswith(
        f"error: there is no record of a run inl in namespace team, but the AgentRun is there: no operator has looked at it yet\n{HINT}"
    )


def test_a_run_that_there_is_not_at_all(call: Call, server: FakeApiServer) -> None:
    server.add("agentruns", "elsewhere", "inl", spec={})
    for forbidden in (False, True):
        result = call("why", "inl")
        assert result.exit_code == 3
        assert result.stderr.startswith(
            "error: there is no such run\nCheck namespace and name; `kubectl agentrun get` lists the runs.\n"
        ), forbidden
        server.add("agentruns", "team", "inl", spec={})
        server.forbidden.add("GET /apis/perdure.dev/v1alpha1/namespaces/team/agentruns/inl")


# ------------------------------------------------------------------------------------------------ the gateway and its credential


def test_the_gateway_is_shown_the_persons_token_by_a_forward_to_a_ready_pod(
    call: Call, server: FakeApiServer, gateway: FakeGateway
) -> None:
    assert call("get", "weekly", "-o", "json").exit_code == 0
    assert set(server.forwards) == {"gateway-b"}
    assert {asked.query.get("ports") for asked in server.asked if asked.path.endswith("/portforward")} == {"8443"}
    assert gateway.last()[2]["Authorization"] == "Bearer the-token"


def test_a_published_address_comes_first(call: Call, server: FakeApiServer, gateway: FakeGateway, authority: Authority) -> None:
    with FakeGateway(authority.issue("direct", "localhost")) as direct:
        direct.answers["GET /v1/namespaces/team/runs"] = {"items": [], "next": None}
        server.objects["configmaps", "perdure", "perdure-cli"]["data"]["url"] = f"https://localhost:{direct.port}"
        assert call("get").exit_code == 0
        assert len(direct.requests) == 1
    assert server.forwards == []
    result = call("get")
    assert result.exit_code == 0, result.output
    assert server.forwards == ["gateway-b"], "it does not answer any more"


def test_a_gateway_with_another_certificate_is_shown_no_token(
    call: Call, server: FakeApiServer, authority: Authority, gateway: FakeGateway
) -> None:
    with FakeGateway(authority.issue("other", "elsewhere.perdure.svc")) as other:
        server.target = other.port
        result = call("get")
        assert result.exit_code == 5
        assert "certificate" in result.stderr
        assert other.requests == []


def test_a_connection_is_used_for_all_pages(call: Call, server: FakeApiServer, gateway: FakeGateway) -> None:
    def page(request: web.Request) -> dict[str, Any]:
        first = "after" not in request.query
        return {"items": [run(name="one" if first else "two")], "next": RUN_ID if first else None}

    gateway.answers["GET /v1/namespaces/team/runs"] = page
    assert call("get").exit_code == 0
    assert len(gateway.requests) == 2
    assert len(server.forwards) == 1


def test_what_the_node_says_when_nobody_listens(call: Call, server: FakeApiServer) -> None:
    server.refuse = "failed to connect to localhost:8443 inside namespace: connection refused"
    result = call("get")
    assert result.exit_code == 5
    assert "connection refused" in result.stderr
    assert "kubectl get pods" in result.stderr


def test_no_pod_is_ready(call: Call, server: FakeApiServer) -> None:
    server.objects["pods", "perdure", "gateway-b"]["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    result = call("get")
    assert result.exit_code == 5
    assert "no pod of the Service perdure/perdure-gateway is ready" in result.stderr


def test_not_allowed_to_forward_is_4(call: Call, server: FakeApiServer) -> None:
    server.forbidden.add("GET /api/v1/namespaces/perdure/pods/gateway-b/portforward")
    result = call("get")
    assert result.exit_code == 4
    assert "portforward" in result.stderr


def test_whoever_may_not_list_everywhere_finds_it_in_the_usual_place(call: Call, server: FakeApiServer) -> None:
    server.forbidden.add("GET /api/v1/configmaps")
    assert call("get").exit_code == 0


def test_not_installed_is_3_and_says_how_to_name_the_place(call: Call, server: FakeApiServer) -> None:
    server.objects["configmaps", "apps", "perdure-cli"] = server.objects.pop(("configmaps", "perdure", "perdure-cli"))
    server.forbidden.add("GET /api/v1/configmaps")
    result = call("get")
    assert result.exit_code == 3
    assert "--system-namespace NAMESPACE" in result.stderr
    assert call("get", "--system-namespace", "apps").exit_code == 0


def test_installed_twice_asks_which(call: Call, server: FakeApiServer) -> None:
    twin = server.objects["configmaps", "perdure", "perdure-cli"]
    server.add("configmaps", "other", "perdure-cli", metadata={"labels": twin["metadata"]["labels"]}, data=twin["data"])
    result = call("get")
    assert result.exit_code == 2
    assert "in the namespaces other, perdure" in result.stderr


def test_a_certificate_user_is_told_what_to_do(call: Call, server: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig(server, **{"client-certificate": "mine.pem", "client-key": "mine.key"})))
    result = call("get")
    assert result.exit_code == 4
    assert "has no bearer token" in result.stderr
    assert "--as-serviceaccount NAMESPACE/NAME" in result.stderr


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (("ops/robot",), "ops/serviceaccounts/robot"),
        (("robot",), "team/serviceaccounts/robot"),
        (("robot", "-n", "other"), "other/serviceaccounts/robot"),
    ],
)
def test_as_a_service_account(call: Call, server: FakeApiServer, gateway: FakeGateway, options: tuple[str, ...], path: str) -> None:
    call("get", "--as-serviceaccount", *options)
    assert f"/api/v1/namespaces/{path}/token" in server.paths("POST")
    assert gateway.last()[2]["Authorization"] == f"Bearer token-of-{path.replace('/serviceaccounts/', '-')}-1"
    assert server.asked[0].authorization == "Bearer the-token"


def test_a_token_that_ran_out_is_replaced(call: Call, gateway: FakeGateway) -> None:
    def once(request: web.Request) -> Any:
        ended = request.headers["Authorization"].endswith("-1")
        return problem(401, "unauthenticated", "the token has expired", "") if ended else run(namespace="team")

    gateway.answers["GET /v1/namespaces/team/runs/weekly"] = once
    assert call("get", "weekly", "--as-serviceaccount", "robot").exit_code == 0


def test_forbidden_by_the_gateway_is_4(call: Call, gateway: FakeGateway) -> None:
    gateway.answers["POST /v1/namespaces/team/runs/weekly/cancel"] = lambda _: problem(403, "forbidden", "ada may not", "Grant it.")
    result = call("cancel", "weekly")
    assert result.exit_code == 4
    assert result.stderr == "error: ada may not\nGrant it.\nMeant was the cluster of the context here.\n"


def test_a_credential_that_the_apiserver_does_not_accept_is_4(call: Call, server: FakeApiServer) -> None:
    server.tokens.clear()
    assert call("get").exit_code == 4


def test_an_apiserver_that_is_gone_is_5(call: Call, server: FakeApiServer, tmp_path: Path) -> None:
    gone = kubeconfig(server)
    gone["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(gone))
    result = call("get")
    assert result.exit_code == 5
    assert "the apiserver did not answer" in result.stderr


# ------------------------------------------------------------------------------------------------ submit

MANIFESTS = """
{apiVersion: perdure.dev/v1alpha1, kind: AgentRun, metadata: {name: weekly}, spec: {agent: {poolRef: {name: worker}}, input: {a: 1}}}
---
{apiVersion: perdure.dev/v1alpha1, kind: AgentPool, metadata: {name: worker},
 spec: {template: {spec: {containers: [{name: agent, image: i}]}}}}
"""


def test_submit_creates_resources_pools_first(call: Call, server: FakeApiServer, gateway: FakeGateway) -> None:
    Path("runs.yaml").write_text(MANIFESTS)
    result = call("submit", "runs.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout == "team/weekly created\n"
    base = "/apis/perdure.dev/v1alpha1/namespaces/team"
    assert server.paths("POST") == [f"{base}/agentpools", f"{base}/agentruns"]
    made = server.objects["agentruns", "team", "weekly"]
    assert made["spec"] == {"agent": {"poolRef": {"name": "worker"}}, "input": {"a": 1}}
    assert (made["apiVersion"], made["kind"]) == ("perdure.dev/v1alpha1", "AgentRun")
    assert gateway.requests == [], "that needs no gateway"


@pytest.mark.parametrize(("phase", "code"), [("Running", 0), ("Succeeded", 1)])
def test_submit_of_what_is_there(call: Call, server: FakeApiServer, phase: str, code: int) -> None:
    Path("runs.yaml").write_text(MANIFESTS)
    server.add("agentruns", "team", "weekly", spec={}, status={"phase": phase, "runID": RUN_ID})
    result = call("submit", "runs.yaml")
    assert (result.exit_code, result.stdout) == (code, f"team/weekly is there already ({phase})\n")
    if code:
        assert "kubectl agentrun submit runs.yaml" in result.stderr
        assert "perdure dev" not in result.stderr


def test_submit_prints_the_resource(call: Call) -> None:
    result = call("submit", "--pool", "worker", "--name", "one", "--input", "[1]", "-n", "elsewhere", "-o", "json")
    made = json.loads(result.stdout)
    assert (made["kind"], made["metadata"]["name"], made["metadata"]["namespace"]) == ("AgentRun", "one", "elsewhere")
    assert made["spec"]["input"] == [1]


@pytest.mark.parametrize(("state", "code"), [("Succeeded", 0), ("Failed", 1)])
def test_submit_and_watch_waits_for_the_operator_and_for_the_end(
    call: Call, server: FakeApiServer, gateway: FakeGateway, state: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure_operator.cli.cluster.ClusterConnection.poll_seconds", 0.01)
    monkeypatch.setattr("perdure_operator.cli.submit.UNTAKEN_SECONDS", 0.0)
    looks = []

    class Operator(dict[Any, Any]):
        """Takes a resource when it has been looked at twice."""

        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if key[0] == "agentruns" and found is not None:
                looks.append(key)
                if len(looks) > 2:
                    found["status"] = {"runID": RUN_ID, "phase": "Running"}
            return found

    server.objects = Operator(server.objects)
    gateway.answers[f"GET /v1/namespaces/team/runs/{RUN_ID}"] = run(namespace="team", name="one", state=state, pool="team/worker")
    result = call("submit", "--pool", "worker", "--name", "one", "--watch")
    assert result.exit_code == code, result.output
    assert "team/one waits for the operator: it has not looked at it yet" in result.stderr
    assert f"leased by {POD_NAME} (epoch 2)" in result.stderr


def test_store_only_is_posted_to_the_gateway(call: Call, server: FakeApiServer, gateway: FakeGateway) -> None:
    Path("runs.yaml").write_text(MANIFESTS.replace("weekly", "daily"))
    gateway.answers["POST /v1/namespaces/team/runs"] = run(namespace="team", name="daily", state="Pending")
    result = call("submit", "runs.yaml", "--store-only")
    assert result.exit_code == 0, result.output
    what, body, headers = gateway.last()
    assert what == "POST /v1/namespaces/team/runs"
    assert body == {"name": "daily", "spec": {"agent": {"poolRef": {"name": "worker"}}, "input": {"a": 1}}}
    assert headers["Idempotency-Key"] == "manifest:daily"
    assert not any(kind == "agentruns" for kind, _, _ in server.objects)


def test_an_object_that_the_apiserver_refuses_is_4(call: Call, server: FakeApiServer) -> None:
    server.forbidden.add("POST /apis/perdure.dev/v1alpha1/namespaces/team/agentruns")
    assert call("submit", "--pool", "worker").exit_code == 4


# ------------------------------------------------------------------------------------------------ logs

SECOND = "7a1f3c0e-6c3b-4a0e-9d0c-3d1f2a9b7c55"
AGAIN = [
    *EVENTS,
    {"seq": 4, "at": "2026-11-21T12:00:03+00:00", "epoch": 2, "kind": "run.suspended", "data": {}},
    {"seq": 5, "at": "2026-11-21T12:00:09+00:00", "epoch": 3, "kind": "run.leased", "data": {"pod": SECOND, "attempt": 1}},
    {"seq": 6, "at": "2026-11-21T12:00:10+00:00", "epoch": 3, "kind": "run.succeeded", "data": {}},
]


def a_pod(server: FakeApiServer, pod_id: str, log: str | None) -> None:
    name = f"worker-{pod_id.replace('-', '')[:10]}"
    server.add("pods", "team", name, metadata={"labels": {"perdure.dev/pod-id": pod_id}})
    if log is not None:
        server.logs[name, "agent"] = log


def test_logs_of_all_pods_with_a_line_between(call: Call, server: FakeApiServer, gateway: FakeGateway) -> None:
    gateway.answers[f"GET /v1/namespaces/team/runs/{RUN_ID}/events"] = {"items": AGAIN, "next": None}
    a_pod(server, POD_ID, "2026-11-21T12:00:01.5Z one\n2026-11-21T12:00:01.5Z two\n")
    a_pod(server, SECOND, "2026-11-21T12:00:09Z three\n")
    result = call("logs", "weekly")
    assert result.exit_code == 0, result.output
    one, two, between, three = result.stdout.splitlines()
    assert (one, two, three) == ("one", "two", "three")
    assert between.startswith("--- ")
    assert between.endswith(" worker-7a1f3c0e6c goes on (attempt 1, epoch 3) ---")


def test_logs_say_which_pods_are_gone(call: Call, server: FakeApiServer, gateway: FakeGateway) -> None:
    gateway.answers[f"GET /v1/namespaces/team/runs/{RUN_ID}/events"] = {"items": AGAIN, "next": None}
    a_pod(server, SECOND, None)
    result = call("logs", "weekly")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"(the pod {POD_NAME} is gone, and its log with it)",
        "(the pod worker-7a1f3c0e6c is gone, and its log with it)",
    ]


def test_logs_follow_over_suspends_and_cut_connections(
    call: Call, server: FakeApiServer, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure_operator.kube.podlogs.RETRY_SECONDS", 0.01)
    stream = "".join(f"id: {e['seq']}\nevent: {e['kind']}\ndata: {json.dumps(e)}\n\n" for e in AGAIN)
    end = 'event: end\ndata: {"state":"Succeeded"}\n\n'
    gateway.answers[f"GET /v1/namespaces/team/runs/{RUN_ID}/tail"] = web.Response(text=stream + end, content_type="text/event-stream")
    a_pod(server, POD_ID, "2026-11-21T12:00:01Z one\n2026-11-21T12:00:02Z two CUT\n2026-11-21T12:00:03Z three\n")
    a_pod(server, SECOND, "2026-11-21T12:00:09Z four\n")
    result = call("logs", "-f", "weekly", "--prefix")
    assert result.exit_code == 0, result.output
    assert [line.split(" | ")[1].split()[0] for line in result.stdout.splitlines()] == ["one", "two", "three", "four"]
    assert [asked.query.get("sinceTime") for asked in server.asked if asked.path.endswith(f"{POD_NAME}/log")] == [
        None,
        "2026-11-21T12:00:02Z",
    ]


# ------------------------------------------------------------------------------------------------ report, completion, help


def test_report_is_one_page(call: Call, gateway: FakeGateway) -> None:
    base = f"GET /v1/namespaces/team/runs/{RUN_ID}"
    waited = [
        *AGAIN[:3],
        {"seq": 4, "at": "2026-11-21T12:00:03+00:00", "epoch": 2, "kind": "wait.opened",
         "data": {"key": "/w", "conditions": 1, "first": {"kind": "signal", "name": "approve"}}},
        *AGAIN[3:4],
        {"seq": 5, "at": "2026-11-21T12:05:03+00:00", "epoch": 2, "kind": "wait.satisfied", "data": {"key": "/w", "fired": 1}},
        *AGAIN[4:],
    ]  # fmt: skip
    ended = run(
        namespace="team", pool="team/worker", state="Succeeded", objective="Report to the board", steps=1,
        finishedAt="2026-11-21T12:06:00+00:00", input={"to": "board"}, result={"pages": 7}, podId=None,
    )  # fmt: skip
    gateway.answers["GET /v1/namespaces/team/runs/weekly"] = ended
    gateway.answers[f"{base}/journal"] = {"items": [{"key": "/step:a#0", "kind": "step", "name": "crawl", "state": "succeeded", "seq": 3}]}
    entry = {"key": "k", "tool": "send_email", "effect": "external", "state": "SUCCEEDED", "attempts": 2, "providerRef": "msg-1"}
    gateway.answers[f"{base}/ledger"] = {"items": [entry]}
    gateway.answers[f"{base}/tree"] = {"run": ended, "descendants": [run(name="weekly-child", parent=RUN_ID, state="Failed")]}
    gateway.answers[f"{base}/events"] = {"items": waited, "next": None}
    result = call("report", "weekly")
    assert result.exit_code == 0, result.output
    page = " ".join(result.stdout.split())
    for part in (
        "team/weekly Succeeded",
        "objective Report to the board",
        'input {"to": "board"}',
        "crawl succeeded",
        "send_email SUCCEEDED 2 msg-1",
        "weekly-child Failed",
        "signal approve came 5m",
        f"{POD_NAME} 2s suspended",
        "6m, of which 3s with a worker",
        "1 step, 2 calls with effects, 1 child",
        'result {"pages": 7}',
    ):
        assert part in page, page
    assert json.loads(call("report", "weekly", "-o", "json").stdout)["ledger"] == [entry]


def test_report_of_a_run_that_ended_in_a_wait(call: Call, gateway: FakeGateway) -> None:
    base = f"GET /v1/namespaces/team/runs/{RUN_ID}"
    first = {"kind": "signal", "name": f"effect:{'ab' * 32}:1"}
    events = [
        *AGAIN[:3],
        {"seq": 4, "at": "2026-11-21T12:00:03+00:00", "epoch": 2, "kind": "wait.opened",
         "data": {"key": "/w", "conditions": 1, "first": first}},
        {"seq": 5, "at": "2026-11-21T12:00:46+00:00", "epoch": 2, "kind": "run.cancelled", "data": {}},
    ]  # fmt: skip
    gateway.answers["GET /v1/namespaces/team/runs/weekly"] = run(namespace="team", pool="team/worker", state="Cancelled", podId=None)
    gateway.answers[f"{base}/journal"] = {"items": []}
    entry = {"key": "ab" * 32, "tool": "pay", "effect": "external", "state": "UNKNOWN", "attempts": 1}
    gateway.answers[f"{base}/ledger"] = {"items": [entry]}
    gateway.answers[f"{base}/tree"] = {"run": {}, "descendants": []}
    gateway.answers[f"{base}/events"] = {"items": events, "next": None}
    result = call("report", "weekly")
    assert result.exit_code == 0, result.output
    assert "decision about pay run cancelled 43s" in " ".join(result.stdout.split())


def complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    from perdure_operator.cli import completion

    monkeypatch.setattr("sys.argv", ["kubectl_complete-agentrun", *words])
    for name in (completion.VARIABLE, "_TYPER_COMPLETE_FISH_ACTION", "_TYPER_COMPLETE_ARGS"):
        monkeypatch.setenv(name, "")
    completion.main()
    return capsys.readouterr().out.splitlines()


def test_completion_of_triggers_and_their_dead_deliveries(
    call: Call, server: FakeApiServer, gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("triggers", "team", "nightly", spec={})
    server.add("triggers", "elsewhere", "never", spec={})
    gateway.answers["GET /v1/namespaces/team/triggers/nightly/deliveries"] = {"items": [{"delivery_id": RUN_ID}], "next": None}
    for verb in ("deliveries", "redrive", "fire"):
        assert complete(capsys, monkeypatch, verb, "n") == ["nightly", ":4"]
    assert complete(capsys, monkeypatch, "redrive", "nightly", "") == [RUN_ID, ":4"]
    assert gateway.last()[2]["?state"] == "DEAD"
    server.forbidden.add("GET /apis/perdure.dev/v1alpha1/namespaces/team/triggers")
    assert complete(capsys, monkeypatch, "fire", "n") == [":4"]


def test_completion_for_kubectl(call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    *found, directive = complete(capsys, monkeypatch, "re")
    assert [line.split("\t")[0] for line in found] == ["report", "resume", "redrive"]
    assert directive == ":4"
    assert complete(capsys, monkeypatch, "why", "we") == ["weekly", ":4"]
    assert complete(capsys, monkeypatch, "why", "--context", "here", "") == ["weekly", ":4"]
    assert complete(capsys, monkeypatch, "why", "--context", "there", "") == [":4"]
    assert "--context" in " ".join(complete(capsys, monkeypatch, "why", "--con"))
    assert complete(capsys, monkeypatch, "submit", "")[-1] == ":0"


def test_kubectl_agentrun_has_no_local_commands_and_speaks_of_itself(call: Call, gateway: FakeGateway) -> None:
    text = call("--help").stdout
    assert "Look" in text
    assert " dev " not in text
    assert " kill " not in text
    assert "--as-serviceaccount" in call("why", "--help").stdout
    gateway.answers["GET /v1/namespaces/other/runs/weekly/why"] = {
        "state": "Suspended", "waitingFor": [{"kind": "signal", "name": "approve"}],
    }  # fmt: skip
    assert "to send it: kubectl agentrun signal -n other weekly approve" in call("why", "-n", "other", "weekly").stdout
