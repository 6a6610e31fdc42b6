"""The API server that contracts are tested against is a real one."""

from __future__ import annotations

import json

from tests.cluster.apiserver import ApiServer


def test_creates_a_namespace(api_server: ApiServer) -> None:
    api_server.kubectl("create", "namespace", "contract")

    created = json.loads(api_server.kubectl("get", "namespace", "contract", "-o", "json"))
    assert created["status"]["phase"] == "Active"


def test_keeps_what_it_stored_when_it_restarts(api_server: ApiServer) -> None:
    api_server.kubectl("create", "configmap", "kept", "--from-literal=a=b")

    api_server.restart()

    assert json.loads(api_server.kubectl("get", "configmap", "kept", "-o", "json"))["data"] == {"a": "b"}


def test_writes_an_audit_log_of_metadata(api_server: ApiServer) -> None:
    api_server.kubectl("create", "configmap", "audited", "--from-literal=a=b")

    entries = [json.loads(line) for line in api_server.audit_log.read_text().splitlines()]
    [create] = [entry for entry in entries if entry["verb"] == "create" and entry["objectRef"].get("name") == "audited"]
    assert (create["level"], create["stage"], create["user"]["username"]) == ("Metadata", "ResponseComplete", "admin")
    assert {entry["stage"] for entry in entries} <= {"ResponseStarted", "ResponseComplete", "Panic"}
