"""One test's whole Perdure: a database, the gateways on it, pods and people. Made by the fixture ``cluster``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import aiohttp
import asyncpg
from tests.harness.api import Api
from tests.harness.gateways import LEASE_SECONDS, Gateway, Zygote, free_port
from tests.harness.pods import FakePod

from perdure import protocol as wire
from perdure_operator.gateway.auth import LocalTokens, make_secret
from perdure_operator.store.store import Store

POOL: dict[str, Any] = {"template": {"spec": {"containers": [{"name": "agent", "image": "agent:1"}]}}}


class Cluster:
    """``pg``: a plain connection to the database. ``store``: the adapter, for what no public interface shows. ``expected_errors``: words
    of the errors that this test makes the gateways log."""

    def __init__(self, dsn: str, folder: Path, zygote: Zygote, http: aiohttp.ClientSession, store: Store, pg: asyncpg.Connection) -> None:
        self.dsn = dsn
        self.store = store
        self.pg = pg
        self.http = http
        self.gateways: list[Gateway] = []
        self.pods: list[FakePod] = []
        self.expected_errors: list[str] = []
        self.folder = folder
        self.secret = folder / "secret"
        self.tokens = LocalTokens(make_secret(self.secret))
        self._zygote = zygote

    async def start(self, *names: str, lease_seconds: float = LEASE_SECONDS, **more: str) -> list[Gateway]:
        """Starts gateways of these names, all at once. ``more``: of their environment."""
        await self.store.upsert_pool("default", "p", POOL, 10_000)
        started = []
        for name in names:
            port = free_port()
            env = {
                "PERDURE_DSN": self.dsn,
                "PERDURE_LISTEN": f"127.0.0.1:{port}",
                "PERDURE_GATEWAY_NAME": name,
                "PERDURE_TOKEN_SECRET_FILE": str(self.secret),
                "PERDURE_LEASE_SECONDS": str(lease_seconds),
                "PERDURE_LOG_LEVEL": "info",
                **more,
            }
            started.append(Gateway(name, port, env, self.folder / f"{name}.log", self._zygote, self.http))
        self.gateways += started
        await asyncio.gather(*(gateway.start() for gateway in started))
        return started

    async def one(self, **options: Any) -> tuple[Gateway, Api]:
        """One gateway, and a person at it who may do everything."""
        [gateway] = await self.start("a", **options)
        return gateway, self.api(gateway)

    def api(self, gateway: Gateway, *, verbs: Sequence[str] = ("*",), of: Sequence[str] = ("*",), namespace: str = "default") -> Api:
        """Somebody who may do ``verbs`` in the namespaces ``of``."""
        return Api(gateway, self.tokens.issue_person("tester", verbs=verbs, namespaces=of), namespace)

    def new_pod(self, *, pool: str = "default/p", reuse: bool = False, pod_id: UUID | None = None) -> FakePod:
        """A pod that is not connected yet."""
        pod_id = pod_id or uuid4()
        pod = FakePod(self.tokens.issue_pod(pod_id, pool), pod_id, reuse=reuse)
        self.pods.append(pod)
        return pod

    async def pod(self, gateway: Gateway, **options: Any) -> FakePod:
        """A pod that is connected and welcome."""
        pod = await self.new_pod(**options).connect(gateway)
        await pod.next(wire.Welcome)
        return pod

    async def holder(self, gateway: Gateway, **options: Any) -> FakePod:
        """A pod that holds a run."""
        pod = await self.pod(gateway, **options)
        await pod.lease()
        return pod

    async def reconnect(self) -> None:
        """After a restart of Postgres: a new ``pg``."""
        self.pg.terminate()
        self.pg = await asyncpg.connect(self.dsn)

    async def close(self) -> None:
        await asyncio.gather(*(pod.cut() for pod in self.pods))
        await asyncio.gather(*(gateway.kill() for gateway in self.gateways))


@asynccontextmanager
async def cluster_on(dsn: str, folder: Path, zygote: Zygote, store: Store) -> AsyncIterator[Cluster]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)) as http:
        pg = await asyncpg.connect(dsn)
        cluster = Cluster(dsn, folder, zygote, http, store, pg)
        try:
            yield cluster
        finally:
            await cluster.close()
            cluster.pg.terminate()
