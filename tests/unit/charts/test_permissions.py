"""Who may do what: the whole of it, written down twice, so that nothing is added unseen. And what our pods may do on a node."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.chart import MATRIX, NAMESPACE, OWN_POSTGRES, QUICKSTART, RELEASE, Rendered, render

Rules = dict[str, str]

OPERATOR: Rules = {
    "agentruns.perdure.dev": "create delete get list patch watch",
    "agentpools.perdure.dev": "create delete get list patch watch",
    "triggers.perdure.dev": "get list patch watch",
    "agentruns/status.perdure.dev": "patch",
    "agentpools/status.perdure.dev": "patch",
    "triggers/status.perdure.dev": "patch",
    "agentruns/finalizers.perdure.dev": "update",
    "agentpools/finalizers.perdure.dev": "update",
    "triggers/finalizers.perdure.dev": "update",
    "pods": "create delete get list patch watch",
    "events": "create patch",
    "namespaces": "get",
    "configmaps": "get",
}
GATEWAY: Rules = {"tokenreviews.authentication.k8s.io": "create", "subjectaccessreviews.authorization.k8s.io": "create"}
FINALIZERS: Rules = {"agentruns.perdure.dev": "get list patch", "pods": "delete list"}
VIEW: Rules = dict.fromkeys(("agentruns.perdure.dev", "agentpools.perdure.dev", "triggers.perdure.dev"), "get list watch")
EDIT: Rules = {
    **dict.fromkeys(
        ("agentruns.perdure.dev", "agentpools.perdure.dev", "triggers.perdure.dev"), "create delete deletecollection patch update"
    ),
    **{f"agentruns/{what}.perdure.dev": "create" for what in ("signal", "cancel", "pause", "answer")},
    "triggers/emit.perdure.dev": "create",
}


def rules(role: dict[str, Any]) -> Rules:
    found: Rules = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                key = f"{resource}.{group}" if group else resource
                assert key not in found, f"{key} is granted twice"
                found[key] = " ".join(sorted(rule["verbs"]))
    return found


def granted(rendered: Rendered, account: str, namespace: str | None = None) -> Rules:
    """By bindings in one namespace, or for the whole cluster."""
    kind = "RoleBinding" if namespace else "ClusterRoleBinding"
    found: Rules = {}
    for binding in rendered.of(kind):
        subject = {"kind": "ServiceAccount", "name": f"{RELEASE}-{account}", "namespace": NAMESPACE}
        if subject in binding["subjects"] and binding["metadata"].get("namespace") == namespace:
            [role] = [
                each
                for each in rendered.of(binding["roleRef"]["kind"])
                if each["metadata"]["name"] == binding["roleRef"]["name"] and each["metadata"].get("namespace") == namespace
            ]
            found |= rules(role)
    return found


def test_cluster_mode() -> None:
    rendered = render(QUICKSTART)
    assert granted(rendered, "operator") == OPERATOR
    assert granted(rendered, "gateway") == GATEWAY
    assert granted(rendered, "release-finalizers") == FINALIZERS
    assert granted(rendered, "migrations") == {}
    # Everybody may read where the gateway is, which is no secret; no role of ours is bound to a namespace.
    [role] = rendered.of("Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["perdure-cli"], "verbs": ["get"]}]


def test_namespaced_mode_grants_nothing_beyond_its_namespaces() -> None:
    rendered = render(MATRIX["namespaced"])
    assert granted(rendered, "operator") == {}
    assert granted(rendered, "release-finalizers") == {}
    for namespace in ("team-a", "team-b"):
        assert granted(rendered, "operator", namespace) == OPERATOR
        assert granted(rendered, "release-finalizers", namespace) == FINALIZERS
    assert granted(rendered, "gateway") == GATEWAY, "who somebody is concerns the whole cluster"


def test_people() -> None:
    rendered = render(QUICKSTART)
    view, edit = (rendered.one("ClusterRole", f"{NAMESPACE}-{RELEASE}-{name}") for name in ("view", "edit"))
    assert (rules(view), rules(edit)) == (VIEW, EDIT)
    aggregated = {
        name: sorted(label.rpartition("-")[2] for label in role["metadata"]["labels"] if "aggregate-to" in label)
        for name, role in (("view", view), ("edit", edit))
    }
    assert aggregated == {"view": ["admin", "edit", "view"], "edit": ["admin", "edit"]}


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_no_wildcards_and_nothing_that_leads_to_more(values: dict[str, Any]) -> None:
    for role in [each for kind in ("Role", "ClusterRole") for each in render(values).of(kind)]:
        for resource, verbs in rules(role).items():
            assert "*" not in resource + verbs
            assert not {"escalate", "bind", "impersonate"} & set(verbs.split())
            assert "pods/exec" not in resource
            if resource == "secrets":
                assert verbs == "get"
                assert all(rule["resourceNames"] for rule in role["rules"])


def test_webhook_keys_are_read_only_where_somebody_named_them() -> None:
    assert not any("secrets" in rules(role) for kind in ("Role", "ClusterRole") for role in render(QUICKSTART).of(kind))
    [role] = [each for each in render(MATRIX["everything"]).of("Role") if "secrets" in rules(each)]
    assert role["metadata"]["namespace"] == "team-a"
    assert role["rules"] == [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["hook"], "verbs": ["get"]}]


def test_config_maps_can_be_left_out() -> None:
    rendered = render({**OWN_POSTGRES, "inputFromConfigMaps": {"enabled": False}})
    assert granted(rendered, "operator") == {key: verbs for key, verbs in OPERATOR.items() if key != "configmaps"}


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_pods_and_containers_are_restricted(values: dict[str, Any]) -> None:
    """Pod Security "restricted", and beyond it a file system that cannot be written. (A real API server says so in tests/contract.)"""
    rendered = render(values)
    for where, pod in rendered.pods():
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 65532), where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys(), where
        kinds = {kind for volume in pod["spec"].get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"secret", "emptyDir"}, where
    for where, container in rendered.containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, where
        assert container["resources"]["requests"], where
        assert container["resources"]["limits"]["memory"], where


def test_the_authority_s_key_is_given_to_nobody() -> None:
    for where, pod in render(QUICKSTART).pods():
        for volume in pod["spec"].get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["secretName"] == f"{RELEASE}-gateway-tls", where
                keys = {item["key"] for item in volume["secret"]["items"]}
                assert keys == ({"tls.crt", "tls.key"} if "/perdure-gateway" in where else {"ca.crt"}), where
