"""What the pods that talk to Postgres are given for it: the DSN, whom to trust, and what to show."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.chart import MATRIX, NAMESPACE, OWN_POSTGRES, QUICKSTART, RELEASE, Rendered, environment, render

PARTS = {"operator", "gateway", "migrate", "wait-for-schema"}


@pytest.fixture(scope="module")
def certified() -> Rendered:
    return render(MATRIX["database-with-certificates"])


def talkers(rendered: Rendered) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pods and their containers that have the DSN."""
    found = []
    for _, pod in rendered.pods():
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            if "PERDURE_DSN" in environment(container):
                found.append((pod["spec"], container))
    assert {container["name"] for _, container in found} == PARTS
    return found


def secret_file(pod: dict[str, Any], container: dict[str, Any], path: str) -> tuple[str, str]:
    """Secret and key of what the container sees there."""
    folder, _, name = path.rpartition("/")
    [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == folder]
    [volume] = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    [item] = [each for each in volume["secret"]["items"] if each["path"] == name]
    return volume["secret"]["secretName"], item["key"]


def test_each_of_them_verifies_the_server_by_its_own_authority(certified: Rendered) -> None:
    for pod, container in talkers(certified):
        given = environment(container)
        assert given["PERDURE_DSN"]["valueFrom"]["secretKeyRef"] == {"name": "cluster-app", "key": "uri"}
        assert given["PGSSLMODE"]["value"] == "verify-full"
        assert secret_file(pod, container, given["PGSSLROOTCERT"]["value"]) == ("cluster-ca", "ca.crt")
        assert secret_file(pod, container, given["PGSSLCERT"]["value"]) == ("perdure-client", "tls.crt")
        assert secret_file(pod, container, given["PGSSLKEY"]["value"]) == ("perdure-client", "tls.key")
        assert {"name": "scratch", "mountPath": "/scratch"} in container["volumeMounts"]
        assert {"name": "scratch", "emptyDir": {}} in pod["volumes"]


def test_a_mode_that_is_given_holds(certified: Rendered) -> None:
    rendered = render({"postgres": {"dsnSecret": {"name": "d"}, "sslMode": "require"}})
    assert {environment(container)["PGSSLMODE"]["value"] for _, container in talkers(rendered)} == {"require"}


@pytest.mark.parametrize("values", [OWN_POSTGRES, QUICKSTART], ids=["own", "quickstart"])
def test_without_any_of_it_nothing_is_added(values: dict[str, Any]) -> None:
    for _, container in talkers(render(values)):
        assert not [name for name in environment(container) if name.startswith("PGSSL")]


def test_each_account_has_its_own_annotations(certified: Rendered) -> None:
    for part in ("operator", "gateway", "migrations"):
        found = certified.one("ServiceAccount", f"{RELEASE}-{part}")
        assert (found["metadata"]["namespace"], found["metadata"]["annotations"]) == (NAMESPACE, {"cloud.example/role": part})


def test_who_fails_for_the_database_says_why_where_kubectl_describe_shows_it(certified: Rendered) -> None:
    for _, container in talkers(certified):
        if container["name"] in ("migrate", "wait-for-schema"):
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
