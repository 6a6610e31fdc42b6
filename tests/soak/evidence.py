"""All that the checker judges by: the outside world's log, what was acknowledged to the load, and what the public API shows in the end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.stack import Stack
from tests.soak.journey import Journey

Json = dict[str, Any]
AT_ONCE = 8
DECIDE = ("activity.started", "activity.resolved", "signal.received", "run.cancel_requested")
"""Kinds of events by which the checker decides."""


@dataclass
class Shown:
    """One run as the public API shows it."""

    view: Json
    events: list[Json]
    journal: list[Json]

    @property
    def name(self) -> str:
        return str(self.view["name"])

    @property
    def id(self) -> str:
        return str(self.view["runId"])

    def of(self, kind: str) -> list[Json]:
        return [event for event in self.events if event["kind"] == kind]


@dataclass
class Evidence:
    """``journeys``: what each run that was begun was told to do, by name; ``deliveries``: by trigger."""

    journeys: dict[str, Journey]
    world: list[Json]
    acks: list[Json]
    runs: list[Shown]
    deliveries: dict[str, list[Json]] = field(default_factory=dict)

    def acked(self, what: str) -> list[Json]:
        return [ack for ack in self.acks if ack["what"] == what]

    def happened(self, what: str) -> list[Json]:
        return [line for line in self.world if line["what"] == what]


def lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def gather(stack: Stack, journeys: dict[str, Journey], world: Path, acks: Path) -> Evidence:
    """Reads everything; the runs as a person reads them, page by page."""
    found: list[Json] = []
    after = ""
    while True:
        page = await stack.call("GET", f"/runs?limit=1000{after}")
        found += page["items"]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    room = asyncio.Semaphore(AT_ONCE)

    async def shown(run: str) -> Shown:
        async with room:
            view = await stack.call("GET", f"/runs/{run}")
            events = await stack.call("GET", f"/runs/{run}/events?limit=5000")
            journal = await stack.call("GET", f"/runs/{run}/journal")
            return Shown(view, events["items"], journal["items"])

    runs = list(await asyncio.gather(*(shown(run["runId"]) for run in found)))
    deliveries = {name: (await stack.call("GET", f"/triggers/{name}/deliveries?limit=1000"))["items"] for name in ("beat", "wish")}
    return Evidence(journeys, lines(world), lines(acks), runs, deliveries)
