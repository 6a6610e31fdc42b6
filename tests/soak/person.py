"""Somebody who answers what the runs ask: after a while, and truthfully, by what the outside world has on record."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import aiohttp
from tests.harness.api import Refused
from tests.soak.load import Acks
from tests.soak.stack import SoakStack

from perdure.protocol import asked_about

LOOK_SECONDS = 1.0
SLOWEST_SECONDS = 3.0


class Person:
    def __init__(self, stack: SoakStack, world: str, acks: Acks, counts: Counter[str], seed: int) -> None:
        self._stack, self._world, self._acks, self._counts = stack, world, acks, counts
        self._chance = random.Random(f"person {seed}")
        self._thinking: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                found = await self._stack.call("GET", "/runs?state=Suspended&limit=1000")
                for run in found["items"]:
                    for wait in run["waitingFor"]:
                        key = asked_about(wait.get("name", ""))
                        if key is not None and wait["name"] not in self._thinking:
                            self._thinking.add(wait["name"])
                            group.create_task(self._answer(run["runId"], wait["name"], key))
                await asyncio.sleep(LOOK_SECONDS)

    async def _answer(self, run: str, question: str, key: str) -> None:
        await asyncio.sleep(self._chance.uniform(0.2, SLOWEST_SECONDS))
        async with self._stack.http.get(f"{self._world}/effects/{key}") as record:
            ref = (await record.json())["ref"] if record.status == 200 else None
        answer: dict[str, Any] = {"happened": ref is not None} | ({"response": ref} if ref is not None else {})
        try:
            await self._stack.call("POST", f"/runs/{run}/signals/{question}", answer, key=question)
            self._acks.write("answered", run=run, question=question, key=key, **answer)
            self._counts["questions answered"] += 1
        except Refused as refused:  # a receipt came late and has answered it, or the run was cancelled
            self._acks.write("refused", deed="answer", run=run, question=question, code=refused.code)


async def probe(stack: SoakStack, counts: dict[str, float]) -> None:
    """Asks again and again whether anybody answers; ``counts`` gets the longest time that nobody did. Until it is cancelled."""
    loop = asyncio.get_running_loop()
    counts["longest outage"] = 0.0
    while True:
        asked = loop.time()
        try:
            await stack.call("GET", "/runs?limit=1")
        except (aiohttp.ClientError, OSError):
            continue
        counts["longest outage"] = max(counts["longest outage"], loop.time() - asked)
        await asyncio.sleep(0.25)
