"""Wakes with agents: from before the signal is sent to the first line of agent code, in a warm pod of two real processes.

``agent-wake``: a single-use pod whose agent has done its imports and waits. ``fork-wake``: a pod that is reused, whose parent forks.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod

from bench.crew import Crew
from bench.samples import Sample
from bench.stage import Gateway, Stage
from bench.told import Told, listening
from bench.variants.variant import AtGateway
from bench.variants.wake import SIGNAL, WAIT, suspended

SINGLE_USE_A_ROUND = 6
ALONE_A_ROUND = 40


class _AgentWakes(AtGateway):
    """Suspends runs of a pool in which no agent is awake yet, then wakes them, ``at_once`` at a time."""

    def __init__(self, kind: str, what: str, at_once: int) -> None:
        self.name = f"{kind}-{at_once}"
        self.what = f"signal sent → agent code, {what}" + (f", {at_once} at once" if at_once > 1 else ", one at a time")
        self._at_once = at_once

    async def _woken(self, gateway: Gateway, told: Told, runs: list[str]) -> list[float]:
        sent: dict[str, float] = {}

        async def signal(run: str) -> None:
            sent[run] = time.time()
            await gateway.call("POST", f"runs/{run}/signals/{SIGNAL}")

        await asyncio.gather(*map(signal, runs))
        return [at - sent[run] for run, at in (await told.collect(len(runs))).items()]

    @abstractmethod
    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample: ...


class SingleUseWake(_AgentWakes):
    """Each wake uses up a pod, so there are few in a round, whatever ``seconds`` says."""

    def __init__(self) -> None:
        super().__init__("agent-wake", "single-use pod", 1)

    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample:
        crew = Crew(stage, self.name, reuse=False)
        await gateway.pool(self.name)
        latencies: list[float] = []
        try:
            async with listening() as (told, port):
                with stage.meter.measure() as usage:
                    for run in await suspended(gateway, self.name, [WAIT] * SINGLE_USE_A_ROUND, input={"port": port}):
                        await crew.grow(gateway, 1)
                        await crew.idle(gateway, 1)
                        with crew.explained():
                            latencies += await self._woken(gateway, told, [run])
                        await crew.ended()
        finally:
            await crew.close()
        return Sample(len(latencies), latencies, usage())


class ForkWake(_AgentWakes):
    def __init__(self, at_once: int) -> None:
        super().__init__("fork-wake", "fork per run", at_once)
        self._crew: Crew | None = None

    async def close(self) -> None:
        if self._crew is not None:
            await self._crew.close()

    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample:
        await gateway.pool(self.name, reuse=True)
        latencies: list[float] = []
        async with listening() as (told, port):
            left = await suspended(gateway, self.name, [WAIT] * max(ALONE_A_ROUND, self._at_once), input={"port": port})
            if self._crew is None:
                self._crew = Crew(stage, self.name, reuse=True)
                await self._crew.grow(gateway, self._at_once)
            crew = self._crew
            crew.go_on()
            try:
                await crew.idle(gateway, self._at_once)
                with stage.meter.measure() as usage:
                    end = time.monotonic() + seconds
                    while len(left) >= self._at_once and (time.monotonic() < end or not latencies):
                        with crew.explained():
                            latencies += await self._woken(gateway, told, [left.pop() for _ in range(self._at_once)])
                        await crew.idle(gateway, self._at_once)
            finally:
                crew.stop()
        await asyncio.gather(*(gateway.call("POST", f"runs/{run}/cancel") for run in left))
        return Sample(len(latencies), latencies, usage())
