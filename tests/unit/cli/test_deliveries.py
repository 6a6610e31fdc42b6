"""The commands about triggers against a gateway that the test plays: what they send, what they print, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from tests.unit.cli.fake_gateway import FakeGateway, problem
from typer.testing import CliRunner, Result

from perdure_operator.cli.main import app

Call = Callable[..., Result]
BASE = "/v1/namespaces/default/triggers/nightly"
IDS = [f"01a2009f-c5b4-767b-b506-659dd27ac9f{n}" for n in range(3)]


def delivery(id: str, **changes: Any) -> dict[str, Any]:
    return {
        "delivery_id": id, "dedup_key": f"webhook:default/nightly:{id[-1]}", "source": "webhook", "state": "DEAD",
        "fire_at": "2026-11-21T12:00:00+00:00", "attempts": 5, "message": "there is no AgentPool p", "run": None, "superseded_by": None,
        "created_at": "2026-11-21T12:00:00+00:00", "a_field_of_tomorrow": 1, **changes,
    }  # fmt: skip


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """It has three dead deliveries, and gives two a page."""

    def page(request: web.Request) -> dict[str, Any]:
        older = [id for id in reversed(IDS) if id < request.query.get("before", "f")]
        found = older[: min(2, int(request.query["limit"]))]
        return {"items": [delivery(id) for id in found], "next": found[-1] if len(found) < len(older) else None}

    with FakeGateway() as found:
        found.answers[f"GET {BASE}/deliveries"] = page
        for id in IDS:
            found.answers[f"POST {BASE}/deliveries/{id}/redrive"] = {"delivery": id}
        found.answers[f"POST {BASE}/emit"] = {"delivery": IDS[0], "duplicate": False}
        yield found


@pytest.fixture
def call(gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    for name in ("PERDURE_STATE", "PERDURE_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERDURE_SERVER", gateway.url)
    monkeypatch.setenv("PERDURE_TOKEN", "the-token")
    return lambda *words, **more: CliRunner().invoke(app, list(words), **more)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


def posted(gateway: FakeGateway) -> list[str]:
    return [what.removeprefix(f"POST {BASE}/") for what, _, _ in gateway.requests if what.startswith("POST")]


def test_deliveries_are_listed_the_youngest_first(call: Call, gateway: FakeGateway) -> None:
    result = call("deliveries", "nightly", "--state", "dead")
    assert result.exit_code == 0, result.stderr
    header, *rows = result.stdout.splitlines()
    assert cells(header) == ["ID", "SOURCE", "STATE", "AGE", "ATTEMPTS", "RUN", "MESSAGE"]
    assert [cells(row)[0] for row in rows] == IDS[::-1]
    first = cells(rows[0])
    assert [*first[1:3], *first[4:]] == ["webhook", "DEAD", "5", "there is no AgentPool p"]
    assert [sent["?state"] for _, _, sent in gateway.requests] == ["DEAD", "DEAD"]
    assert result.stderr == ""


def test_deliveries_up_to_a_limit_that_says_when_there_are_more(call: Call, gateway: FakeGateway) -> None:
    result = call("deliveries", "default/nightly", "--limit", "1", "-o", "json")
    assert json.loads(result.stdout) == {"items": [delivery(IDS[2])]}
    assert result.stderr == "there are older ones: --limit shows more\n"
    assert len(gateway.requests) == 1
    assert call("deliveries", "nightly", "--limit", "3").stderr == ""


def test_deliveries_wide_and_yaml(call: Call, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {BASE}/deliveries"] = {"items": [delivery(IDS[0], state="FAILED", superseded_by=IDS[1])], "next": None}
    wide = call("deliveries", "nightly", "-o", "wide").stdout
    assert "webhook:default/nightly:0" in wide
    assert IDS[1] in wide
    assert yaml.safe_load(call("deliveries", "nightly", "-o", "yaml").stdout)["items"][0]["superseded_by"] == IDS[1]


def test_no_deliveries(call: Call, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {BASE}/deliveries"] = {"items": [], "next": None}
    for words, said in (((), "no deliveries"), (("--state", "claimed"), "no claimed deliveries")):
        result = call("deliveries", "nightly", *words)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"{said} of trigger default/nightly\n")
    result = call("redrive", "nightly", "--all")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no dead deliveries of trigger default/nightly\n")
    assert json.loads(call("redrive", "nightly", "--all", "-o", "json").stdout) == {"items": []}


def test_redrive_of_some(call: Call, gateway: FakeGateway) -> None:
    result = call("redrive", "nightly", IDS[0], IDS[2])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [f"delivery {id} of default/nightly is tried again" for id in (IDS[0], IDS[2])]
    assert posted(gateway) == [f"deliveries/{id}/redrive" for id in (IDS[0], IDS[2])]


def test_redrive_of_all_passes_over_what_is_dead_no_more(call: Call, gateway: FakeGateway) -> None:
    gone = f"POST {BASE}/deliveries/{IDS[1]}/redrive"
    gateway.answers[gone] = lambda _: problem(404, "delivery-not-found", "no dead delivery", "List them.")
    result = call("redrive", "nightly", "--all", "-o", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"items": [{"delivery": IDS[2]}, {"delivery": IDS[0]}]}
    result = call("redrive", "nightly", IDS[1])
    assert (result.exit_code, result.stdout) == (3, "")
    assert "`perdure deliveries TRIGGER --state dead` lists them" in result.stderr


@pytest.mark.parametrize(
    ("words", "sent"), [((), None), (('{"week": 48}',), {"week": 48}), (("-",), [1]), (("@input.json",), {"from": "file"})]
)
def test_fire_sends_json(call: Call, gateway: FakeGateway, words: tuple[str, ...], sent: Any) -> None:
    Path("input.json").write_text('{"from": "file"}')
    result = call("fire", "nightly", *words, "--id", "f-1", input="[1]")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"default/nightly fired (delivery {IDS[0]})\n"
    assert gateway.last()[1] == sent
    assert gateway.last()[2]["Idempotency-Key"] == "f-1"


def test_fire_says_that_it_had_fired_and_has_an_id_of_its_own(call: Call, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {BASE}/emit"] = {"delivery": IDS[0], "duplicate": True}
    assert call("fire", "nightly").stdout == f"default/nightly had fired so already (delivery {IDS[0]})\n"
    assert json.loads(call("fire", "nightly", "-o", "json").stdout)["duplicate"]
    assert len({sent["Idempotency-Key"] for _, _, sent in gateway.requests}) == 2


@pytest.mark.parametrize("words", [("deliveries", "nightly"), ("redrive", "nightly", "--all"), ("fire", "nightly")], ids=" ".join)
@pytest.mark.parametrize(("status", "code", "exit_code"), [(404, "trigger-not-found", 3), (403, "forbidden", 4)])
def test_the_gateway_says_no(call: Call, gateway: FakeGateway, words: tuple[str, ...], status: int, code: str, exit_code: int) -> None:
    for what in (f"GET {BASE}/deliveries", f"POST {BASE}/emit"):
        gateway.answers[what] = problem(status, code, "there is no Trigger default/nightly", "Check namespace and name.")
    result = call(*words)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith("error: there is no Trigger default/nightly\nCheck namespace and name.\n")
