"""The commands against a gateway that the test plays: what they send, what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from aiohttp import web
from tests.unit.cli.fake_gateway import CHILD_ID, EVENTS, POD_ID, RUN_ID, FakeGateway, problem, run
from typer.testing import CliRunner, Result

from perdure_operator.cli.dev import _again
from perdure_operator.cli.main import app
from perdure_operator.local.state import PodRecord, Session, StateDir


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as found:
        found.answers["GET /v1/namespaces/default/runs/weekly"] = run()
        found.answers["GET /v1/namespaces/default/runs"] = {"items": [run()], "next": None}
        for name in ("weekly", RUN_ID):
            found.answers[f"GET /v1/namespaces/default/runs/{name}/events"] = {"items": EVENTS, "next": None}
        yield found


@pytest.fixture
def call(gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `perdure` in a folder with a local session on the gateway."""
    monkeypatch.chdir(tmp_path)
    for name in ("PERDURE_STATE", "PERDURE_SERVER", "PERDURE_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    state = StateDir(tmp_path / ".perdure")
    state.create()
    state.write_session(Session(1, "2026-11-21T12:00:00+00:00", [gateway.url], "the-token", "", "/tmp/x"))
    state.record(PodRecord(UUID(POD_ID), "worker-3", "default/worker", str(state.logs / "worker-3.log"), 1, 2, 3.0, 4.0))
    (state.logs / "worker-3.log").write_text("hello\nworld\n")
    return lambda *words, **more: CliRunner().invoke(app, list(words), **more)


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder below that of the session. A `perdure dev` that is started there starts nothing."""

    async def ends_at_once(*_: object, **__: object) -> int:
        return 0

    monkeypatch.setattr("perdure_operator.cli.session.run", ends_at_once)
    found = tmp_path / "below"
    found.mkdir()
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


def test_get_lists_runs_as_kubectl_would(call: Callable[..., Result], gateway: FakeGateway) -> None:
    result = call("get")
    assert result.exit_code == 0, result.stderr
    header, row = result.stdout.splitlines()
    assert (header, row) == (header.rstrip(), row.rstrip())
    assert cells(header) == ["NAME", "PHASE", "WAITING-FOR", "STEP/PROGRESS", "ATTEMPT", "POD", "AGE"]
    assert cells(row)[:5] == ["weekly", "Running", "2 steps", "1", "worker-3"]
    assert gateway.last()[2]["Authorization"] == "Bearer the-token"


def test_get_reads_every_page_and_passes_filters_on(call: Callable[..., Result], gateway: FakeGateway) -> None:
    def page(request: web.Request) -> dict[str, Any]:
        assert (request.query["state"], request.query["pool"]) == ("Suspended", "default/worker")
        if "after" not in request.query:
            return {"items": [run(name="one")], "next": RUN_ID}
        assert request.query["after"] == RUN_ID
        return {"items": [run(name="two")], "next": None}

    gateway.answers["GET /v1/namespaces/default/runs"] = page
    result = call("get", "runs", "--state", "suspended", "--pool", "worker", "-o", "json")
    assert [item["name"] for item in json.loads(result.stdout)["items"]] == ["one", "two"]


@pytest.mark.parametrize(
    ("view", "phase", "waiting"),
    [
        (run(state="Suspended", waitingFor=[{"kind": "signal", "name": "approve"}, {"kind": "timer"}]), "Suspended", "signal approve +1"),
        (run(state="Suspended", paused=True, reason="Paused", message="paused by ada"), "Paused", "paused by ada"),
        (run(state="Running", cancelRequested=True), "Cancelling", None),
        (run(state="Failed", error={"type": "Bad", "message": "it broke"}), "Failed", "Bad: it broke"),
        (run(state="Pending", message="queued: waits for an idle pod of pool worker"), "Pending", "queued: waits for an idle pod"),
    ],
)
def test_phase_and_waiting_say_what_matters(
    call: Callable[..., Result], gateway: FakeGateway, view: dict[str, Any], phase: str, waiting: str | None
) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = view
    row = cells(call("get", "weekly").stdout.splitlines()[1])
    assert row[1] == phase
    assert waiting is None or row[2].startswith(waiting)


def test_wide_json_and_yaml(call: Callable[..., Result]) -> None:
    assert "Weekly market report" in call("get", "-o", "wide").stdout
    assert json.loads(call("get", "weekly", "-o", "json").stdout) == run()
    assert yaml.safe_load(call("get", "weekly", "-o", "yaml").stdout) == run()


def test_text_from_runs_cannot_control_the_terminal(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(
        summary="\x1b[2Jevil\r\n[red]x", state="Pending", message="\x1b]0;t\x07"
    )
    result = call("get", "weekly", "-o", "wide")
    assert "\x1b" not in result.stdout
    assert "[red]x" in result.stdout
    assert len(result.stdout.splitlines()) == 2


def test_get_pools(call: Callable[..., Result], gateway: FakeGateway) -> None:
    pool = {
        "pool": "default/worker",
        "spec": {"capacity": {"minIdle": 1, "maxIdle": 2, "maxPods": 9}},
        "runnable": 4,
        "idle": 1,
        "starting": 0,
        "leased": 3,
    }
    gateway.answers["GET /v1/namespaces/default/pools"] = {"items": [pool, pool | {"trouble": {"message": "no such image"}}]}
    well, ill = call("get", "pools").stdout.splitlines()[1:]
    assert cells(well) == ["worker", "4", "1", "0", "3", "1..2", "9"]
    assert cells(ill)[-1] == "no such image"


def test_why_says_what_would_wake_it(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["GET /v1/namespaces/report/runs/weekly/why"] = {
        "state": "Suspended", "reason": "Waiting", "message": "waits for signal approve", "since": "2026-11-21T12:00:00+00:00",
        "waitingFor": [{"kind": "signal", "name": "approve", "since": "2026-11-21T12:00:00+00:00", "key": "/wait:x#0",
                        "timeoutAt": "2126-11-21T12:00:00+00:00", "refused": {"expected": "int", "reason": "Expected `int`, got `str`"}}],
    }  # fmt: skip
    result = call("why", "report/weekly")
    assert result.exit_code == 0
    assert result.stdout.startswith("Suspended for ")
    assert "to send it: perdure signal -n report weekly approve" in result.stdout
    assert " at the latest" in result.stdout
    assert "one came that it could not use: Expected `int`, got `str` (expected: int)" in result.stdout
    assert "weekly approve PAYLOAD" in result.stdout


def test_the_command_that_ends_a_wait_can_be_pasted(call: Callable[..., Result], gateway: FakeGateway) -> None:
    waits = [{"kind": "signal", "name": "it's ok; go"}]
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = {"state": "Suspended", "reason": "Waiting", "waitingFor": waits}
    command = call("why", "weekly").stdout.rstrip().rpartition("to send it: ")[2]
    assert shlex.split(command) == ["perdure", "signal", "weekly", "it's ok; go"]


def test_why_of_a_run_that_has_ended_says_it_once(call: Callable[..., Result], gateway: FakeGateway) -> None:
    ended = {"state": "Succeeded", "reason": "Succeeded", "message": ""}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = ended
    gateway.answers["GET /v1/namespaces/default/runs/weekly/ledger"] = {"items": []}
    assert call("why", "weekly").output == "Succeeded\n"
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = {"state": "Failed", "reason": "Bad", "message": "it broke"}
    assert call("why", "weekly").output == "Failed\nBad: it broke\n    what its agent said: perdure logs weekly\n"


def test_why_says_what_nobody_knows_of_a_run_that_has_ended(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = {"state": "Succeeded", "reason": "Succeeded"}
    calls = [("send", "UNKNOWN"), ("send", "UNKNOWN"), ("charge", "UNKNOWN"), ("look", "SUCCEEDED")]
    entries = [{"key": f"{n}" * 64, "tool": tool, "state": state} for n, (tool, state) in enumerate(calls)]
    gateway.answers["GET /v1/namespaces/default/runs/weekly/ledger"] = {"items": entries}
    assert call("why", "weekly").stdout.splitlines()[1:] == ["    nobody knows whether charge, send happened: perdure ledger weekly"]


def test_submit_says_that_it_changes_a_pool(call: Callable[..., Result], gateway: FakeGateway) -> None:
    head = "apiVersion: perdure.dev/v1alpha1\nkind: AgentPool\n"
    same, other = (json.dumps({"template": {"spec": {"containers": [{"name": "agent", "image": image}]}}}) for image in ("a", "b"))
    Path("pools.yaml").write_text("---\n".join(f"{head}metadata: {{name: {name}}}\nspec: {same}\n" for name in ("new", "kept", "changed")))
    before = {"default/kept": same, "default/changed": other}
    gateway.answers["GET /v1/namespaces/-/pools"] = {"items": [{"pool": name, "spec": json.loads(spec)} for name, spec in before.items()]}
    result = call("submit", "pools.yaml")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.splitlines() == ["AgentPool default/changed is changed: all its runs get workers of the new kind from now on"]


def test_why_says_which_call_a_person_must_decide_about_and_how(call: Callable[..., Result], gateway: FakeGateway) -> None:
    key = "ab" * 32
    waits = {
        "kind": "signal", "name": f"effect:{key}:2", "since": "2026-11-21T12:00:00+00:00", "key": "/wait:effect=x", "tool": "send",
        "call": {"key": key, "tool": "send", "effect": "external", "step": None, "attempts": 2, "arguments": {"to": "ann", "n": [1]},
                 "error": {"type": "ConnectionError", "message": "it broke"}},
    }  # fmt: skip
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = {"state": "Suspended", "reason": "Waiting", "waitingFor": [waits]}
    lines = [line.strip() for line in call("why", "weekly").stdout.splitlines()]
    assert lines[1].startswith('a person must decide: nobody knows whether send(to="ann", n=[1]) happened, for ')
    assert lines[2] == f"the call   : effect {key}, attempt 2; ConnectionError: it broke"
    assert lines[3] == f"""it happened: perdure signal weekly effect:{key}:2 '{{"happened": true, "response": RESPONSE}}'"""
    assert lines[5] == f"""it did not : perdure signal weekly effect:{key}:2 '{{"happened": false}}' (then it is done again)"""
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(state="Suspended", waitingFor=[waits])
    assert cells(call("get", "weekly").stdout.splitlines()[1])[2] == "decision about send"
    entry = {"key": key, "tool": "send", "effect": "external", "state": "UNKNOWN", "attempts": 2}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/ledger"] = {"items": [entry]}
    assert call("ledger", "weekly").stdout.splitlines()[-1] == "a person must decide what became of send: perdure why weekly"


def test_why_and_logs_say_that_no_pod_starts(call: Callable[..., Result], gateway: FakeGateway) -> None:
    words = "queued, but pods of pool default/worker fail: worker-1: agent exited with code 1 after 0.2 s; the next try is in 8 s"
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = {
        "state": "Pending", "reason": "PoolNotReady", "message": words,
        "poolTrouble": {"lastWords": ["Traceback", "ImportError: \x1b[1mx"]},
    }  # fmt: skip
    assert call("why", "weekly").stdout.splitlines()[1:] == [f"PoolNotReady: {words}", "    Traceback", "    ImportError:  [1mx"]
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(state="Pending", epoch=0, message=words, podId=None)
    gateway.answers[f"GET /v1/namespaces/default/runs/{RUN_ID}/events"] = {"items": EVENTS[:1], "next": None}
    assert call("logs", "weekly").stderr == f"(no worker has had weekly yet: {words})\n"


def test_why_hides_no_pause(call: Callable[..., Result], gateway: FakeGateway) -> None:
    waits = [{"kind": "signal", "name": "approve"}]
    paused = {
        "state": "Suspended",
        "reason": "Paused",
        "message": "paused; resume it to go on",
        "pausedBy": ["person"],
        "waitingFor": waits,
    }
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = paused
    assert [line.strip() for line in call("why", "weekly").stdout.splitlines()] == [
        "Suspended",
        "Paused: paused; resume it to go on",
        "to resume it: perdure resume weekly",
        "waits for signal approve",
        "to send it: perdure signal weekly approve",
    ]
    lost = "11 workers were lost without progress, the last one: AgentKilled; resume to try again"
    parked = {"state": "Suspended", "reason": "LossesExhausted", "message": lost, "pausedBy": ["losses", "spec"]}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = parked
    assert [line.strip() for line in call("why", "weekly").stdout.splitlines()] == [
        "Suspended",
        f"LossesExhausted: {lost}",
        "to resume it: perdure resume weekly",
        "to resume it: set spec.desiredState: Running",
    ]


def test_why_calls_the_pod_by_its_name(call: Callable[..., Result], gateway: FakeGateway) -> None:
    view: dict[str, Any] = {"state": "Running", "reason": "Leased", "message": f"runs on pod {POD_ID}", "since": None, "waitingFor": []}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = view
    assert call("why", "weekly").stdout == "Running\nLeased: runs on pod worker-3\n"


def test_events_tell_a_story_with_the_pods_name(call: Callable[..., Result]) -> None:
    lines = call("events", "weekly").stdout.splitlines()
    assert "leased by worker-3 (epoch 2)" in lines[2]
    assert "step crawl done" in lines[3]


def test_events_follow_until_the_end(call: Callable[..., Result], gateway: FakeGateway) -> None:
    stream = "".join(f"id: {e['seq']}\nevent: {e['kind']}\ndata: {json.dumps(e)}\n\n" for e in EVENTS) + ": still here\n\n"
    end = 'event: end\ndata: {"state":"Succeeded"}\n\n'
    gateway.answers["GET /v1/namespaces/default/runs/weekly/tail"] = lambda r: web.Response(
        text=end if r.query["from"] == "4" else stream, content_type="text/event-stream"
    )
    result = call("events", "-f", "weekly")
    assert result.exit_code == 0
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["1", "2", "3"]
    assert [r[2]["?from"] for r in gateway.requests if r[0].endswith("/tail")] == ["1", "4"], (
        "a lost connection goes on after the last event"
    )


def test_tree(call: Callable[..., Result], gateway: FakeGateway) -> None:
    child = run(runId=CHILD_ID, name="weekly-1", parent=RUN_ID, state="Succeeded", podId=None)
    gateway.answers["GET /v1/namespaces/default/runs/weekly/tree"] = {"run": run(), "descendants": [child]}
    lines = call("tree", "weekly").stdout.splitlines()
    assert lines[0].startswith("weekly  Running")
    assert lines[1].startswith("└── weekly-1  Succeeded")


def test_ledger_and_journal(call: Callable[..., Result], gateway: FakeGateway) -> None:
    entry = {"key": "a" * 64, "tool": "send_email", "effect": "external", "attempts": 1}
    done = entry | {"state": "SUCCEEDED", "providerRef": "msg-1", "response": {"id": 5}}
    failed = entry | {"state": "FAILED", "error": {"type": "Refused", "message": "no such address"}}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/ledger"] = {"items": [done, failed, entry | {"state": "SUCCEEDED"}]}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/journal"] = {
        "items": [{"key": "/step:a#0", "kind": "step", "state": "succeeded", "seq": 3}]
    }
    header, one, two, three = call("ledger", "weekly").stdout.splitlines()
    assert cells(header)[-3:] == ["RECEIPT", "PROVIDER-REF", "ERROR"]
    assert cells(one) == ["a" * 12, "send_email", "external", "SUCCEEDED", "1", '{"id": 5}', "msg-1"]
    assert two[header.index("ERROR") :] == "Refused: no such address"
    assert three[header.index("RECEIPT") :] == "(large)", "null is another receipt than one that was not sent"
    assert cells(call("journal", "weekly").stdout.splitlines()[1])[:4] == ["3", "step", "/step:a#0", "succeeded"]


@pytest.mark.parametrize(("reason", "until"), [("Terminated", "stopped"), ("DevStopped", "stopped"), ("AgentKilled", "lost")])
def test_a_worker_that_was_told_to_end_is_not_reported_as_lost(
    call: Callable[..., Result], gateway: FakeGateway, reason: str, until: str
) -> None:
    path = f"GET /v1/namespaces/default/runs/{RUN_ID}"
    ended = {"seq": 4, "at": "2026-11-21T12:00:05+00:00", "epoch": 2, "kind": "run.lost", "data": {"reason": reason}}
    gateway.answers |= {f"{path}/{what}": {"items": []} for what in ("journal", "ledger")}
    gateway.answers |= {f"{path}/tree": {"descendants": []}, f"{path}/events": {"items": [*EVENTS, ended], "next": None}}
    (worker,) = [line for line in call("report", "weekly").stdout.splitlines() if "worker-3" in line]
    assert cells(worker)[-2:] == ["4s", until]


def test_the_ledger_of_a_run_that_has_ended_says_what_nobody_knows(call: Callable[..., Result], gateway: FakeGateway) -> None:
    entry = {"key": "a" * 64, "tool": "pay", "effect": "external", "attempts": 1, "state": "UNKNOWN"}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/ledger"] = {"items": [entry]}
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(state="Cancelled")
    assert "nobody knows whether the UNKNOWN ones happened" in call("ledger", "weekly").stderr


def test_logs_of_all_pods_of_a_run(call: Callable[..., Result]) -> None:
    assert call("logs", "weekly").stdout == "hello\nworld\n"
    assert call("logs", "weekly", "--prefix").stdout == "worker-3 | hello\nworker-3 | world\n"


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (("approve",), None),
        (("approve", '{"yes": true}'), {"yes": True}),
        (("approve", "just text"), "just text"),
        (("approve", "-"), [1]),
        (("approve", "@payload.json"), {"from": "file"}),
    ],
)
def test_signal_sends_json(call: Callable[..., Result], gateway: FakeGateway, words: tuple[str, ...], sent: Any) -> None:
    Path("payload.json").write_text('{"from": "file"}')
    gateway.answers["POST /v1/namespaces/default/runs/weekly/signals/approve"] = {"seq": 7, "duplicate": False}
    result = call("signal", "weekly", *words, "--id", "s-1", input="[1]")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "signal approve sent (event 7 of default/weekly)\n"
    assert gateway.last()[1] == sent
    assert gateway.last()[2]["Idempotency-Key"] == "s-1"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"by": me}', ["line 1 column 8", '  {"by": me}', "         ^"]),
        ("[1, 2", ["line 1 column 6"]),
        ('"a', ["line 1 column 1"]),
        (' {\n"a": 1,\n"b" 2}', ["line 3 column 5", '  "b" 2}', "      ^"]),
    ],
)
def test_a_payload_that_looks_like_json_must_be_json(
    call: Callable[..., Result], gateway: FakeGateway, text: str, where: list[str]
) -> None:
    for words in (("signal", "weekly", "approve", text), ("submit", "--pool", "worker", "--input", text)):
        result = call(*words)
        assert result.exit_code == 2
        assert all(part in result.stderr for part in where), result.stderr
        assert not [what for what, _, _ in gateway.requests if what.startswith("POST")]


def test_a_signal_that_a_suspended_run_does_not_wait_for_is_sent_and_said(call: Callable[..., Result], gateway: FakeGateway) -> None:
    waits = [{"kind": "signal", "name": "approved"}, {"kind": "timer"}]
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(state="Suspended", waitingFor=waits)
    for name in ("aproved", "approved"):
        gateway.answers[f"POST /v1/namespaces/default/runs/weekly/signals/{name}"] = {"seq": 7, "duplicate": False}
    sent, other = call("signal", "weekly", "aproved").stdout.splitlines()
    assert sent == "signal aproved sent (event 7 of default/weekly)"
    assert other == "the run does not wait for it now; it waits for: signal approved, timer"
    assert len(call("signal", "weekly", "approved").stdout.splitlines()) == 1


def test_a_verb_on_a_run_that_has_ended_says_how_to_start_another(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["POST /v1/namespaces/default/runs/weekly/pause"] = lambda _: problem(409, "run-finished", "it has ended", "No.")
    result = call("pause", "weekly")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: it has ended\nA run that has ended stays ended. For a new one: ")
    assert "--fresh" not in result.stderr


def test_an_error_repeats_what_was_typed(call: Callable[..., Result], gateway: FakeGateway) -> None:
    detail = "nobody asks about effect:zzz:1, and [red] is no colour"
    gateway.answers["POST /v1/namespaces/default/runs/weekly/signals/effect:zzz:1"] = lambda _: problem(409, "not-asked", detail, "Ask.")
    assert call("signal", "weekly", "effect:zzz:1", "{}").stderr.startswith(f"error: {detail}\n")


def test_submit_of_a_run_that_has_ended_is_1_and_says_how_to_start_another(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(state="Succeeded")
    Path("run.yaml").write_text(
        "{apiVersion: perdure.dev/v1alpha1, kind: AgentRun, metadata: {name: weekly}, spec: {agent: {poolRef: {name: worker}}}}\n"
    )
    result = call("submit", "run.yaml")
    assert result.exit_code == 1
    assert result.stdout == "default/weekly is there already (Succeeded)\n"
    assert "metadata.name in run.yaml" in result.stderr
    assert "`perdure dev --fresh -f run.yaml`, which forgets every run of this folder" in result.stderr
    result = call("submit", "--pool", "worker", "--name", "weekly")
    assert result.exit_code == 1
    assert "perdure submit --pool worker --name NEW" in result.stderr


def test_submit_says_what_it_does_not_take_of_a_file(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(input={"to": "ann"})
    head = "apiVersion: perdure.dev/v1alpha1, kind: AgentRun, metadata: {name: weekly}"
    for to, said in (("ann", ""), ("bob", "warning: default/weekly keeps the input that it began with; the file has another, ")):
        Path("run.yaml").write_text(f"{{{head}, spec: {{agent: {{poolRef: {{name: worker}}}}, input: {{to: {to}}}}}}}\n")
        result = call("submit", "run.yaml")
        assert result.exit_code == 0
        assert result.stderr.startswith(said), result.stderr
        assert bool(result.stderr) is bool(said)


def test_submit_of_a_file_takes_nothing_that_the_file_says(call: Callable[..., Result], gateway: FakeGateway) -> None:
    Path("run.yaml").write_text("{apiVersion: perdure.dev/v1alpha1, kind: AgentRun, metadata: {name: weekly}, spec: {}}\n")
    result = call("submit", "run.yaml", "--input", '{"to": "ann"}', "--name", "other")
    assert result.exit_code == 2
    assert "--name and --input: that is what the files say" in result.stderr
    assert gateway.requests == []


@pytest.mark.parametrize(("words", "shown"), [(['{"by": "x"}'], """NAME '{"by": "x"}'"""), ([""], "NAME [JSON]")])
def test_a_signal_without_a_name(call: Callable[..., Result], gateway: FakeGateway, words: list[str], shown: str) -> None:
    result = call("signal", "weekly", *words)
    assert result.exit_code == 2
    assert "the name of the signal is missing" in result.stderr
    assert f"perdure signal weekly {shown}" in result.stderr
    assert gateway.requests == []


def test_cancel_with_a_reason(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["POST /v1/namespaces/default/runs/weekly/cancel"] = run(cancelRequested=True)
    result = call("cancel", "weekly", "--reason", "wrong input")
    assert result.stdout == "default/weekly asked to cancel (it is Running)\n"
    assert gateway.last()[1] == {"reason": "wrong input"}


@pytest.mark.parametrize(("before", "said"), [("Suspended", "asked to cancel (it is Cancelled)"), ("Cancelled", "is Cancelled already")])
def test_a_second_cancel_is_told_from_the_first(call: Callable[..., Result], gateway: FakeGateway, before: str, said: str) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = run(state=before)
    gateway.answers["POST /v1/namespaces/default/runs/weekly/cancel"] = run(state="Cancelled")
    result = call("cancel", "weekly")
    assert (result.exit_code, result.stdout) == (0, f"default/weekly {said}\n")


def test_submit_makes_pools_first_and_leaves_what_is_there_alone(call: Callable[..., Result], gateway: FakeGateway) -> None:
    Path("runs.yaml").write_text(
        "{apiVersion: perdure.dev/v1alpha1, kind: AgentRun, metadata: {name: weekly}, spec: {agent: {poolRef: {name: worker}}}}\n---\n"
        "{apiVersion: perdure.dev/v1alpha1, kind: AgentRun, metadata: {name: daily, labels: {a: b}}, "
        "spec: {agent: {template: {spec: {containers: [{name: agent, image: i, command: [a]}]}}}}}\n---\n"
        "{apiVersion: perdure.dev/v1alpha1, kind: AgentPool, metadata: {name: worker}, "
        "spec: {template: {spec: {containers: [{name: agent, image: i, command: [a]}]}}}}\n"
    )
    gateway.answers["POST /v1/namespaces/default/runs"] = run(name="daily", runId=CHILD_ID, state="Pending")
    result = call("submit", "runs.yaml")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == ["default/weekly is there already (Running)", "default/daily created"]
    puts = [what for what, _, _ in gateway.requests if what.startswith("PUT")]
    assert puts[0] == "PUT /v1/namespaces/default/pools/worker"
    inline = puts[1].rpartition("/")[2]
    assert inline.startswith("inline-")
    what, body, headers = gateway.last()
    assert what == "POST /v1/namespaces/default/runs"
    assert body == {"name": "daily", "labels": {"a": "b"}, "spec": {"agent": {"poolRef": {"name": inline}}}}
    assert headers["Idempotency-Key"] == "manifest:daily"


def test_submit_tells_the_fleet_where_the_files_are(call: Callable[..., Result], gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "pool.yaml").write_text(
        "apiVersion: perdure.dev/v1alpha1\nkind: AgentPool\nmetadata: { name: there }\n"
        "spec: { template: { spec: { containers: [{ name: agent, image: x, command: [python, agent.py] }] } } }\n"
    )
    assert call("submit", "elsewhere/pool.yaml").exit_code == 0
    assert StateDir(tmp_path / ".perdure").folders() == {"default/there": tmp_path / "elsewhere"}


@pytest.mark.parametrize(("state", "code"), [("Succeeded", 0), ("Failed", 1), ("Cancelled", 1)])
def test_submit_and_watch_ends_as_the_run_does(call: Callable[..., Result], gateway: FakeGateway, state: str, code: int) -> None:
    gateway.answers["POST /v1/namespaces/default/runs"] = run(name="one", state="Pending")
    gateway.answers[f"GET /v1/namespaces/default/runs/{RUN_ID}"] = run(name="one", state=state)
    gateway.answers[f"GET /v1/namespaces/default/runs/{RUN_ID}/events"] = {"items": EVENTS, "next": None}
    result = call("submit", "--pool", "worker", "--name", "one", "--input", '{"a": 1}', "--watch", "-o", "json")
    assert result.exit_code == code
    assert "leased by worker-3 (epoch 2)" in result.stderr
    assert json.loads(result.stdout)["state"] == state
    assert next(r for r in gateway.requests if r[0].startswith("POST"))[1] == {
        "name": "one",
        "spec": {"agent": {"poolRef": {"name": "worker"}}, "input": {"a": 1}},
    }


# ------------------------------------------------------------------------------------------------ exit codes


def test_not_found_is_3_and_says_what_to_do(call: Callable[..., Result]) -> None:
    result = call("why", "nobody")
    assert result.exit_code == 3
    hint = "Check namespace and name; `perdure get` lists the runs."
    assert result.stderr.startswith(f"error: there is no such run\n{hint}\nMeant was the `perdure dev` of ")
    assert result.stderr.endswith("/.perdure. For a cluster: --context NAME, or `kubectl agentrun`.\n")
    assert result.stdout == ""


@pytest.mark.parametrize(("status", "code"), [(400, 2), (401, 4), (403, 4), (409, 1), (413, 2), (500, 1), (503, 5)])
def test_answers_of_the_gateway(call: Callable[..., Result], gateway: FakeGateway, status: int, code: int) -> None:
    gateway.answers["POST /v1/namespaces/default/runs/weekly/pause"] = lambda _: problem(status, "some-code", "no", "Do this.")
    result = call("pause", "weekly")
    assert result.exit_code == code
    assert result.stderr.startswith("error: no\nDo this.\n")
    assert ("Meant was the `perdure dev`" in result.stderr) == (code in (3, 4, 5))


def test_an_answer_that_is_no_problem_json_is_shown(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = lambda _: web.Response(status=502, text="Bad Gateway")
    result = call("why", "weekly")
    assert result.exit_code == 5
    assert result.stderr.startswith("error: Bad Gateway\n")


@pytest.mark.parametrize(
    "words",
    [
        ("get", "--state", "sleeping"),
        ("submit",),
        ("submit", "no-such-file.yaml"),
        ("kill", "weekly", "-s", "HUP"),
        ("frobnicate",),
        ("signal", "weekly"),
        ("dev", "--once"),
        ("signal", "weekly", "go", "@nothing.json"),
        ("deliveries",),
        ("deliveries", "nightly", "--state", "lost"),
        ("deliveries", "nightly", "--limit", "0"),
        ("redrive", "nightly"),
        ("redrive", "nightly", "d-1", "--all"),
        ("fire", "nightly", "{"),
    ],
)
def test_wrong_use_is_2(call: Callable[..., Result], words: tuple[str, ...]) -> None:
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert result.stderr


def test_a_wrong_format_says_which_there_are(call: Callable[..., Result]) -> None:
    said = " ".join(call("get", "-o", "jsn").stderr.replace("│", " ").split())
    assert "Invalid value for '-o' / '--output': 'jsn' is not one of 'table', 'wide', 'json', 'yaml'." in said


def test_a_file_that_is_not_there_is_no_wrong_line(call: Callable[..., Result]) -> None:
    for words in (("submit", "nosuch.yaml"), ("dev", "-f", "nosuch.yaml")):
        result = call(*words)
        assert result.stderr == "error: nosuch.yaml: cannot be read: No such file or directory\nCheck the path; nothing was started.\n"


def test_a_gateway_that_is_gone_is_5(call: Callable[..., Result], tmp_path: Path) -> None:
    state = StateDir(tmp_path / ".perdure")
    state.write_session(Session(4711, "2026-11-21T12:00:00+00:00", ["http://127.0.0.1:9"], "t", "", "/tmp/x"))
    result = call("get")
    assert result.exit_code == 5
    assert "no gateway answers at http://127.0.0.1:9" in result.stderr
    assert "Is `perdure dev` (process 4711) still running?" in result.stderr


def test_without_a_session_it_says_how_to_get_one(call: Callable[..., Result], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / ".perdure")
    result = call("get")
    assert result.exit_code == 5
    assert "there is no current context" in result.stderr
    assert "no `perdure dev` was found from this folder upwards" in result.stderr
    assert "Start one here: `perdure dev -f FILE…`" in result.stderr


@pytest.mark.parametrize("crashed", [False, True])
def test_while_dev_starts_it_says_so(call: Callable[..., Result], tmp_path: Path, crashed: bool) -> None:
    """Also when an earlier session has left its addresses."""
    state = StateDir(tmp_path / ".perdure")
    if not crashed:
        state.end_session()
    state.acquire()
    result = call("get")
    assert result.exit_code == 5
    assert f"perdure dev (process {os.getpid()}) is starting; wait for its line `ready:`" in result.stderr


def test_dev_below_a_running_one_is_refused(
    call: Callable[..., Result], tmp_path: Path, below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(below)
    above = StateDir(tmp_path / ".perdure")
    above.acquire()
    result = call("dev")
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: a `perdure dev` is running in {tmp_path}\nGo there, or give this one a folder of its own with --state-dir .perdure.\n"
    )
    assert not (below / ".perdure").exists()
    assert call("dev", env={"PERDURE_STATE": str(tmp_path / "named")}).exit_code == 0
    assert call("dev", "--state-dir", ".perdure").exit_code == 0
    assert call("dev").exit_code == 0, "this folder has its own now"


def test_dev_below_a_stopped_one_begins(call: Callable[..., Result], below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(below)
    assert call("dev").exit_code == 0
    assert (below / ".perdure").exists()


def test_the_lock_of_a_process_that_has_ended_starts_nothing(call: Callable[..., Result], tmp_path: Path) -> None:
    lock = tmp_path / ".perdure" / "lock"
    lock.write_text(str(os.getpid()))
    os.utime(lock, (1, 1))
    assert call("get").exit_code == 0


def test_the_next_gateway_is_asked_when_one_is_gone(
    call: Callable[..., Result], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_SERVER", f"http://127.0.0.1:9,{gateway.url}")
    monkeypatch.setenv("PERDURE_TOKEN", "mine")
    assert call("get").exit_code == 0
    assert gateway.last()[2]["Authorization"] == "Bearer mine"


def test_an_answer_of_another_version_is_explained(call: Callable[..., Result], gateway: FakeGateway) -> None:
    gateway.answers["GET /v1/namespaces/default/runs/weekly"] = {"something": "else"}
    result = call("get", "weekly")
    assert result.exit_code == 1
    assert "same version" in result.stderr


def test_help_and_version(call: Callable[..., Result]) -> None:
    assert "Exit codes:" in call("--help").output
    assert call("--version").exit_code == 0
    assert "<bool>" not in call("--help").output + call("kill", "--help").output + call("submit", "--help").output


def test_the_command_that_goes_on_after_dev_repeats_what_matters() -> None:
    assert _again([Path("examples/shell")], Path(".perdure"), None, "default") == "perdure dev -f examples/shell"
    assert _again([Path("a b")], Path("/x"), 3, "n") == "perdure dev -f 'a b' --state-dir /x --max-pods 3 -n n"


def test_why_says_how_much_a_run_has_written_when_it_comes_near_to_its_limit(call: Callable[..., Result], gateway: FakeGateway) -> None:
    size = {"bytes": 900, "maxBytes": 1000, "storedBytes": 90, "maxStoredBytes": None}
    gateway.answers["GET /v1/namespaces/default/runs/weekly/why"] = {"name": "weekly", "state": "Running", "size": size}
    assert "it has written: 900 of 1000 bytes (90 %); 90 bytes as stored" in call("why", "weekly").stdout
