"""``kubectl agentrun`` as a person has it: a plugin on the PATH, a kubeconfig with a token, a real apiserver, a real kubelet.

The gateway's Service has no address that is published, so every command goes by a port-forward; the audit log is asked whether it did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.installation import NAMESPACE, RUNS, Installation, agent_run, pool

Json = dict[str, Any]

PROGRAMS = Path(sys.executable).parent


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Person:
    """Somebody with a kubeconfig."""

    perdure: Installation
    kubeconfig: Path
    folder: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        cluster = self.perdure.cluster
        environment = {name: value for name, value in cluster.environment().items() if not name.startswith("PERDURE_")}
        environment |= {"KUBECONFIG": str(self.kubeconfig), "PATH": f"{PROGRAMS}{os.pathsep}{environment['PATH']}"}
        argv = cluster.argv(["kubectl", "agentrun", *words])
        return subprocess.Popen(argv, env=environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def says(self, *words: str, code: int = 0, seconds: float = 60) -> Said:
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code, f"{words}: code {process.returncode}\n{out}\n{err}"
        return Said(process.returncode, out, err)


def person(perdure: Installation, place: str, folder: Path, name: str, user: Json) -> Person:
    config = yaml.safe_load(perdure.cluster.kubeconfig.read_text())
    config["users"] = [{"name": name, "user": user}]
    config["contexts"] = [{"name": name, "context": {"cluster": config["clusters"][0]["name"], "user": name, "namespace": place}}]
    config["current-context"] = name
    file = folder / f"{name}.kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return Person(perdure, file, folder)


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    perdure.apply(
        place,
        pool("talker", ["python", "talker.py"]),
        *(pool(name, ["python", "agents.py", name]) for name in ("waiter", "breaker", "parent", "worker")),
    )


@pytest.fixture(scope="module")
def port_forwarding(perdure: Installation, place: str) -> Iterator[None]:
    """What docs/cli.md says that is needed, and no more, for the accounts of this module's namespace."""
    rules = [
        {"apiGroups": [""], "resources": ["services"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]},
    ]
    name = f"port-forward-{place}"
    rbac = "rbac.authorization.k8s.io"
    perdure.apply(
        NAMESPACE,
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"apiGroup": rbac, "kind": "Group", "name": f"system:serviceaccounts:{place}"}],
        },
    )  # fmt: skip
    yield
    perdure.cluster.kubectl("delete", "role,rolebinding", name, "-n", NAMESPACE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def jane(perdure: Installation, place: str, folder: Path, port_forwarding: None) -> Person:
    """May edit."""
    return person(perdure, place, folder, "jane", {"token": perdure.cluster.kubectl("create", "token", "tester", "-n", place).strip()})


@pytest.fixture(scope="module")
def onlooker(perdure: Installation, place: str, folder: Path, port_forwarding: None) -> Person:
    """May view."""
    perdure.cluster.kubectl("create", "serviceaccount", "onlooker", "-n", place)
    perdure.cluster.kubectl("create", "rolebinding", "onlooker", "-n", place, "--clusterrole=view", f"--serviceaccount={place}:onlooker")
    token = perdure.cluster.kubectl("create", "token", "onlooker", "-n", place).strip()
    return person(perdure, place, folder, "onlooker", {"token": token})


def manifest(folder: Path, *objects: Json) -> str:
    file = folder / f"{objects[-1]['metadata']['name']}.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    return str(file)


def rows(table: str) -> dict[str, list[str]]:
    """First column → the cells of its row."""
    return {line.split()[0]: line.split() for line in table.splitlines()[1:]}


# -------------------------------------------------------------------------------------------------------------- submit


def test_submit_watches_to_the_end(jane: Person, perdure: Installation, place: str, folder: Path) -> None:
    file = manifest(folder, pool("brought-along", ["python", "agents.py", "worker"]), agent_run("watched", "brought-along", {"seconds": 1}))
    said = jane.says("submit", "--watch", file, seconds=120)
    assert "leased" in said.err or "succeeded" in said.err, said.err
    assert f"{place}/watched" in said.err
    assert perdure.run("watched", place)["status"]["phase"] == "Succeeded"
    again = jane.says("submit", file, code=1)
    assert "is there already (Succeeded)" in again.out
    assert "nothing was started" in again.err


def test_submit_fails_with_its_run(jane: Person, folder: Path) -> None:
    file = manifest(folder, agent_run("watched-in-vain", "breaker", {}, retry={"maxRetries": 0}))
    answer = jane.says("submit", "--watch", "-f", file, "-o", "json", code=1, seconds=120)
    assert answer.json["state"] == "Failed"
    assert "cannot do anything" in answer.err


def test_submit_to_the_store_alone(jane: Person, perdure: Installation, place: str) -> None:
    assert "created" in jane.says("submit", "--store-only", "--pool", "worker", "--name", "rowless", "--input", '{"seconds": 0}').out
    perdure.until("it succeeds", lambda: jane.says("get", "rowless", "-o", "json").json["state"] == "Succeeded", 120)
    assert perdure.get(RUNS, "rowless", place) is None


def test_what_is_not_valid_is_not_submitted(jane: Person, perdure: Installation, place: str, folder: Path) -> None:
    wrong = manifest(folder, agent_run("misspelled", "worker", frobnicate=1))
    assert "frobnicate" in jane.says("submit", wrong, code=2).err
    assert jane.says("submit", "--pool", "worker", wrong, code=2).err
    assert perdure.get(RUNS, "misspelled", place) is None


# ---------------------------------------------------------------------------------------------------------------- look


@pytest.fixture(scope="module")
def waiting(perdure: Installation, place: str) -> str:
    """A run that has done something and waits."""
    perdure.apply(place, agent_run("looked-at", "talker", {"seconds": 0}, summary="is looked at", objective="be looked at"))
    perdure.until_phase("looked-at", place, "Suspended")
    return "looked-at"


def test_get(jane: Person, waiting: str, place: str) -> None:
    row = rows(jane.says("get", waiting).out)[waiting]
    assert row[1:4] == ["Suspended", "signal", "go"]
    wide = jane.says("get", waiting, "-o", "wide").out
    assert f"{place}/talker" in wide
    assert "is looked at" in wide
    as_json = jane.says("get", waiting, "-o", "json").json
    assert (as_json["name"], as_json["state"]) == (waiting, "Suspended")
    assert yaml.safe_load(jane.says("get", waiting, "-o", "yaml").out)["runId"] == as_json["runId"]
    listed = jane.says("get", "-o", "json", "--state", "suspended", "--pool", "talker").json["items"]
    assert [run["name"] for run in listed] == [waiting]
    assert {"talker", "waiter", "worker"} <= set(rows(jane.says("get", "pools").out))


def test_why_events_ledger_journal(jane: Person, waiting: str) -> None:
    why = jane.says("why", waiting).out
    assert "signal go" in why
    assert f"kubectl agentrun signal {waiting} go" in why
    events = [event["kind"] for event in jane.says("events", waiting, "-o", "json").json["items"]]
    assert [kind for kind in events if kind in ("run.created", "run.leased", "step.succeeded", "run.suspended")] == [
        "run.created", "run.leased", "step.succeeded", "run.suspended",
    ]  # fmt: skip
    assert "waits for signal go" in jane.says("events", waiting).out
    [effect] = jane.says("ledger", waiting, "-o", "json").json["items"]
    assert (effect["tool"], effect["state"]) == ("tell", "SUCCEEDED")
    assert "SUCCEEDED" in jane.says("ledger", waiting).out
    assert "think" in jane.says("journal", waiting).out


def test_report(jane: Person, waiting: str) -> None:
    page = jane.says("report", waiting).out
    for part in ("Asked", "be looked at", "Did", "tell", "Cost", "Now", "signal go"):
        assert part in page, page
    answers = jane.says("report", waiting, "-o", "json").json
    assert answers["run"]["input"] == {"seconds": 0}
    assert [entry["state"] for entry in answers["ledger"]] == ["SUCCEEDED"]


def test_tree(jane: Person, perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("rooted", "parent", {"levels": 2, "leaf": "0.1"}))
    perdure.until_phase("rooted", place, "Succeeded", 120)
    found = jane.says("tree", "rooted", "-o", "json").json
    assert [run["state"] for run in found["descendants"]] == ["Succeeded"] * 2
    drawn = jane.says("tree", "rooted").out
    assert all(run["name"] in drawn for run in (found["run"], *found["descendants"]))


def test_namespaces(jane: Person, perdure: Installation, place: str, waiting: str, namespace: str) -> None:
    perdure.prepare(namespace)
    perdure.cluster.kubectl("create", "rolebinding", "jane", "-n", namespace, "--clusterrole=view", f"--serviceaccount={place}:tester")
    perdure.apply(namespace, pool("waiter", ["python", "agents.py", "waiter"]), agent_run("elsewhere", "waiter", {}))
    perdure.until_phase("elsewhere", namespace, "Suspended")
    assert list(rows(jane.says("get", "-n", namespace).out)) == ["elsewhere"]
    assert "elsewhere" not in jane.says("get").out
    assert jane.says("get", f"{namespace}/elsewhere", "-o", "json").json["namespace"] == namespace
    assert f"kubectl agentrun signal -n {namespace} elsewhere go" in jane.says("why", "elsewhere", "-n", namespace).out
    refused = jane.says("get", "-A", code=4)
    assert "may not list agentruns.perdure.dev in all namespaces" in refused.err


# ----------------------------------------------------------------------------------------------------------------- act


def test_signal_is_kept_once(jane: Person, perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("signalled", "waiter", {}))
    perdure.until_phase("signalled", place, "Suspended")
    assert "the run does not wait for it now; it waits for: signal go" in jane.says("signal", "signalled", "stop").out
    assert "signal go sent" in jane.says("signal", "signalled", "go", '{"by": "jane"}', "--id", "mine").out
    assert "was there already" in jane.says("signal", "signalled", "go", "--id", "mine").out
    assert perdure.until_phase("signalled", place, "Succeeded")["status"]["result"]["payload"] == {"by": "jane"}


def test_a_paused_run_keeps_what_comes_until_it_is_resumed(jane: Person, perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("parked", "waiter", {}))
    perdure.until_phase("parked", place, "Suspended")
    assert "asked to pause" in jane.says("pause", "parked").out
    perdure.until("its resource says so", lambda: perdure.run("parked", place)["status"]["waitReason"] == "resume")
    assert "paused" in jane.says("why", "parked").out.lower()
    perdure.signal("parked", place, "go")
    parked = jane.says("get", "parked", "-o", "json").json
    assert (parked["state"], parked["paused"]) == ("Suspended", True)
    assert "resumed" in jane.says("resume", "parked").out
    perdure.until_phase("parked", place, "Succeeded")


def test_cancel_ends_a_run_at_work(jane: Person, perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("unwanted", "talker", {"seconds": 200}))
    perdure.until_phase("unwanted", place, "Running")
    assert "asked to cancel" in jane.says("cancel", "unwanted", "--reason", "no longer needed").out
    perdure.until_phase("unwanted", place, "Cancelled")
    assert "no longer needed" in jane.says("events", "unwanted").out
    assert "the run is Cancelled" in jane.says("pause", "unwanted", code=1).err


def test_logs_are_followed_over_a_wait(jane: Person, perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("spoken", "talker", {"seconds": 15}))
    perdure.until("it is known", lambda: (perdure.run("spoken", place).get("status") or {}).get("runID"))
    following = jane.start("logs", "-f", "spoken")
    try:
        perdure.until_phase("spoken", place, "Suspended")
        perdure.signal("spoken", place, "go", {"again": True})
        out, err = following.communicate(timeout=120)
    finally:
        following.kill()
        following.wait()
    assert following.returncode == 0, err
    lines = out.splitlines()
    # The function starts from its top in each pod.
    first, separator, again, last = lines
    assert first == again == "hello before the wait"
    assert "goes on (attempt 1, epoch 2)" in separator
    assert last == "hello after the wait: {'again': True}"
    perdure.until("its pods are gone", lambda: not perdure.workers_of("talker", place))
    assert jane.says("logs", "spoken").err.count("is gone, and its log with it") == 2


# --------------------------------------------------------------------------------------------------- who, and by which way


def test_everything_went_by_port_forward(jane: Person, perdure: Installation, place: str, waiting: str) -> None:
    def forwards() -> int:
        found = 0
        for line in perdure.cluster.audit_log.read_text().splitlines():
            entry = json.loads(line)
            reference = entry.get("objectRef") or {}
            mine = entry["user"]["username"] == f"system:serviceaccount:{place}:tester" and reference.get("namespace") == NAMESPACE
            found += mine and reference.get("subresource") == "portforward" and entry["responseStatus"]["code"] == 101
        return found

    published = perdure.get("configmaps", "perdure-cli", NAMESPACE)
    assert published is not None
    assert published["data"]["url"] == ""
    before = forwards()
    jane.says("get", waiting)
    perdure.until("the audit log has it", lambda: forwards() > before)


def test_a_certificate_is_nobody_until_it_says_whom_to_be(perdure: Installation, place: str, folder: Path, waiting: str) -> None:
    [admin] = yaml.safe_load(perdure.cluster.kubeconfig.read_text())["users"]
    certified = person(perdure, place, folder, "certified", admin["user"])
    refused = certified.says("get", waiting, code=4)
    assert "has no bearer token" in refused.err
    assert "--as-serviceaccount" in refused.err
    assert rows(certified.says("get", waiting, "--as-serviceaccount", f"{place}/tester").out)[waiting]


def test_without_the_verb(onlooker: Person, waiting: str, perdure: Installation, place: str) -> None:
    assert rows(onlooker.says("get").out)[waiting]
    before = perdure.run(waiting, place)["status"]
    for words, what in (
        (("signal", waiting, "go"), "agentruns/signal"),
        (("cancel", waiting), "agentruns/cancel"),
        (("pause", waiting), "agentruns/pause"),
        (("resume", waiting), "agentruns/pause"),
        (("submit", "--store-only", "--pool", "waiter"), "agentruns"),
    ):
        refused = onlooker.says(*words, code=4)
        assert f"may not create {what}.perdure.dev in namespace {place}" in refused.err
        assert f"Grant the verb create on {what}" in refused.err
    assert "agentruns" in onlooker.says("submit", "--pool", "waiter", code=4).err  # this one the apiserver refuses
    assert perdure.run(waiting, place)["status"] == before


def test_exit_codes(jane: Person, perdure: Installation, place: str, folder: Path) -> None:
    assert "no-such-run" in jane.says("get", "no-such-run", code=3).err
    assert jane.says("signal", "no-such-run", "go", code=3).err
    assert jane.says("submit", str(folder / "no-such-file.yaml"), code=2).err
    assert jane.says("get", "--frobnicate", code=2).err
    assert jane.says("get", "--system-namespace", "default", code=4).err  # whether it is there is not hers to know
    stranger = person(perdure, place, folder, "stranger", {"token": "made-up"})
    assert stranger.says("get", code=4).err
    config = yaml.safe_load(jane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    nowhere = folder / "nowhere.kubeconfig"
    nowhere.write_text(yaml.safe_dump(config))
    assert Person(perdure, nowhere, folder).says("get", code=5).err
