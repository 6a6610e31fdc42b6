"""The OpenAPI document is valid, names every route, and what the gateway answers is what it says: generated requests to each operation."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import openapi
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from tests.harness.cluster import Cluster
from tests.harness.postgres import row_counts

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


def generate(document: dict[str, Any], url: str, token: str, known: dict[str, str], examples: int) -> int:
    """Sends generated requests to every operation; every other path parameter is one that exists. Gives how many were sent."""
    sent = 0
    for result in openapi.from_dict(document).get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()

        @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(), exists=st.booleans())
        def check(case: schemathesis.Case[Any], exists: bool) -> None:
            nonlocal sent
            sent += 1
            if exists:
                case.path_parameters = {name: known.get(name, value) for name, value in case.path_parameters.items()}
            response = case.call(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=10)
            case.validate_response(response, checks=CHECKS)

        check()
    return sent


async def test_every_operation_answers_as_it_is_described(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create("known", summary="s")
    pod = await cluster.holder(gateway)
    await pod.finish(output=b'{"any": ["json"]}')
    document = (await api.raw("GET", "//openapi.json")).json
    openapi.from_dict(document).validate()
    token = cluster.tokens.issue_person("tester", verbs=["*"], namespaces=["*"])
    known = {"namespace": "default", "run": "known", "name": "p", "signal": "go"}
    sent = await asyncio.to_thread(generate, document, gateway.url, token, known, 6)
    assert sent > 70
    assert await gateway.answers("/readyz")


async def test_every_route_is_described(cluster: Cluster) -> None:
    _, api = await cluster.one()
    document = (await api.raw("GET", "//openapi.json")).json
    before = await row_counts(cluster.pg)
    for path, operations in document["paths"].items():
        for method in ("get", "put", "post", "patch", "delete"):
            filled = re.sub(r"\{\w+\}", "none", path)
            reply = await api.raw(method.upper(), "/" + filled, data=b"{}")
            assert (reply.status == 405) is (method not in operations), (method, path, reply.status)
            if reply.status >= 400:
                assert reply.problem.action
    assert await row_counts(cluster.pg) == before
