"""What everything runs on: one Postgres server with fsync on, a database for each user of it, and the gateway as a process.

The DSNs are TCP on loopback, as on a cluster, and the same for everybody who is compared.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import aiohttp
import asyncpg

from bench.meter import Meter
from perdure_operator.gateway.auth import LocalTokens, load_secret, make_secret
from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.local.pods import free_port
from perdure_operator.store.migrate import migrate

NAMESPACE = "default"
START_SECONDS = 20.0
RUNS_A_REQUEST = 500


class BenchError(Exception):
    """A benchmark could not be carried out; the message says which part failed."""


@dataclass(frozen=True)
class Gateway:
    """A gateway process. ``http`` is a person's session at it."""

    pid: int
    host: str
    port: int
    http: aiohttp.ClientSession
    tokens: LocalTokens

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def pod_token(self, pod: UUID, pool: str) -> str:
        return self.tokens.issue_pod(pod, f"{NAMESPACE}/{pool}")

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Raises BenchError with the gateway's words when the answer is no success."""
        async with self.http.request(method, f"{self.url}/v1/namespaces/{NAMESPACE}/{path}", json=body) as answer:
            if answer.status >= 300:
                raise BenchError(f"{method} {path}: {answer.status} {await answer.text()}")
            return await answer.json()

    async def pool(self, name: str, *, reuse: bool = False) -> None:
        """A pool whose pods are started by the benchmark itself."""
        spec: dict[str, Any] = {
            "template": {"spec": {"containers": [{"name": "agent", "image": "bench"}]}},
            "capacity": {"maxPods": 10_000},
            "podReuse": {"mode": "ForkPerRun" if reuse else "Never"},
        }
        await self.call("PUT", f"pools/{name}", {"spec": spec})

    async def runs(self, pool: str, count: int, *, input: Any = None) -> list[str]:
        """Creates runs; gives their ids."""
        spec = {"agent": {"poolRef": {"name": pool}}, "input": input}
        made: list[str] = []
        while len(made) < count:
            part = min(RUNS_A_REQUEST, count - len(made))
            made += [run["runId"] for run in (await self.call("POST", "runs", {"runs": [{"spec": spec}] * part}))["items"]]
        return made


class Stage:
    """Owns the server and the folder. ``parts`` are the process ids that the meter watches, by part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[str, list[int]] = {}
        self.meter = Meter(lambda: self.parts)
        self._server = EmbeddedPostgres(folder / "postgres", settings={"max_connections": 400})
        self._secret = folder / "secret"
        self._port = free_port()

    async def __aenter__(self) -> Self:
        await self._server.start()
        make_secret(self._secret)
        assert self._server.pid is not None
        self.parts["postgres"] = [self._server.pid]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()

    def dsn(self, database: str) -> str:
        """TCP, with the password."""
        return urlunsplit(urlsplit(self._server.tcp_dsn)._replace(path=f"/{database}"))

    async def database(self, name: str, *, migrated: bool = True) -> str:
        """Makes a database and gives its DSN."""
        connection = await asyncpg.connect(self.dsn("postgres"))
        try:
            await connection.execute(f'create database "{name}"')
        finally:
            await connection.close()
        if migrated:
            await migrate(self.dsn(name))
        return self.dsn(name)

    async def settle(self, database: str) -> None:
        """After bulk loading: statistics, visibility and dirty pages are not left for the measurement."""
        connection = await asyncpg.connect(self.dsn(database), command_timeout=600)
        try:
            await connection.execute("vacuum analyze")
            await connection.execute("checkpoint")
        finally:
            await connection.close()

    @asynccontextmanager
    async def gateway(self, database: str, *, lease_seconds: float = 30.0) -> AsyncIterator[Gateway]:
        """A gateway process on that database, ready to serve; one at a time, always at the same address."""
        env = os.environ | {
            "PERDURE_DSN": self.dsn(database),
            "PERDURE_LISTEN": f"127.0.0.1:{self._port}",
            "PERDURE_TOKEN_SECRET_FILE": str(self._secret),
            "PERDURE_LEASE_SECONDS": str(lease_seconds),
            "PERDURE_LOG_LEVEL": "warning",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "perdure_operator.main", "gateway", env=env, stdout=asyncio.subprocess.DEVNULL
        )
        self.parts["gateway"] = [process.pid]
        tokens = LocalTokens(load_secret(self._secret))
        person = {"Authorization": "Bearer " + tokens.issue_person("bench", verbs=["*"], namespaces=["*"])}
        try:
            async with aiohttp.ClientSession(headers=person, connector=aiohttp.TCPConnector(limit=300)) as http:
                gateway = Gateway(process.pid, "127.0.0.1", self._port, http, tokens)
                await _ready(gateway, process)
                yield gateway
        finally:
            del self.parts["gateway"]
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _ready(gateway: Gateway, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_SECONDS):
        while process.returncode is None:
            try:
                async with gateway.http.get(f"{gateway.url}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)
    raise BenchError(f"the gateway ended with code {process.returncode}; its words are above")
