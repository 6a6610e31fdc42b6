"""The resource models: what a manifest may say, and what a person is told when it says something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from perdure_operator.kube.api.problems import InvalidManifest
from perdure_operator.kube.api.schema import structural
from perdure_operator.kube.api.v1alpha1 import KINDS, AgentPool, AgentRun, parse_manifest

CONTAINER = {"name": "agent", "image": "example/agent:1", "command": ["python", "-m", "agent"]}
TEMPLATE = {"spec": {"containers": [CONTAINER]}}
RUN = {"agent": {"poolRef": {"name": "worker"}}}


def manifest(spec: dict[str, Any], kind: str = "AgentRun", **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "perdure.dev/v1alpha1", "kind": kind, "metadata": metadata or {"name": "a"}, "spec": spec}


def problems(document: object) -> list[str]:
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(document)
    return [str(p) for p in caught.value.problems]


def pool(**container: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{**CONTAINER, **container}]}}}


def test_a_full_run_survives_the_round_trip() -> None:
    spec = {
        **RUN,
        "idempotencyKey": "weekly-2026-47",
        "summary": "Weekly market report",
        "objective": "Research five sources",
        "input": {"urls": ["https://example.org"], "deep": [1, 2.5, None, True]},
        "desiredState": "Suspended",
        "priority": -3,
        "activeDeadlineSeconds": 5400,
        "deadlineSeconds": 1209600,
        "retry": {"maxRetries": 3, "backoffSeconds": 2, "maxBackoffSeconds": 120, "maxLosses": 10},
        "budgets": {"maxSteps": 50, "cost": "5", "currency": "USD", "onExceeded": "Suspend"},
        "constraints": {"allowedTools": ["search"], "allowedDomains": ["example.org"]},
        "stopConditions": ["report_pdf_created"],
        "escalation": {"unknownEffect": "Ask", "pauseDeadline": True},
        "artifacts": {"expected": ["report.pdf"]},
        "terminationGracePeriodSeconds": 30,
        "ttlSecondsAfterFinished": 86400,
    }
    found = parse_manifest(manifest(spec))
    assert isinstance(found, AgentRun)
    assert found.spec.to_json() == spec


def test_a_full_pool_survives_the_round_trip() -> None:
    spec = {
        **pool(resources={"limits": {"cpu": 1, "memory": "1Gi"}}, env=[{"name": "A", "value": "b"}]),
        "capacity": {"minIdle": 2, "maxIdle": 20, "maxPods": 200},
        "podReuse": {"mode": "ForkPerRun", "maxRuns": 100, "maxAgeSeconds": 86400},
        "runDefaults": {"retry": {"maxRetries": 1}},
        "runLimits": {"budgets": {"maxSteps": 5}},
        "tools": [{"name": "send_email", "class": "external", "scope": ["to"], "onUnknown": "query", "onDivergence": "Person"}],
        "mcpServers": [{"name": "files", "url": "http://127.0.0.1:9000/mcp"}],
    }
    found = parse_manifest(manifest(spec, "AgentPool"))
    assert isinstance(found, AgentPool)
    assert found.spec.to_json() == spec
    assert found.spec.tools is not None
    assert found.spec.tools[0].effect == "external"


def test_what_the_api_server_adds_to_metadata_is_accepted() -> None:
    added = {"uid": "u", "resourceVersion": "1", "generation": 2, "creationTimestamp": "2026-11-21T00:00:00Z", "managedFields": [{"a": 1}]}
    assert parse_manifest(manifest(RUN, name="a", **added)).metadata.uid == "u"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({**RUN, "retry": {"maxRetrys": 3}}, "spec.retry.maxRetrys: unknown field; did you mean maxRetries?"),
        ({**RUN, "max_retries": 3}, "spec.max_retries: unknown field; did you mean retry.maxRetries?"),
        ({**RUN, "retry": {"max_retries": 3}}, "spec.retry.max_retries: unknown field; did you mean maxRetries?"),
        ({**RUN, "retry": {"maxRetries": "3"}}, 'spec.retry.maxRetries: must be a whole number, got "3"'),
        ({**RUN, "budgets": {"cost": 5}}, "spec.budgets.cost: must be text, got 5: put it in quotes"),
        ({**RUN, "desiredState": "running"}, "must be 'Running', 'Suspended' or 'Cancelled', got \"running\""),
        ({**RUN, "deadlineSeconds": 0}, "spec.deadlineSeconds: must be at least 1, got 0"),
        ({**RUN, "stopConditions": "done"}, 'spec.stopConditions: must be a list, got "done"'),
        ({"agent": {}}, "spec.agent: set exactly one of poolRef, template"),
        ({"agent": {"poolRef": {"name": "w"}, "template": TEMPLATE}}, "spec.agent: set exactly one of poolRef, template"),
        ({}, "spec.agent: is required"),
        ({**RUN, "input": "x" * 17_000}, "at most 16384 are allowed"),
        ({**RUN, "summary": "é" * 101}, "spec.summary: is longer than 200 bytes"),
        ({**RUN, "input": {"a": ["b\0"]}}, "spec.input.a[0]: contains a NUL character"),
        ({**RUN, "input": "\ud800"}, "half a surrogate pair"),
        ({**RUN, "input": float("nan")}, "nan is not a number that JSON knows"),
        ({**RUN, "input": {1: 2}}, "keys must be text, got 1"),
        ({**RUN, "input": 1, "inputFrom": {"blob": "sha256:" + "0" * 64}}, "set input or inputFrom, not both"),
    ],
)
def test_mistakes_in_a_run_are_explained(spec: dict[str, Any], message: str) -> None:
    assert any(message in p for p in problems(manifest(spec))), problems(manifest(spec))


def test_a_deeply_nested_input_is_refused_without_a_crash() -> None:
    value: Any = []
    for _ in range(10_000):
        value = [value]
    assert "nested deeper than 100 levels" in problems(manifest({**RUN, "input": value}))[0]


def test_all_mistakes_are_told_at_once() -> None:
    assert len(problems(manifest({**RUN, "foo": 1, "priority": "high", "retry": {"maxLosses": 0}}))) == 3


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "must be a mapping with apiVersion, kind, metadata and spec"),
        ({**manifest(RUN), "apiVersion": "v1"}, "apiVersion: must be 'perdure.dev/v1alpha1', got 'v1'"),
        ({**manifest(RUN), "kind": "agentrun"}, "kind: must be one of AgentRun, AgentPool, Trigger, got 'agentrun'"),
        (manifest(RUN, labels={}), "metadata: set name"),
        (manifest(RUN, name="A_b"), "only lower-case letters"),
        (manifest(RUN, name="a", labels={"k": "v" * 64}), "at most 63 are allowed"),
        ({k: v for k, v in manifest(RUN).items() if k != "spec"}, "spec: is required"),
    ],
)
def test_mistakes_around_the_spec_are_explained(document: object, message: str) -> None:
    assert any(message in p for p in problems(document)), problems(document)


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}{'[]' if key == 'items' else '{}'}")


@pytest.mark.parametrize("part", ["spec", "status"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_is_structural_and_every_part_of_it_is_bounded(kind: str, part: str) -> None:
    for path, node in nodes(structural(KINDS[kind])["properties"][part], part):
        open_end = node.get("x-kubernetes-preserve-unknown-fields") or node.get("x-kubernetes-int-or-string")
        assert "$ref" not in node, path
        assert "type" in node or open_end, path
        assert "anyOf" not in node or node.get("x-kubernetes-int-or-string"), path
        assert node.get("type") != "string" or "maxLength" in node or "enum" in node, f"{path} is not bounded"
        assert node.get("type") != "array" or "maxItems" in node, f"{path} is not bounded"
        assert "additionalProperties" not in node or "maxProperties" in node, f"{path} is not bounded"
        assert node.get("type") != "integer" or {"minimum", "maximum"} & node.keys(), f"{path} is not bounded"
    assert len(json.dumps(structural(KINDS[kind]))) < 100_000
