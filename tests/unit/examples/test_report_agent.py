"""The report's durability in memory: killed at every commit point, it comes to the same end and does everything once."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from examples.report import agent, deliver, extract
from examples.report.model import Report, Summary
from examples.report.summarise import summarise_document

from perdure.testing import Provider, Simulation, kill_everywhere

TEXT = "Title\n\nWater runs downhill. Fire does not. Water puts out fire, and fire boils water."
DOCUMENTS = ("a.txt", "b.txt")
INPUT = {"title": "Two", "documents": DOCUMENTS, "to": "board@example.org", "rehearseCrashSeconds": 30}


class World:
    """Where the agent's effects go: one provider a kind."""

    def __init__(self) -> None:
        self.store, self.mail, self.webhook = Provider(), Provider(), Provider()

    @property
    def counts(self) -> list[int]:
        return [len(provider.calls) for provider in (self.store, self.mail, self.webhook)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[World]:
    """The last one is the one of the simulation at hand."""
    worlds = [World()]
    places = {deliver.STORE_URL: "store", deliver.MAILBOX_URL: "mail", deliver.WEBHOOK_URL: "webhook"}

    def provider(url: str) -> Provider:
        found: Provider = next(getattr(worlds[-1], name) for place, name in places.items() if url.startswith(place))
        return found

    async def http(_method: str, url: str, key: str, **_body: Any) -> deliver.Receipt:
        provider(url).act(key)
        return deliver.Receipt(key)

    async def ask(url: str, key: str) -> deliver.Receipt | None:
        return deliver.Receipt(key) if provider(url).find(key) else None

    async def fetch(_name: str, _sha256: str) -> bytes:
        return b"%PDF"

    def typeset(_title: str, summaries: list[Summary], _at: datetime) -> bytes:
        return " ".join(summary.title for summary in summaries).encode()

    monkeypatch.setattr(deliver, "_http", http)
    monkeypatch.setattr(deliver, "_ask", ask)
    monkeypatch.setattr(deliver, "_fetch", fetch)
    monkeypatch.setattr(deliver, "_submit", lambda message: worlds[-1].mail.act(str(message["Message-ID"])))
    monkeypatch.setattr(agent, "typeset", typeset)
    monkeypatch.setattr(extract, "DOCUMENTS", tmp_path)
    for name in DOCUMENTS:
        (tmp_path / name).write_text(TEXT)
    return worlds


def simulation() -> Simulation:
    return Simulation(agent.report, INPUT, agents={"summarise": summarise_document})


def test_it_waits_without_a_process_and_goes_on_when_approved(world: list[World]) -> None:
    sim = simulation().run()
    assert sim.suspended
    assert world[-1].counts == [1, 0, 0]
    sim.signal("approved", {"by": "Ada"}).run()
    assert world[-1].counts == [1, 1, 1]
    assert sim.result_as(Report).approved_by == "Ada"


@pytest.mark.parametrize(("payload", "name"), [({"by": "Ada"}, "Ada"), ("Ada", "Ada"), (None, "somebody"), ({"x": 1}, "somebody")])
def test_whatever_a_person_sends_is_an_approval(world: list[World], payload: object, name: str) -> None:
    assert simulation().signal("approved", payload).run().result_as(Report).approved_by == name


def test_killed_anywhere_it_does_everything_once(world: list[World]) -> None:
    def build() -> Simulation:
        world.append(World())
        return simulation().signal("approved", {"by": "Ada"}, after=60)

    def check(sim: Simulation) -> None:
        assert world[-1].counts == [1, 1, 1]
        assert sim.kinds().count("child.spawned") == 2

    report = kill_everywhere(build, check, pairs=20)
    assert report.commits > 15
