"""What people and programs see of Perdure's resources: columns, selection, explanations, statuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.contract.conftest import CRDS
from tests.contract.objects import Json, Objects
from tests.unit.kube.pod_fields import TEMPLATE
from tests.unit.kube.statuses import TIME, longest_status, size

from perdure_operator.kube.api.admission import policies
from perdure_operator.kube.api.crd import DEFINITIONS
from perdure_operator.kube.api.status import MAX_STATUS_BYTES, fitted

RUN: Json = {"agent": {"poolRef": {"name": "worker"}}}


def manifest(spec: Json, kind: str = "AgentRun", name: str = "seen") -> Json:
    return {"apiVersion": "perdure.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def made(objects: Objects) -> Iterator[Any]:
    """Makes a run with a status; it is gone afterwards."""
    names = []

    def make(name: str, status: Json, **spec: Any) -> str:
        objects.create("agentruns", manifest({**RUN, **spec}, name=name))
        names.append(name)
        objects.merge("agentruns", name, {"status": status}, subresource="status")
        return name

    yield make
    for name in names:
        objects.delete("agentruns", name)


def test_what_is_installed_is_what_was_written(api_server: ApiServer, objects: Objects) -> None:
    applied = api_server.kubectl("apply", f"--filename={CRDS}").splitlines()
    assert len(applied) == len(DEFINITIONS) + len(policies())
    assert [line for line in applied if not line.endswith(" unchanged")] == []


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind)
def test_the_api_server_finds_nothing_wrong_with_a_definition(api_server: ApiServer, objects: Objects, definition: Any) -> None:
    path = "{range .status.conditions[*]}{.type}={.status} {end}"
    conditions = api_server.kubectl("get", "crd", f"{definition.plural}.perdure.dev", "-o", f"jsonpath={path}").split()
    assert sorted(conditions) == ["Established=True", "NamesAccepted=True"]


def test_short_names_and_the_category(api_server: ApiServer, made: Any) -> None:
    made("named", {})
    for name in ("arun", "perdure"):
        assert "agentrun.perdure.dev/named" in api_server.kubectl("get", name, "-o", "name")
    api_server.kubectl("get", "apool,atrg")


# Columns


def cells(table: Json, name: str) -> dict[str, tuple[Any, int]]:
    (row,) = (row for row in table["rows"] if row["object"]["metadata"]["name"] == name)
    return {c["name"]: (value, c["priority"]) for c, value in zip(table["columnDefinitions"], row["cells"], strict=True)}


def test_the_columns_of_runs(objects: Objects, made: Any) -> None:
    status = {
        "phase": "Suspended",
        "waitReason": "signal approved",
        "progress": {"done": 3},
        "attempt": 2,
        "podName": "report-1",
        "revision": "r1",
        "parentRef": {"name": "weekly"},
        "usage": {"cost": "0.25"},
    }
    made("shown", status, summary="A report")
    shown = cells(objects.table("agentruns"), "shown")
    assert list(shown) == ["Name", "Phase", "Waiting-For", "Progress", "Attempt", "Age", "Pod", "Revision", "Parent", "Cost", "Summary"]
    age = shown.pop("Age")
    assert age[1] == 0
    assert shown == {
        "Name": ("shown", 0),
        "Phase": ("Suspended", 0),
        "Waiting-For": ("signal approved", 0),
        "Progress": (3, 0),
        "Attempt": (2, 0),
        "Pod": ("report-1", 1),
        "Revision": ("r1", 1),
        "Parent": ("weekly", 1),
        "Cost": ("0.25", 1),
        "Summary": ("A report", 1),
    }


READY = {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": TIME}


def test_the_columns_of_pools(objects: Objects) -> None:
    spec = {"template": {"spec": {"containers": [{"name": "agent", "image": "i"}]}}, "capacity": {"minIdle": 1, "maxPods": 9}}
    objects.create("agentpools", manifest(spec, "AgentPool"))
    status = {"conditions": [READY], "idle": 1, "starting": 2, "leased": 3, "runnable": 4, "revision": "r1"}
    objects.merge("agentpools", "seen", {"status": status}, subresource="status")
    shown = {name: value for name, (value, _) in cells(objects.table("agentpools"), "seen").items() if name != "Age"}
    objects.delete("agentpools", "seen")
    assert shown == {
        "Name": "seen",
        "Ready": "True",
        "Idle": 1,
        "Starting": 2,
        "Leased": 3,
        "Runnable": 4,
        "Min-Idle": 1,
        "Max-Pods": 9,
        "Reuse": None,
        "Revision": "r1",
    }


def test_the_columns_of_triggers(objects: Objects) -> None:
    source = {"schedule": {"cron": "0 7 * * 1-5", "timeZone": "Europe/Berlin"}}
    spec = {"source": source, "runTemplate": {"spec": RUN}, "suspend": True, "concurrencyPolicy": "Forbid"}
    objects.create("triggers", manifest(spec, "Trigger"))
    delivery = {"id": "scheduled:default/seen:1", "state": "Done", "at": "2020-01-01T00:00:00Z", "run": "seen-1"}
    status = {"conditions": [READY], "active": 1, "pending": 2, "dead": 3, "nextScheduleTime": TIME, "lastDelivery": delivery, "url": "u"}
    objects.merge("triggers", "seen", {"status": status}, subresource="status")
    shown = {name: value for name, (value, _) in cells(objects.table("triggers"), "seen").items() if name != "Age"}
    objects.delete("triggers", "seen")
    assert re.match(r"[0-9]+y", shown.pop("Last"))
    assert shown == {
        "Name": "seen",
        "Ready": "True",
        "Schedule": "0 7 * * 1-5",
        "Suspend": True,
        "Active": 1,
        "Next": TIME,
        "Time-Zone": "Europe/Berlin",
        "Concurrency": "Forbid",
        "Pending": 2,
        "Dead": 3,
        "URL": "u",
    }


# Selection


@pytest.mark.parametrize(
    ("fields", "selected"),
    [
        ("status.phase=Suspended", ["one", "two"]),
        ("status.waitReason=timer", ["two"]),
        ("status.parentRef.name=root", ["three", "two"]),
        ("status.phase=Suspended,status.parentRef.name=root", ["two"]),
        ("status.phase!=Suspended,status.parentRef.name=root", ["three"]),
        ("spec.agent.poolRef.name=other", ["three"]),
    ],
)
def test_runs_are_selected_by_field(objects: Objects, made: Any, fields: str, selected: list[str]) -> None:
    made("one", {"phase": "Suspended", "waitReason": "signal approved"})
    made("two", {"phase": "Suspended", "waitReason": "timer", "parentRef": {"name": "root"}})
    made("three", {"phase": "Running", "parentRef": {"name": "root"}}, agent={"poolRef": {"name": "other"}})
    assert objects.names("agentruns", fields=fields) == selected


# Explanations


@pytest.mark.parametrize(
    ("field", "sentences"),
    [
        ("agentruns", ["One durable execution of an agent"]),
        ("agentruns.spec.agent", ["Exactly one of `poolRef` and `template`", "The pool whose pods execute the run."]),
        ("agentruns.spec.agent.template.spec.containers.env.valueFrom", ["A key of a Secret.", "A field of the pod itself."]),
        ("agentruns.spec.desiredState", ["ENUM: Running Suspended Cancelled", "Default Running."]),
        ("agentruns.status.conditions", ["Wait for Finished if a failure shall end the wait too.", "Why, in words for people."]),
        ("agentpools.spec.podReuse", ["mode\t<string> -required-", "enum: Never, ForkPerRun"]),
        ("triggers.spec.source.schedule", ["as Debian's cron reads them", "Name in the IANA database, such as Europe/Berlin."]),
    ],
)
def test_kubectl_explains(api_server: ApiServer, objects: Objects, field: str, sentences: list[str]) -> None:
    explained = " ".join(api_server.kubectl("explain", field).split(" "))
    flat = " ".join(explained.split())
    for sentence in sentences:
        assert " ".join(sentence.split()) in flat
    assert "<no description>" not in explained


# Statuses


def test_the_status_of_the_longest_run_is_stored_in_eight_kilobytes(objects: Objects, made: Any) -> None:
    made("long", {"phase": "Running"})
    cut = fitted(longest_status("漢"))
    stored = objects.merge("agentruns", "long", {"status": cut}, subresource="status")["status"]
    assert stored == cut
    assert stored["progress"]["done"] == 10_000
    assert size(stored) <= MAX_STATUS_BYTES


def test_a_status_is_applied_and_others_keep_their_conditions(objects: Objects, made: Any) -> None:
    def condition(kind: str, status: str) -> Json:
        return {"type": kind, "status": status, "reason": "R", "message": "", "lastTransitionTime": TIME}

    made("applied", {})
    ours, theirs = condition("Succeeded", "Unknown"), condition("Audited", "True")
    objects.apply_status("agentruns", "applied", {"phase": "Running", "podName": "p", "conditions": [ours]}, manager="perdure-operator")
    objects.apply_status("agentruns", "applied", {"conditions": [theirs]}, manager="auditor")
    changed = condition("Succeeded", "True")
    after = objects.apply_status("agentruns", "applied", {"phase": "Succeeded", "conditions": [changed]}, manager="perdure-operator")
    assert after["status"] == {"phase": "Succeeded", "conditions": [changed, theirs], "observedGeneration": -1}
    assert after["metadata"]["generation"] == 1


def test_the_status_is_not_written_with_the_spec(objects: Objects, made: Any) -> None:
    made("apart", {"phase": "Running"})
    objects.merge("agentruns", "apart", {"spec": {"priority": 1}, "status": {"phase": "Failed"}})
    after = objects.merge("agentruns", "apart", {"spec": {"priority": 2}, "status": {"attempt": 1}}, subresource="status")
    assert (after["spec"]["priority"], after["metadata"]["generation"]) == (1, 2)
    assert after["status"] == {"phase": "Running", "attempt": 1, "observedGeneration": -1}


@pytest.mark.parametrize(("plural", "kind"), [("agentruns", "AgentRun"), ("agentpools", "AgentPool"), ("triggers", "Trigger")])
def test_what_nobody_has_looked_at_says_so(objects: Objects, plural: str, kind: str) -> None:
    """Tools that wait take a resource whose status says nothing for well."""
    specs = {"AgentRun": RUN, "AgentPool": {"template": TEMPLATE}, "Trigger": {"source": {"manual": {}}, "runTemplate": {"spec": RUN}}}
    body = manifest(specs[kind], kind, "unseen")
    for given in ({}, {"status": {"observedGeneration": 7}}):
        objects.create(plural, {**body, **given})
        try:
            assert objects.get(plural, "unseen")["status"] == {"observedGeneration": -1}
            seen = objects.merge(plural, "unseen", {"status": {"observedGeneration": 1}}, subresource="status")
            assert seen["status"] == {"observedGeneration": 1}
        finally:
            objects.delete(plural, "unseen")
