"""What the API server refuses of Perdure's resources, and what it says then."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest
import yaml
from tests.cluster.apiserver import ApiServer
from tests.cluster.errors import CommandError
from tests.cluster.paths import ROOT
from tests.contract.conftest import OLDER_THAN_THE_POLICY
from tests.contract.objects import Json, Objects, Refused
from tests.unit.kube.pod_fields import CONTAINER, REFUSED_VALUES, TEMPLATE, Path, refused_fields, template_with

from perdure_operator.kube.api.crd import DEFINITIONS
from perdure_operator.kube.api.meta import MAX_ENTRIES

PLURALS = {definition.kind: definition.plural for definition in DEFINITIONS}
RUN: Json = {"agent": {"poolRef": {"name": "worker"}}}
TRIGGER: Json = {"source": {"manual": {}}, "runTemplate": {"spec": RUN}}
POOL: Json = {"template": TEMPLATE}
BLOB = {"blob": "sha256:" + "0" * 64}


def manifest(spec: Json, kind: str = "AgentRun", name: str = "refused") -> Json:
    return {"apiVersion": "perdure.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def refusal(objects: Objects, spec: Json, kind: str = "AgentRun") -> str:
    with pytest.raises(Refused) as caught:
        objects.create(PLURALS[kind], manifest(spec, kind), dry_run=True)
    return str(caught.value)


def dotted(path: Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


# Examples


def examples() -> Iterator[tuple[str, Json]]:
    for file in sorted(FilePath(ROOT / "examples").rglob("*.yaml")):
        for number, document in enumerate(yaml.safe_load_all(file.read_text())):
            if document and document["kind"] in PLURALS:
                yield f"{file.relative_to(ROOT)}#{number}", document


EXAMPLES = dict(examples())


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_accepted(objects: Objects, example: str) -> None:
    document = EXAMPLES[example]
    assert objects.create(PLURALS[document["kind"]], document, dry_run=True)["spec"] == document["spec"]


# Pod templates


@pytest.mark.parametrize("path", list(refused_fields()), ids=dotted)
def test_no_other_field_of_a_pod_gets_in(objects: Objects, path: Path) -> None:
    found = refusal(objects, {"template": template_with(path, True)}, "AgentPool")
    assert f'unknown field "spec.template.{dotted(path)}"' in found


def test_a_client_that_is_not_strict_loses_the_field(objects: Objects) -> None:
    template = template_with(("spec", "hostNetwork"), True)
    made = objects.create("agentpools", manifest({"template": template}, "AgentPool"), dry_run=True, strict=False)
    assert made["spec"]["template"] == TEMPLATE


@pytest.mark.parametrize("kind", PLURALS)
@pytest.mark.parametrize(("path", "value", "message"), [case[1:] for case in REFUSED_VALUES], ids=[case[0] for case in REFUSED_VALUES])
def test_no_other_value_of_a_pod_gets_in(objects: Objects, kind: str, path: Path, value: Any, message: str) -> None:
    template = template_with(path, value)
    run = {"agent": {"template": template}}
    spec = {"AgentPool": {"template": template}, "AgentRun": run, "Trigger": {**TRIGGER, "runTemplate": {"spec": run}}}[kind]
    assert re.search(message, refusal(objects, spec, kind))


# Runs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "spec.agent: Required value"),
        ({"agent": {}}, "spec.agent: Invalid value: set exactly one of poolRef, template"),
        ({"agent": {**RUN["agent"], "template": TEMPLATE}}, "spec.agent: Invalid value: set exactly one of poolRef, template"),
        ({**RUN, "maxSteps": 5}, 'unknown field "spec.maxSteps"'),
        ({**RUN, "desiredState": "Paused"}, 'supported values: "Running", "Suspended", "Cancelled"'),
        ({**RUN, "deadlineSeconds": 0}, "spec.deadlineSeconds in body should be greater than or equal to 1"),
        ({**RUN, "summary": "x" * 201}, "spec.summary: Too long: may not be more than 200"),
        ({**RUN, "summary": "é" * 101}, "is longer than 200 bytes"),
        ({**RUN, "objective": "x" * 20_001}, "spec.objective: Too long"),
        ({**RUN, "budgets": {"cost": "5 USD"}}, "spec.budgets.cost in body should match"),
        ({**RUN, "budgets": {"cost": 5}}, "spec.budgets.cost in body must be of type string"),
        ({**RUN, "stopConditions": ["done", "done"]}, 'spec.stopConditions[1]: Duplicate value: "done"'),
        ({**RUN, "stopConditions": [f"c{n}" for n in range(51)]}, "spec.stopConditions: Too many: 51: must have at most 50 items"),
        ({**RUN, "inputFrom": {}}, "spec.inputFrom: Invalid value: set exactly one of configMapKeyRef, blob"),
        ({**RUN, "input": "x" * 17_000}, "spec.input is larger than 16384 bytes of JSON: pass a reference to larger data"),
        ({**RUN, "input": {"many": ["x" * 1000] * 17}}, "spec.input is larger than 16384 bytes"),
        ({**RUN, "input": {"wide": "漢" * 6000}}, "spec.input is larger than 16384 bytes"),
        ({**RUN, "input": [1], "inputFrom": BLOB}, "spec: set input or inputFrom, not both"),
    ],
)
def test_mistakes_in_a_run_are_refused(objects: Objects, spec: Json, message: str) -> None:
    assert message in refusal(objects, spec)


@pytest.mark.parametrize("value", [0, 1.5, "text", True, [], [1, None, {"a": []}], {"a": {"b": "x" * 16_000}}, [1] * 8_000])
def test_the_input_is_any_json(objects: Objects, value: Any) -> None:
    assert objects.create("agentruns", manifest({**RUN, "input": value}), dry_run=True)["spec"]["input"] == value


FULL: Json = {
    **RUN,
    "idempotencyKey": "key",
    "summary": "A run",
    "objective": "Do it",
    "input": {"a": [1]},
    "desiredState": "Running",
    "activeDeadlineSeconds": 100,
    "deadlineSeconds": 1000,
    "stallTimeoutSeconds": 10,
    "retry": {"maxRetries": 3},
    "budgets": {"maxSteps": 10, "cost": "9.5", "currency": "USD", "onExceeded": "Suspend"},
    "constraints": {"allowedTools": ["search"]},
    "stopConditions": ["done"],
    "escalation": {"unknownEffect": "Ask"},
    "artifacts": {"expected": ["report.pdf"]},
    "terminationGracePeriodSeconds": 30,
}


@pytest.fixture
def run(objects: Objects, request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a run with every field that may not change."""
    name = f"run-{abs(hash(request.node.name)):x}"
    objects.create("agentruns", manifest(FULL, name=name))
    yield name
    objects.delete("agentruns", name)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"agent": {"poolRef": {"name": "other"}}}, "agent cannot change after the run was created; create another run"),
        ({"agent": {"poolRef": None, "template": TEMPLATE}}, "agent cannot change"),
        ({"idempotencyKey": "other"}, "idempotencyKey cannot change"),
        ({"idempotencyKey": None}, "idempotencyKey cannot change"),
        ({"summary": "Another"}, "summary cannot change"),
        ({"objective": "Do more"}, "objective cannot change"),
        ({"input": {"a": [2]}}, "spec.input cannot change after the run was created; create another run"),
        ({"input": None}, "spec.input cannot change"),
        ({"inputFrom": BLOB}, "inputFrom cannot change"),
        ({"stallTimeoutSeconds": 20}, "stallTimeoutSeconds cannot change"),
        ({"retry": {"maxRetries": 4}}, "retry cannot change"),
        ({"constraints": {"forbiddenTools": ["mail"]}}, "constraints cannot change"),
        ({"stopConditions": ["done", "sure"]}, "stopConditions cannot change"),
        ({"escalation": {"unknownEffect": "Fail"}}, "escalation cannot change"),
        ({"artifacts": None}, "artifacts cannot change"),
        ({"terminationGracePeriodSeconds": 60}, "terminationGracePeriodSeconds cannot change"),
        ({"activeDeadlineSeconds": 99}, "activeDeadlineSeconds can only grow once it is set"),
        ({"deadlineSeconds": 999}, "deadlineSeconds can only grow once it is set"),
        ({"deadlineSeconds": None}, "deadlineSeconds can only grow once it is set, and cannot be removed"),
        ({"budgets": {"maxSteps": 9}}, "budgets.maxSteps can only grow once it is set"),
        ({"budgets": {"maxSteps": None}}, "budgets.maxSteps can only grow once it is set, and cannot be removed"),
        ({"budgets": None}, "budgets.cost can only grow once it is set, and cannot be removed"),
        ({"budgets": {"cost": "9.499999999"}}, "budgets.cost can only grow once it is set"),
        ({"budgets": {"currency": "EUR"}}, "budgets.currency cannot change once it is set"),
        ({"budgets": {"onExceeded": "Fail"}}, "budgets.onExceeded cannot change once it is set"),
    ],
    ids=str,
)
def test_what_a_run_is_cannot_change(objects: Objects, run: str, patch: Json, message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        objects.merge("agentruns", run, {"spec": patch})


@pytest.mark.parametrize(
    "patch",
    [
        {"desiredState": "Suspended"},
        {"desiredState": None},
        {"priority": 5},
        {"ttlSecondsAfterFinished": 60},
        {"activeDeadlineSeconds": 101},
        {"deadlineSeconds": 1001},
        {"budgets": {"maxSteps": 11, "cost": "10"}},
        {"budgets": {"maxTokens": 5}},
    ],
    ids=str,
)
def test_what_a_run_may_use_can_grow_and_be_steered(objects: Objects, run: str, patch: Json) -> None:
    objects.merge("agentruns", run, {"spec": patch})


def test_a_cancelled_run_stays_cancelled(objects: Objects, run: str) -> None:
    objects.merge("agentruns", run, {"spec": {"desiredState": "Cancelled"}})
    with pytest.raises(Refused, match="a cancelled run cannot be resumed; create another run"):
        objects.merge("agentruns", run, {"spec": {"desiredState": "Running"}})


def test_a_large_template_costs_the_rules_no_more_than_they_have(objects: Objects) -> None:
    containers = [{**CONTAINER, "name": f"c{n}" if n else "agent", "args": ["x" * 4_000] * 25} for n in range(10)]
    objects.create("agentruns", manifest({"agent": {"template": {"spec": {"containers": containers}}}}, name="large"))
    objects.merge("agentruns", "large", {"spec": {"priority": 1}})
    objects.delete("agentruns", "large")


def test_a_finalizer_can_be_removed_from_what_was_there_before_the_policy(objects: Objects) -> None:
    name = OLDER_THAN_THE_POLICY["metadata"]["name"]
    assert objects.merge("agentruns", name, {"metadata": {"finalizers": None}})["metadata"].get("finalizers") is None


@pytest.mark.parametrize("field", ["labels", "annotations"])
@pytest.mark.parametrize("kind", ["AgentRun", "AgentPool", "Trigger"])
def test_ten_thousand_entries_are_counted_and_refused(objects: Objects, kind: str, field: str) -> None:
    """They used to be accepted, and each rule that looks at one of them looked at them all."""
    body = manifest({"AgentRun": RUN, "AgentPool": POOL, "Trigger": TRIGGER}[kind], kind, "crowded")
    for entries in (10_000, MAX_ENTRIES + 1):
        began = time.perf_counter()
        body["metadata"][field] = {f"entry-{n}": "x" for n in range(entries)}
        with pytest.raises(Refused, match=f"metadata.{field} has more than {MAX_ENTRIES} entries"):
            objects.create(PLURALS[kind], body, dry_run=True)
        print(f"{kind}: {entries} {field} refused after {time.perf_counter() - began:.3f} s")
    body["metadata"][field] = {f"entry-{n}": "x" for n in range(MAX_ENTRIES)}
    objects.create(PLURALS[kind], body, dry_run=True)


# Pools


@pytest.mark.parametrize(
    ("capacity", "message"),
    [({"minIdle": 3, "maxIdle": 2}, "minIdle is larger than maxIdle"), ({"minIdle": 3, "maxPods": 2}, "minIdle is larger than maxPods")],
)
def test_mistakes_in_a_pool_are_refused(objects: Objects, capacity: Json, message: str) -> None:
    assert message in refusal(objects, {"template": TEMPLATE, "capacity": capacity}, "AgentPool")


def test_a_pool_can_change(objects: Objects) -> None:
    objects.create("agentpools", manifest({"template": TEMPLATE, "runDefaults": {"budgets": {"maxSteps": 5}}}, "AgentPool", "changing"))
    changed = {
        "template": {"spec": {"containers": [{**CONTAINER, "image": "example/agent:2"}]}},
        "runDefaults": {"budgets": {"maxSteps": 4}},
    }
    assert objects.merge("agentpools", "changing", {"spec": changed})["spec"] == changed
    objects.delete("agentpools", "changing")


# Triggers


def schedule(cron: str, **more: str) -> Json:
    return {**TRIGGER, "source": {"schedule": {"cron": cron, **more}}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({**TRIGGER, "source": {}}, "set exactly one of schedule, interval, at, webhook, manual"),
        ({**TRIGGER, "source": {"manual": {}, "interval": {"seconds": 5}}}, "set exactly one of schedule, interval, at, webhook, manual"),
        ({**TRIGGER, "source": {"webhook": {"auth": {}}}}, "set exactly one of hmac, bearer"),
        ({**TRIGGER, "source": {"event": {"type": "x"}}}, 'unknown field "spec.source.event"'),
        ({**TRIGGER, "source": {"at": "tomorrow"}}, "spec.source.at"),
        ({**TRIGGER, "source": {"at": "2026-02-30T18:00:00Z"}}, "spec.source.at"),
        (schedule("* * * * * *"), "is not five fields (minute, hour, day of month, month, day of week)"),
        (schedule("61 * * * *"), "is not five fields"),
        (schedule("@reboot"), "nor one of @yearly"),
        (schedule("0 7 * * *", timeZone="Europe/Nowhere"), "unknown time zone Europe/Nowhere"),
        (schedule("0 7 * * *", timeZone="Local"), "is not a time zone of the IANA database, such as Europe/Berlin"),
        ({**TRIGGER, "concurrencyPolicy": "Replace"}, 'supported values: "Allow", "Forbid"'),
        ({**TRIGGER, "route": {"address": "x"}}, 'unknown field "spec.route.address"'),
        ({**TRIGGER, "filter": {"cel": "true"}}, 'unknown field "spec.filter"'),
        (
            {**TRIGGER, "runTemplate": {"spec": {**RUN, "idempotencyKey": "x"}}},
            "runs of a trigger get their idempotencyKey from what fired it",
        ),
        ({**TRIGGER, "runTemplate": {"spec": {**RUN, "input": "x" * 17_000}}}, "spec.input is larger than 16384 bytes"),
        ({**TRIGGER, "runTemplate": {"spec": {**RUN, "input": 1, "inputFrom": BLOB}}}, "set input or inputFrom, not both"),
        ({**TRIGGER, "runTemplate": {"metadata": {"labels": {"perdure.dev/run-id": "x"}}, "spec": RUN}}, "reserved"),
    ],
)
def test_mistakes_in_a_trigger_are_refused(objects: Objects, spec: Json, message: str) -> None:
    assert message in refusal(objects, spec, "Trigger")


@pytest.mark.parametrize(
    "spec",
    [
        schedule("0 7 * * 1-5", timeZone="Europe/Berlin"),
        schedule("*/5 0-6,22 L jan-JUL mon#2"),
        schedule("@Daily", timeZone="UTC"),
        {**TRIGGER, "source": {"at": "2026-12-24T18:00:00+01:00"}},
        {**TRIGGER, "source": {"webhook": {"auth": {"bearer": {"secretRef": {"name": "s", "key": "k"}}}}}},
    ],
    ids=lambda spec: str(spec["source"]),
)
def test_triggers_are_accepted(objects: Objects, spec: Json) -> None:
    assert objects.create("triggers", manifest(spec, "Trigger"), dry_run=True)["spec"] == spec


def test_what_a_trigger_makes_can_change(objects: Objects) -> None:
    objects.create("triggers", manifest({**TRIGGER, "runTemplate": {"spec": {**RUN, "input": 1}}}, "Trigger", "changing"))
    patch = {"runTemplate": {"spec": {"summary": "New", "input": 2, "budgets": {"maxSteps": 1}}}}
    assert objects.merge("triggers", "changing", {"spec": patch})["spec"]["runTemplate"]["spec"]["input"] == 2
    with pytest.raises(Refused, match="is larger than 16384 bytes"):
        objects.merge("triggers", "changing", {"spec": {"runTemplate": {"spec": {"input": "x" * 17_000}}}})
    objects.delete("triggers", "changing")


@pytest.mark.parametrize(
    ("kind", "spec", "warned"),
    [
        ("AgentRun", {**RUN, "budgets": {"maxRetriesPerToolCall": 1}}, ""),
        ("AgentRun", {**RUN, "budgets": {"cost": "5"}, "escalation": {"authFailure": "Ask"}}, "spec.budgets.cost, spec.escalation"),
        ("AgentPool", {**POOL, "tools": [{"name": "mail"}]}, ""),
        ("AgentPool", {**POOL, "tools": [{"name": "a"}, {"name": "b", "onDivergence": "Agent"}]}, "spec.tools[].onDivergence"),
        ("Trigger", {**TRIGGER, "runTemplate": {"spec": {**RUN, "stopConditions": ["done"]}}}, "spec.stopConditions"),
    ],
)
def test_the_api_server_warns_of_fields_that_are_not_in_force_yet(
    api_server: ApiServer, objects: Objects, tmp_path: FilePath, kind: str, spec: Json, warned: str
) -> None:
    file = tmp_path / "given.json"
    file.write_text(json.dumps(manifest(spec, kind)))
    create = ("create", "--dry-run=server", "--warnings-as-errors", f"--filename={file}")
    if not warned:
        api_server.kubectl(*create)
        return
    with pytest.raises(CommandError, match=re.escape(f"{warned}: recorded, not in force yet")):
        api_server.kubectl(*create)


def test_the_name_of_a_trigger_leaves_room_for_those_of_its_runs(objects: Objects) -> None:
    with pytest.raises(Refused, match="the name is longer than 200 characters; the names of its runs begin with it"):
        objects.create("triggers", manifest(TRIGGER, "Trigger", "t" * 201), dry_run=True)
