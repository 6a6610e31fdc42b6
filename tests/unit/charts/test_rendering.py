"""What the chart renders fits together, over all combinations of values that its templates distinguish."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.chart import MATRIX, NAMESPACE, OWN_POSTGRES, QUICKSTART, RELEASE, Rendered, environment, render

from perdure_operator.config import GatewayConfig, OperatorConfig

SECRETS = {"PERDURE_DSN": "postgresql://x", "POSTGRES_PASSWORD": "x", "PERDURE_OPERATOR_NAME": "pod", "PERDURE_GATEWAY_NAME": "pod"}


@pytest.fixture(scope="module", params=MATRIX)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(MATRIX[request.param])


@pytest.fixture(scope="module")
def quickstart() -> Rendered:
    return render(QUICKSTART)


def described(container: dict[str, Any]) -> dict[str, str]:
    """The environment as the process sees it."""
    return {name: entry.get("value", SECRETS.get(name, "?")) for name, entry in environment(container).items()}


def container_of(rendered: Rendered, kind: str, name: str) -> dict[str, Any]:
    [container] = rendered.one(kind, f"{RELEASE}-{name}")["spec"]["template"]["spec"]["containers"]
    return dict(container)


# ------------------------------------------------------------------------------------------------------------- objects


def test_no_two_objects_have_one_name(rendered: Rendered) -> None:
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in rendered.objects]
    assert len(set(names)) == len(names)


def test_every_object_is_labelled_as_ours(rendered: Rendered) -> None:
    for each in rendered.objects:
        # Definitions are generated, and outlive every release.
        if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") != "keep":
            labels = each["metadata"]["labels"]
            assert labels["app.kubernetes.io/instance"] == RELEASE
            assert labels["app.kubernetes.io/managed-by"] == "Helm"
            assert labels["app.kubernetes.io/component"]


def test_what_is_selected_exists(rendered: Rendered) -> None:
    """Services, budgets, policies and spreads name labels that some pod has."""
    pods = [pod["metadata"]["labels"] for _, pod in rendered.pods()]
    selectors = [each["spec"]["selector"] for each in rendered.of("Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in rendered.of("PodDisruptionBudget")]
    selectors += [
        each["spec"]["podSelector"]["matchLabels"]
        for each in rendered.of("NetworkPolicy")
        if "worker" not in str(each["spec"]["podSelector"])
    ]
    for _, pod in rendered.pods():
        selectors += [spread["labelSelector"]["matchLabels"] for spread in pod["spec"].get("topologySpreadConstraints", [])]
    for selector in selectors:
        assert any(selector.items() <= labels.items() for labels in pods), selector


def test_what_is_mounted_and_referred_to_exists(rendered: Rendered) -> None:
    """Accounts and Secrets of pods are rendered too, unless values name them."""
    accounts = {each["metadata"]["name"] for each in rendered.of("ServiceAccount")}
    secrets = {each["metadata"]["name"] for each in rendered.of("Secret")} | {"database", "public", "pull"}
    secrets |= {"cluster-app", "cluster-ca", "perdure-client"}
    secrets |= {each["spec"]["secretName"] for each in rendered.of("Certificate")}
    for where, pod in rendered.pods():
        spec = pod["spec"]
        assert spec.get("serviceAccountName") in accounts | {None}, where
        mounted = {volume["name"] for volume in spec.get("volumes", [])} | {"data"}
        assert {volume["secret"]["secretName"] for volume in spec.get("volumes", []) if "secret" in volume} <= secrets, where
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= mounted, where
            named = [entry["valueFrom"] for entry in container.get("env", []) if "valueFrom" in entry]
            assert {source["secretKeyRef"]["name"] for source in named if "secretKeyRef" in source} <= secrets, where


def test_only_those_who_call_the_api_server_have_a_token(rendered: Rendered) -> None:
    with_token = {where.partition("/")[2] for where, pod in rendered.pods() if pod["spec"]["automountServiceAccountToken"]}
    assert with_token <= {f"{RELEASE}-operator", f"{RELEASE}-gateway", f"{RELEASE}-release-finalizers"}
    assert all(each["automountServiceAccountToken"] is False for each in rendered.of("ServiceAccount"))


# ----------------------------------------------------------------------------------------------------------- processes


def test_the_gateway_understands_its_environment(rendered: Rendered) -> None:
    config = GatewayConfig.from_env(described(container_of(rendered, "Deployment", "gateway")))
    assert (config.listen.port, config.auth) == (8443, "kubernetes")
    assert config.metrics_listen is not None
    assert config.metrics_listen.port == 9090


def test_the_operator_understands_its_environment(rendered: Rendered, tmp_path: Any) -> None:
    env = described(container_of(rendered, "Deployment", "operator"))
    if "PERDURE_GATEWAY_CA_FILE" in env:
        env["PERDURE_GATEWAY_CA_FILE"] = str(tmp_path / "ca.crt")
        (tmp_path / "ca.crt").write_text("pem")
    config = OperatorConfig.from_env(env)
    assert config.gateway_url.startswith("https://")
    assert config.sidecar_image


def test_values_reach_the_processes() -> None:
    everything, namespaced = render(MATRIX["everything"]), render(MATRIX["namespaced"])
    env = described(container_of(everything, "Deployment", "operator"))
    assert env["PERDURE_SIDECAR_IMAGE"] == "registry.example.com/perdure/perdure-sidecar@sha256:" + "0" * 64
    assert env["PERDURE_INLINE_TEMPLATES"] == "trusted"
    assert env["PERDURE_WATCH_NAMESPACES"] == ""
    assert env["PERDURE_GATEWAY_URL"] == f"https://{RELEASE}-gateway.{NAMESPACE}.svc"
    assert env["X"] == "y"
    assert container_of(everything, "Deployment", "gateway")["image"] == "registry.example.com/perdure/perdure-operator:1.2.3"
    assert env["PERDURE_INSTALLATION"] == f"{NAMESPACE}.{RELEASE}"
    env = described(container_of(namespaced, "Deployment", "operator"))
    assert (env["PERDURE_WATCH_NAMESPACES"], env["PERDURE_INLINE_TEMPLATES"]) == ("team-a,team-b", "none")
    public = described(container_of(render(MATRIX["public-authority"]), "Deployment", "operator"))
    assert public["PERDURE_GATEWAY_URL"] == "https://perdure.example.com"
    assert "PERDURE_GATEWAY_CA_FILE" not in public


def test_ports_agree(quickstart: Rendered) -> None:
    [port] = quickstart.one("Service", f"{RELEASE}-gateway")["spec"]["ports"]
    ports = {each["name"]: each["containerPort"] for each in container_of(quickstart, "Deployment", "gateway")["ports"]}
    assert (port["port"], ports[port["targetPort"]]) == (443, 8443)
    [port] = quickstart.one("Service", f"{RELEASE}-postgres")["spec"]["ports"]
    assert port["port"] == 5432
    dsn = quickstart.one("Secret", f"{RELEASE}-postgres")["stringData"]
    assert dsn["dsn"] == f"postgresql://postgres:{dsn['password']}@{RELEASE}-postgres.{NAMESPACE}.svc:5432/postgres?sslmode=disable"


@pytest.mark.parametrize("name", ["operator", "gateway"])
def test_probes(quickstart: Rendered, name: str) -> None:
    container = container_of(quickstart, "Deployment", name)
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert "startupProbe" not in container
    assert {"name": "metrics", "containerPort": 9090} in container["ports"]


def test_serving_pods_wait_for_the_schema(quickstart: Rendered) -> None:
    for name in ("operator", "gateway"):
        [first] = quickstart.one("Deployment", f"{RELEASE}-{name}")["spec"]["template"]["spec"]["initContainers"]
        assert first["args"] == ["wait-for-schema"]
    [job] = [each for each in quickstart.of("Job") if "migrate" in each["metadata"]["name"]]
    assert "annotations" not in job["metadata"], "a hook could not use the quickstart's database"


def test_a_migration_with_another_image_is_another_job() -> None:
    """A Job's template cannot change."""
    names = {
        each["metadata"]["name"]
        for tag in ("1", "2")
        for each in render({**OWN_POSTGRES, "image": {"tag": tag}}, release="a-release-whose-name-is-as-long-as-helm-allows-it").of("Job")
        if "migrate" in each["metadata"]["name"]
    }
    assert len(names) == 2
    assert all(len(name) <= 63 for name in names)


def test_a_single_replica_has_no_budget_that_blocks_a_drain() -> None:
    budgets = render(MATRIX["everything"]).of("PodDisruptionBudget")
    assert [each["metadata"]["name"] for each in budgets] == [f"{RELEASE}-operator"]


# ------------------------------------------------------------------------------------------------------------- network


def policy(rendered: Rendered, name: str) -> dict[str, Any]:
    return dict(rendered.one("NetworkPolicy", name)["spec"])


def test_only_perdure_reaches_the_database(quickstart: Rendered) -> None:
    spec = policy(quickstart, f"{RELEASE}-postgres")
    [rule] = spec["ingress"]
    assert rule["ports"] == [{"port": 5432, "protocol": "TCP"}]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["gateway", "operator", "migrations"]
    assert "egress" not in spec
    assert spec["policyTypes"] == ["Ingress", "Egress"]


def test_workers_reach_the_gateway_dns_and_what_values_say() -> None:
    spec = policy(render(MATRIX["everything"]), f"{NAMESPACE}-{RELEASE}-workers")
    assert spec["podSelector"]["matchLabels"] == {"app.kubernetes.io/managed-by": "perdure", "app.kubernetes.io/component": "worker"}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec, "nobody reaches a worker"
    dns, gateway, internet, own = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert gateway["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert gateway["ports"] == [{"port": 8443, "protocol": "TCP"}]
    assert internet["to"] == [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}},
        {"ipBlock": {"cidr": "::/0", "except": ["fd00:ec2::254/128"]}},
    ]
    assert own["to"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]


def test_no_rule_for_workers_opens_the_metadata_service() -> None:
    """Every block of addresses that contains it leaves it out; one without addresses would be everywhere."""
    for rule in policy(render(MATRIX["everything"]), f"{NAMESPACE}-{RELEASE}-workers")["egress"]:
        for peer in rule["to"]:
            if peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0":
                assert "169.254.169.254/32" in peer["ipBlock"]["except"]


def test_workers_without_the_internet() -> None:
    values = {**OWN_POSTGRES, "networkPolicy": {"workers": {"enabled": True, "namespaces": ["a"], "internet": False}}}
    assert len(policy(render(values), f"{NAMESPACE}-{RELEASE}-workers")["egress"]) == 2


def test_workers_have_a_policy_in_each_namespace() -> None:
    rendered = render(MATRIX["namespaced"])
    found = [each["metadata"]["namespace"] for each in rendered.of("NetworkPolicy") if each["metadata"]["name"].endswith("workers")]
    assert found == ["team-a", "team-b"]


def test_who_may_reach_the_gateway_can_be_said_and_workers_still_may() -> None:
    api, metrics = policy(render(MATRIX["everything"]), f"{RELEASE}-gateway")["ingress"]
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in api["from"]
    assert any(peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component") == "worker" for peer in api["from"])
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]


# --------------------------------------------------------------------------------------------------------------- hooks


def test_finalizers_are_released_when_nobody_is_left_to_set_them(rendered: Rendered) -> None:
    """Whatever the hook needs is a hook as well: the release's own objects are gone by then."""
    hooks = [each for each in rendered.objects if each["metadata"].get("annotations", {}).get("helm.sh/hook") == "post-delete"]
    jobs = [each for each in hooks if each["kind"] == "Job"]
    if not jobs:
        assert not hooks
        return
    [job] = jobs
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][0]["args"] == ["release-finalizers"]
    env, operator = described(spec["containers"][0]), described(container_of(rendered, "Deployment", "operator"))
    assert env == {name: operator[name] for name in ("PERDURE_INSTALLATION", "PERDURE_WATCH_NAMESPACES")}
    assert {each["metadata"]["name"] for each in hooks if each["kind"] == "ServiceAccount"} == {spec["serviceAccountName"]}
    bound = [each["roleRef"]["name"] for each in hooks if each["kind"].endswith("Binding")]
    assert bound
    assert sorted(bound) == sorted(each["metadata"]["name"] for each in hooks if each["kind"] in ("Role", "ClusterRole"))


def test_helm_test_connects_as_a_worker_would(quickstart: Rendered) -> None:
    [pod] = quickstart.of("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [program] = pod["spec"]["containers"][0]["args"]
    compile(program, "test", "exec")
    assert f"https://{RELEASE}-gateway.{NAMESPACE}.svc/readyz" in program
