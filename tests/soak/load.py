"""The load of a soak: it creates the runs of the plan, does to them what people do, and writes down every answer that it got.

A request whose answer was lost is sent again under the same key until there is one; its answer is what counts. How many runs are under
way at a time is bounded, so a slow machine begins later what the plan has earlier, and at the end of the load leaves out the rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from tests.harness.api import Refused
from tests.soak.journey import Journey
from tests.soak.plan import Deed, Plan, Start
from tests.soak.stack import SPEC, SoakStack

UNDER_WAY = 40
LOOK_SECONDS = 0.5


class Acks:
    """What was acknowledged or refused, a line each, in the order in which it was heard."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **about: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, "at": time.time(), **about}) + "\n").encode())


class Load:
    def __init__(self, stack: SoakStack, plan: Plan, acks: Acks, counts: Counter[str]) -> None:
        self._stack, self._plan, self._acks, self._counts = stack, plan, acks, counts
        self._slots = asyncio.Semaphore(UNDER_WAY)
        self._under_way: dict[str, asyncio.Event] = {}

    async def run(self, began: float) -> None:
        """Returns when all that was begun has ended, and all that people do was done."""
        loop = asyncio.get_running_loop()
        until = began + self._plan.options.load_seconds
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._wishes(began))
                for start in self._plan.starts:
                    await asyncio.sleep(max(0.0, began + start.at - loop.time()))
                    try:
                        async with asyncio.timeout_at(until + 1.0):
                            await self._slots.acquire()
                    except TimeoutError:
                        break
                    group.create_task(self._one(start))
        finally:
            watch.cancel()

    async def _one(self, start: Start) -> None:
        name, pool = start.journey.path, start.pool
        body = {"name": name, "spec": {"agent": {"poolRef": {"name": pool}}, "input": msgspec.to_builtins(start.journey), **SPEC}}
        ended = self._under_way[name] = asyncio.Event()
        try:
            for _ in range(1 + start.twice):
                run = (await self._stack.call("POST", "/runs", body, key=name))["runId"]
                self._acks.write("created", name=name, run=run)
            self._counts["runs begun"] += 1
            created = asyncio.get_running_loop().time()
            for deed in start.deeds:
                await asyncio.sleep(max(0.0, created + deed.at - asyncio.get_running_loop().time()))
                await self._do(name, run, deed)
            await ended.wait()
        finally:
            self._under_way.pop(name, None)
            self._slots.release()

    async def _do(self, name: str, run: str, deed: Deed) -> None:
        about: dict[str, Any] = {"name": name, "run": run}
        try:
            if deed.what == "signal":
                about |= {"signal": deed.name, "id": deed.id, "amount": deed.amount}
                said = await self._stack.call("POST", f"/runs/{run}/signals/{deed.name}", {"amount": deed.amount}, key=deed.id)
                self._acks.write("signal", **about, seq=said["seq"], duplicate=said["duplicate"])
                self._counts["signals sent"] += 1
            else:
                said = await self._stack.call("POST", f"/runs/{run}/{deed.what}")
                self._acks.write(deed.what, **about)
        except Refused as refused:
            self._acks.write("refused", deed=deed.what, **about, code=refused.code)
            self._counts["signals sent"] += deed.what == "signal"

    async def _wishes(self, began: float) -> None:
        for at, journey in self._plan.wishes:
            await asyncio.sleep(max(0.0, began + at - asyncio.get_running_loop().time()))
            for _ in range(2):
                await self._wish(journey)

    async def _wish(self, journey: Journey) -> None:
        said = await self._stack.call("POST", "/triggers/wish/emit", msgspec.to_builtins(journey), key=journey.path)
        self._acks.write("emitted", name=journey.path, delivery=said["delivery"], duplicate=said["duplicate"])

    async def _watch(self) -> None:
        """Looks which runs have ended, past everything: only to know when there is room for others."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            rows = await self._stack.sql(
                "select name from perdure.runs where name = any ($1) and finished_at is not null", list(self._under_way)
            )
            for row in rows:
                if (ended := self._under_way.get(row["name"])) is not None:
                    ended.set()
