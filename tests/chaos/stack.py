"""A whole Perdure of one's own, to break: Postgres, two gateways and a fleet, all real processes, and the world outside.

    person (this process) ──HTTP──▶ gateway a, b ──▶ Postgres (durable)
    sink (this process) ◀──HTTP── agent ──▶ sidecar ──▶ gateway a, b

Each gateway comes to Postgres as a role of its own, so that it can be seen whose transaction it is that stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import aiohttp
import asyncpg
import msgspec
from tests.chaos.breakpoints import SETUP
from tests.chaos.sink import Sink, sink
from tests.harness.api import Api, Refused, View
from tests.harness.fixtures import described
from tests.harness.gateways import Gateway, Zygote, free_port

from perdure_operator.domain.errors import Unavailable
from perdure_operator.gateway.auth import LocalTokens, make_secret
from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.local.fleet import Fleet
from perdure_operator.local.pods import LocalPods
from perdure_operator.local.processes import Leash, WorkerPod
from perdure_operator.local.state import StateDir
from perdure_operator.store.errors import translated
from perdure_operator.store.migrate import migrate
from perdure_operator.store.store import Store

T = TypeVar("T")

LEASE_SECONDS = 2.0
PATIENCE = 60.0
AGENTS = Path(__file__).with_name("agents.py")
RETRY = {"maxRetries": 5, "backoffSeconds": 0, "maxLosses": 10}


async def seen(look: Callable[[], Awaitable[T]], *, every: float = 0.01) -> T:
    """The first true value that there is to see. Looks for as long as a test is patient."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if found := await look():
                return found
            await asyncio.sleep(every)


class Stack:
    def __init__(self, postgres: EmbeddedPostgres, store: Store, http: aiohttp.ClientSession, sink: Sink, folder: Path) -> None:
        self.postgres = postgres
        self.store = store
        self.sink = sink
        self.http = http
        self.folder = folder
        self.state = StateDir(folder / "state")
        self.state.create()
        self.gateways: dict[str, Gateway] = {}
        self.said: list[str] = []
        self.tokens = LocalTokens(make_secret(folder / "secret"))
        self.breaking = asyncio.Lock()
        """Held while Postgres or a gateway is down or stands still: one such fault at a time."""
        self._person = self.tokens.issue_person("chaos", verbs=["*"], namespaces=["*"])
        self._sql: asyncpg.Connection | None = None
        self._sql_lock = asyncio.Lock()
        self.fleet: Fleet

    # ------------------------------------------------------------------------------------------------ parts

    async def start_gateways(self, zygote: Zygote, names: Sequence[str], lease_seconds: float) -> None:
        for name in names:
            await self.sql(f"create role gateway_{name} superuser login")
            port = free_port()
            env = {
                "PERDURE_DSN": self.postgres.dsn.replace("postgres@", f"gateway_{name}@"),
                "PERDURE_LISTEN": f"127.0.0.1:{port}",
                "PERDURE_GATEWAY_NAME": name,
                "PERDURE_TOKEN_SECRET_FILE": str(self.folder / "secret"),
                "PERDURE_LEASE_SECONDS": str(lease_seconds),
            }
            self.gateways[f"gateway_{name}"] = Gateway(name, port, env, self.folder / f"{name}.log", zygote, self.http)
        await asyncio.gather(*(gateway.start() for gateway in self.gateways.values()))

    def start_fleet(self, leash: Leash, *, limit: int) -> asyncio.Task[None]:
        starter = LocalPods(
            self.state, leash=leash, tokens=self.tokens, gateways=[gateway.url for gateway in self.gateways.values()],
            runtime_dir=self.folder, environ=os.environ, say=self.said.append,
        )  # fmt: skip
        self.fleet = Fleet(self.store, starter, limit=limit, parallel=4, say=self.said.append)
        return asyncio.create_task(self.fleet.run())

    async def pool(
        self, agent: str, *, name: str = "", warm: int = 0, most: int = 100, fork: bool = False, grace: int = 2, **fields: Any
    ) -> None:
        """A pool of pods that run this agent of ``agents.py``."""
        container = {
            "name": "agent", "image": "agent:1", "command": [sys.executable, str(AGENTS), agent],
            "env": [{"name": "CHAOS_SINK", "value": self.sink.url}, {"name": "CHAOS_FOLDER", "value": str(self.folder)}],
        }  # fmt: skip
        spec = {
            "template": {"spec": {"containers": [container], "terminationGracePeriodSeconds": grace}},
            "capacity": {"minIdle": warm, "maxIdle": max(warm, 1), "maxPods": most},
            **({"podReuse": {"mode": "ForkPerRun"}} if fork else {}),
            **fields,
        }
        await self.call("PUT", f"/pools/{name or agent}", {"spec": spec})

    async def restart_postgres(self) -> None:
        await self.postgres.kill()
        await self.postgres.start()

    async def restart_gateway(self, gateway: Gateway) -> None:
        await gateway.kill()
        await gateway.start()

    def pod(self, pod_id: UUID) -> WorkerPod | None:
        found = self.fleet.pods.get(pod_id)
        assert found is None or isinstance(found, WorkerPod)
        return found

    async def holder(self, name: str) -> WorkerPod:
        """Waits for a pod to hold the run."""

        async def look() -> WorkerPod | None:
            rows = await self.sql("select l.holder from perdure.leases l join perdure.runs r using (run_id) where r.name = $1", name)
            return self.pod(rows[0]["holder"]) if rows else None

        pod = await seen(look)
        assert pod is not None
        return pod

    # ------------------------------------------------------------------------------------------------ a person

    async def call(self, method: str, path: str, body: object = None, *, key: str | None = None) -> Any:
        """At whichever gateway answers; tries again while that helps. Raises Refused."""
        turn = 0
        while True:
            gateway = list(self.gateways.values())[turn % 2]
            turn += 1
            try:
                return await asyncio.wait_for(Api(gateway, self._person).call(method, path, body, key=key), 10)
            except Refused as refused:
                if not refused.problem.retryable:
                    raise
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(0.02)

    async def create(self, name: str, pool: str, input: object, **spec: Any) -> str:
        body = {"name": name, "spec": {"agent": {"poolRef": {"name": pool}}, "input": input, "retry": RETRY, **spec}}
        return str((await self.call("POST", "/runs", body, key=name))["runId"])

    async def view(self, run: str) -> View:
        return msgspec.convert(await self.call("GET", f"/runs/{run}"), View)

    async def events(self, run: str) -> list[dict[str, Any]]:
        return list((await self.call("GET", f"/runs/{run}/events?limit=5000"))["items"])

    async def kinds(self, run: str) -> list[str]:
        return [event["kind"] for event in await self.events(run)]

    async def until(self, run: str, *states: str) -> View:
        wanted = states or ("Succeeded", "Failed", "Cancelled")
        await seen(lambda: self.sql("select 1 from perdure.runs where run_id = $1 and state = any ($2)", UUID(run), list(wanted)))
        return await self.view(run)

    async def event(self, run: str, kind: str, count: int = 1) -> None:
        """Waits for the run's ``count``-th event of this kind."""
        query = "select 1 from perdure.events where run_id = $1 and kind = $2 offset $3 limit 1"
        await seen(lambda: self.sql(query, UUID(run), kind, count - 1))

    # ------------------------------------------------------------------------------------------------ the database

    async def sql(self, query: str, *arguments: Any) -> list[asyncpg.Record]:
        """Past everything; waits for Postgres when it is down."""
        async with self._sql_lock:
            while True:
                try:
                    with translated():
                        if self._sql is None or self._sql.is_closed():
                            self._sql = await asyncpg.connect(self.postgres.dsn)
                        return list(await self._sql.fetch(query, *arguments))
                except Unavailable:
                    self._drop_sql()
                    await asyncio.sleep(0.02)
                except BaseException:
                    self._drop_sql()
                    raise

    def _drop_sql(self) -> None:
        if self._sql is not None:
            self._sql.terminate()
            self._sql = None

    async def verify(self) -> str:
        return described(await self.store.verify())

    def words(self) -> str:
        """For a failed test: what the fleet said, and the ends of the logs."""
        logs = [f"--- {log.name}\n" + log.read_text()[-1500:] for log in sorted(self.state.logs.glob("*.log"))[-8:]]
        return "\n".join([*self.said[-20:], *logs])


@asynccontextmanager
async def stack(folder: Path, zygote: Zygote, *, lease_seconds: float = LEASE_SECONDS, limit: int = 12) -> AsyncIterator[Stack]:
    """``folder``: one that the database's system user can enter. Afterwards all invariants hold."""
    async with contextlib.AsyncExitStack() as ends:
        postgres = await ends.enter_async_context(EmbeddedPostgres(folder / "pg"))
        await migrate(postgres.dsn)
        store = await Store.connect(postgres.dsn)
        ends.push_async_callback(store.close)
        world = await ends.enter_async_context(sink())
        http = await ends.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        made = Stack(postgres, store, http, world, folder)
        await _execute(postgres.dsn, SETUP)
        leash = await Leash.start()
        ends.push_async_callback(leash.release)
        await made.start_gateways(zygote, ("a", "b"), lease_seconds)
        fleet = made.start_fleet(leash, limit=limit)
        try:
            yield made
            assert not fleet.done(), fleet
            violations = await made.verify()
            assert not violations, violations
        finally:
            fleet.cancel()
            await asyncio.gather(fleet, return_exceptions=True)
            await made.fleet.close(0.2)
            for gateway in made.gateways.values():
                await gateway.kill()
            made._drop_sql()


async def _execute(dsn: str, script: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(script)
    finally:
        await connection.close()
