"""``python -m bench.registration``: the operator with many AgentRuns, on a real API server without a node: how fast it makes them runs of
the store, how fast their statuses follow, and how much memory it has then.

The resources are there before the operator: what is measured is its own speed, not that of whoever creates them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import psutil
from rich.console import Console
from rich.table import Table
from tests.cluster import apiserver
from tests.cluster.apiserver import ApiServer
from tests.cluster.paths import ROOT

from bench.__main__ import temporary_folder
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, KubeClient, KubeSettings
from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.store.migrate import migrate

NAMESPACE = "default"
AIM_RATE, AIM_MEBIBYTES = 200.0, 256.0
PARALLEL = 32
PATIENCE_SECONDS = 600.0
QUIET_SECONDS = 10.0
POOL = {
    "metadata": {"name": "p"},
    "spec": {
        "template": {"spec": {"containers": [{"name": "agent", "image": "agent"}]}},
        "capacity": {"minIdle": 0, "maxIdle": 0, "maxPods": 1},
    },
}


async def main(count: int) -> None:
    console = Console()
    with apiserver.running() as server, temporary_folder() as folder:
        async with EmbeddedPostgres(folder / "postgres", settings={"max_connections": 100}) as postgres:
            dsn = postgres.tcp_dsn
            await migrate(dsn)
            started = time.monotonic()
            await create(server, count)
            console.print(f"{count:,} AgentRuns created, {count / (time.monotonic() - started):,.0f} a second")
            pg = await asyncpg.connect(dsn)
            try:
                async with operator(server, dsn, folder) as process:
                    await measure(console, pg, process, count)
            finally:
                await pg.close()


async def create(server: ApiServer, count: int) -> None:
    definitions = [f"--filename={file}" for file in sorted((ROOT / "crds").glob("*.yaml"))]
    server.kubectl("apply", *definitions)
    server.kubectl("wait", "--for=condition=Established", "crd", "--all")
    async with await KubeClient.connect(str(server.kubeconfig), settings=KubeSettings(rate=10_000, burst=10_000)) as kube:
        await kube.create(AGENTPOOLS, NAMESPACE, POOL)
        slots = asyncio.Semaphore(PARALLEL)

        async def one(n: int) -> None:
            async with slots:
                spec = {"agent": {"poolRef": {"name": "p"}}, "input": {"n": n}}
                await kube.create(AGENTRUNS, NAMESPACE, {"metadata": {"name": f"run-{n}"}, "spec": spec})

        await asyncio.gather(*(one(n) for n in range(count)))


@asynccontextmanager
async def operator(server: ApiServer, dsn: str, folder: Path) -> AsyncIterator[psutil.Process]:
    env = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PERDURE_DSN": dsn, "PERDURE_SIDECAR_IMAGE": "sidecar",
           "PERDURE_GATEWAY_URL": "https://gateway", "PERDURE_INSTALLATION": "bench"}  # fmt: skip
    with (folder / "operator.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "perdure_operator.main", "operator", env=env, stdout=log, stderr=log
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            if process.returncode is None:
                process.terminate()
            code = await process.wait()
            if code:
                sys.stderr.write((folder / "operator.log").read_text()[-3000:])


async def measure(console: Console, pg: asyncpg.Connection, process: psutil.Process, count: int) -> None:
    most = 0.0

    async def seconds(look: Callable[[], Awaitable[int]]) -> float:
        nonlocal most
        begun = time.monotonic()
        while await look() < count:
            if not process.is_running() or time.monotonic() - begun > PATIENCE_SECONDS:
                raise SystemExit("the operator has ended, or does not get on")
            most = max(most, _mebibytes(process))
            await asyncio.sleep(0.1)
        return time.monotonic() - begun

    async def leads() -> int:
        return count * int(await pg.fetchval("select count(*) from perdure.leaders"))

    async def registered() -> int:
        return int(await pg.fetchval("select count(*) from perdure.runs"))

    async def told() -> int:
        return int(await pg.fetchval("select count(*) from perdure.resources where projected_seq >= changed_seq"))

    await seconds(leads)
    begun = time.monotonic()
    first = await seconds(registered)
    await seconds(told)
    all_told = time.monotonic() - begun
    used = sum(process.cpu_times()[:2])
    await asyncio.sleep(QUIET_SECONDS)
    cpu = process.cpu_percent(QUIET_SECONDS)
    rows = [
        ("registered, a second", f"{count / first:,.0f}", f"≥ {AIM_RATE:,.0f}"),
        ("registered and status written, a second", f"{count / all_told:,.0f}", ""),
        ("CPU of the operator a run, its own start included, ms", f"{used / count * 1000:.1f}", ""),
        ("memory, most, MiB", f"{most:,.0f}", ""),
        ("memory, at rest, MiB", f"{_mebibytes(process):,.0f}", f"≤ {AIM_MEBIBYTES:,.0f}"),
        ("CPU at rest, % of a core", f"{cpu:.1f}", ""),
    ]
    table = Table(f"operator with {count:,} AgentRuns", "measured", "aim")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _mebibytes(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.registration", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    return parser.parse_args(given)


if __name__ == "__main__":
    asyncio.run(main(arguments().runs))
