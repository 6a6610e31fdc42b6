"""Steps through SDK and sidecar: each run has an agent process and a sidecar process of its own (fork per run), and one gateway for all."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from uuid import uuid4

import psutil

from bench.crew import SIDECARS, Crew
from bench.samples import Sample
from bench.stage import Gateway, Stage
from bench.told import listening
from bench.variants.variant import AtGateway

WARM_SECONDS = 0.5


class AgentSteps(AtGateway):
    def __init__(self, runs: int) -> None:
        self.name = f"sdk-{runs}"
        self.what = f"step through SDK and sidecar, {runs} run{'s' if runs > 1 else ''}, two processes each"
        self._runs = runs
        self._crew: Crew | None = None

    async def close(self) -> None:
        if self._crew is not None:
            await self._crew.close()

    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample:
        pool = self.name
        await gateway.pool(pool, reuse=True)
        if self._crew is None:
            self._crew = Crew(stage, pool, reuse=True)
            await self._crew.grow(gateway, self._runs)
        crew = self._crew
        crew.go_on()
        try:
            await crew.idle(gateway, self._runs)
            window = stage.folder / f"window-{uuid4().hex}"
            async with listening() as (told, port):
                await gateway.runs(pool, self._runs, input={"port": port, "window": str(window)})
                with crew.explained():
                    await told.collect(self._runs)
                opens = time.monotonic() + WARM_SECONDS
                _open(window, opens, opens + seconds)
                await asyncio.sleep(opens - time.monotonic())
                with stage.meter.measure() as usage:
                    await asyncio.sleep(opens + seconds - time.monotonic())
                with crew.explained():
                    runs = await told.collect(self._runs)
            memory = max(psutil.Process(pid).memory_info().rss for pid in stage.parts[SIDECARS]) / 2**20
            latencies = _results(window, list(runs))
            await crew.idle(gateway, self._runs)
        finally:
            crew.stop()
        return Sample(len(latencies), latencies, usage(), {"sidecarMiB": round(memory, 1)})


def _open(window: Path, opens: float, closes: float) -> None:
    """Appears at once and whole."""
    part = window.with_suffix(".part")
    part.write_text(json.dumps([opens, closes]))
    part.rename(window)


def _results(window: Path, runs: list[str]) -> list[float]:
    return [latency for run in runs for latency in json.loads(Path(f"{window}.{run}").read_text())]
