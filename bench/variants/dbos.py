"""The same steps by DBOS, on the same Postgres. Its library is in the process that runs the workflows: no gateway, no hop."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from bench.samples import Sample
from bench.stage import BenchError, Stage
from bench.variants.variant import AtPostgres

WARM_SECONDS = 0.5
ANSWER_SECONDS = 60.0
PART = "dbos"


class Worker:
    """The process, shared by the variants that use it. It lives from the first sample of a round to the end of the benchmark."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, stage: Stage) -> None:
        if self.process is not None:
            return
        url = (await stage.database("dbos", migrated=False)).partition("?")[0]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.dbos_worker", url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26
        )
        await self.expect("ready")

    async def stop(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            await self.process.wait()
            self.process = None

    async def order(self, **order: float) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self.process.stdin.drain()

    async def line(self) -> Any:
        assert self.process is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(ANSWER_SECONDS):
            line = await self.process.stdout.readline()
        if not line:
            raise BenchError(f"the DBOS process ended with code {await self.process.wait()}; its words are above")
        return msgspec.json.decode(line)

    async def expect(self, word: str) -> None:
        if (said := await self.line()) != word:
            raise BenchError(f"the DBOS process said {said!r} where {word!r} was due")


class DbosSteps(AtPostgres):
    def __init__(self, worker: Worker, runs: int) -> None:
        self.name = f"dbos-{runs}"
        self.what = f"DBOS step, {runs} workflow{'s' if runs > 1 else ''} at once"
        self._worker = worker
        self._runs = runs

    async def prepare(self, stage: Stage) -> None:
        await self._worker.start(stage)

    async def close(self) -> None:
        await self._worker.stop()

    async def sample(self, stage: Stage, seconds: float) -> Sample:
        worker = self._worker
        assert worker.process is not None
        stage.parts[PART] = [worker.process.pid]
        await worker.order(runs=self._runs, warm=WARM_SECONDS, seconds=seconds)
        await worker.expect("open")
        with stage.meter.measure() as usage:
            counted = await worker.line()
        await worker.expect("over")
        del stage.parts[PART]
        return Sample(len(counted["latencies"]), counted["latencies"], usage())
