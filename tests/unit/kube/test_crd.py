"""The definitions as they are generated: a person can read them, and no field of a run changes unless somebody said that it may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.alias_generators import to_camel

from perdure_operator.kube.api.agentrun import CHANGEABLE, LIMITS, UNSEEN, AgentRunSpec, Budgets
from perdure_operator.kube.api.base import RULES
from perdure_operator.kube.api.crd import DEFINITIONS, Definition
from perdure_operator.kube.api.files import files
from perdure_operator.kube.api.unenforced import dotted, paths

FILES = dict(files())
BY_PLURAL = {definition.plural: definition for definition in DEFINITIONS}


def schema(definition: Definition) -> dict[str, Any]:
    (version,) = definition.to_json()["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def properties(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from properties(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from properties(node[key], path)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind)
def test_every_field_is_described(definition: Definition) -> None:
    undescribed = [path for path, node in properties(schema(definition)) if path != ".metadata" and not node.get("description")]
    assert undescribed == []
    unpunctuated = [path for path, node in properties(schema(definition)["properties"]["spec"]) if node["description"][-1] not in ".}"]
    assert unpunctuated == []


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind)
def test_columns_and_selectable_fields_are_fields(definition: Definition) -> None:
    known = {path for path, _ in properties(schema(definition))} | {".metadata.creationTimestamp"}
    paths = [column.path.partition("[")[0] for column in definition.columns] + list(definition.selectable)
    assert [path for path in paths if path not in known] == []


def test_a_field_of_a_run_is_immutable_changeable_or_a_limit() -> None:
    messages = [rule["message"] for rule in schema(BY_PLURAL["agentruns"])["properties"]["spec"][RULES]]
    immutable = {to_camel(name) for name in AgentRunSpec.model_fields.keys() - CHANGEABLE - LIMITS - UNSEEN}
    assert {m.split()[0] for m in messages if "cannot change after" in m} == immutable
    limits = {"activeDeadlineSeconds", "deadlineSeconds"} | {f"budgets.{to_camel(name)}" for name in Budgets.model_fields}
    assert {m.split()[0] for m in messages if "once it is set" in m} == limits


def test_the_spec_of_runs_to_come_may_change() -> None:
    template = schema(BY_PLURAL["triggers"])["properties"]["spec"]["properties"]["runTemplate"]["properties"]["spec"]
    assert not any("oldSelf" in rule["rule"] for rule in template.get(RULES, []))


def test_plain_files_and_templates_of_the_chart_say_the_same() -> None:
    for path, text in FILES.items():
        if path.parts[0] != "crds":
            continue
        template = FILES[Path("charts/perdure/templates/crds") / path.name]
        _, opened, *body, closed = template.splitlines()
        assert (opened, closed) == ("{{- if .Values.crds.install }}", "{{- end }}")
        kept = list(yaml.load_all("\n".join(body), yaml.CSafeLoader))
        for document in kept:
            assert document["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert kept == list(yaml.load_all(text, yaml.CSafeLoader))


def test_the_text_is_the_same_each_time() -> None:
    assert dict(files()) == FILES


def test_a_definition_can_be_applied_by_kubectl() -> None:
    """kubectl keeps what it applied in an annotation, and annotations end at 256 KiB."""
    assert all(len(text) < 250_000 for text in FILES.values())


def test_which_fields_of_a_run_are_not_in_force_yet() -> None:
    """Whoever brings one into force takes the sentence out of its description, and it out of here."""
    budgets = {to_camel(name) for name in Budgets.model_fields} - {"maxRetriesPerToolCall"}
    others = {"constraints.allowedDomains", "stopConditions", "escalation", "artifacts"}
    assert {dotted(path) for path in paths(AgentRunSpec)} == {f"spec.budgets.{name}" for name in budgets} | {f"spec.{p}" for p in others}
