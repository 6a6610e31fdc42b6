"""What a soak runs on: the stack of the chaos tests with the pools, the triggers and the outside world of a soak."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
from tests.chaos.sink import Sink
from tests.chaos.stack import Stack
from tests.harness.api import Api, Refused
from tests.harness.gateways import Zygote
from tests.harness.triggers import every, spec
from tests.soak.journey import Action, Journey

from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.local.processes import Leash
from perdure_operator.services.trigger_plan import parse_spec, plan
from perdure_operator.store.migrate import migrate
from perdure_operator.store.store import Store
from perdure_operator.store.triggers import Triggers

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 3.0
"""Shorter than a freeze, and long enough for a busy machine to beat in."""
MOST_PODS = 10
ANSWER_SECONDS = 10.0
RETRY = {"maxRetries": 1000, "backoffSeconds": 0, "maxLosses": 1000}
"""The soak's faults alone must not end a run."""
SPEC: dict[str, Any] = {"retry": RETRY, "stallTimeoutSeconds": 5, "terminationGracePeriodSeconds": 5}
BEAT_SECONDS = 15
BEAT = Journey("", [Action("step", "a0", amount=3), Action("effect", "a1", policy="query")])
"""What a run of the trigger ``beat`` does."""


class SoakStack(Stack):
    async def call(self, method: str, path: str, body: object = None, *, key: str | None = None) -> Any:
        """As the stack does it, with a time limit that lets no cancellation of its caller get lost: a soak has thousands of calls."""
        turn = 0
        while True:
            gateway = list(self.gateways.values())[turn % 2]
            turn += 1
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        return await Api(gateway, self._person).call(method, path, body, key=key)
                except Refused as refused:
                    if not refused.problem.retryable:
                        raise
            await asyncio.sleep(0.02)

    async def pools(self, world: str, harness: str) -> None:
        python = [sys.executable, "-m", "tests.soak.agents"]
        shell = ["/bin/sh", str(ROOT / "tests/soak/agent.sh")]
        env = [
            {"name": "SOAK_WORLD", "value": world},
            {"name": "SOAK_HARNESS", "value": harness},
            {"name": "PYTHONPATH", "value": str(ROOT)},
        ]
        for name, command, warm, most in (("forked", python, 3, 6), ("single", python, 0, 3), ("shell", shell, 0, 3)):
            container = {"name": "agent", "image": "agent:1", "command": command, "env": env}
            body = {
                "template": {"spec": {"containers": [container], "terminationGracePeriodSeconds": 2}},
                "capacity": {"minIdle": warm, "maxIdle": max(warm, 1), "maxPods": most},
                **({"podReuse": {"mode": "ForkPerRun"}} if name == "forked" else {}),
            }
            await self.call("PUT", f"/pools/{name}", {"spec": body})

    async def triggers(self, *, suspend: bool) -> None:
        """As the operator writes them: one that fires by the clock, one that fires when somebody asks."""
        for name, source in (("beat", every(BEAT_SECONDS)), ("wish", {"manual": {}})):
            template = {"spec": {"agent": {"poolRef": {"name": "forked"}}, "input": msgspec.to_builtins(BEAT), **SPEC}}
            key, triggers = f"default/{name}", Triggers(self.store)
            row, now = await triggers.get(key), await triggers.now()
            stated = parse_spec(spec(source, template=template, suspend=suspend and name == "beat"))
            uid, generation = (row.uid, row.generation + 1) if row else (uuid4(), 1)
            created = row.anchor_at if row else now
            assert await triggers.put(plan(key, stated, row, now, uid=uid, generation=generation, created=created, told=None))


@contextmanager
def outside(log: Path, harness: str) -> Iterator[str]:
    """The outside world's URL, while it runs."""
    command = [sys.executable, "-m", "tests.soak.world", str(log), harness]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


@asynccontextmanager
async def stack(folder: Path, zygote: Zygote) -> AsyncIterator[SoakStack]:
    """``folder``: one that the database's system user can enter."""
    async with contextlib.AsyncExitStack() as ends:
        postgres = await ends.enter_async_context(EmbeddedPostgres(folder / "pg"))
        await migrate(postgres.dsn)
        store = await Store.connect(postgres.dsn)
        ends.push_async_callback(store.close)
        http = await ends.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        made = SoakStack(postgres, store, http, Sink(), folder)
        leash = await Leash.start()
        ends.push_async_callback(leash.release)
        await made.start_gateways(zygote, ("a", "b"), LEASE_SECONDS)
        fleet = made.start_fleet(leash, limit=MOST_PODS)
        try:
            yield made
            assert not fleet.done(), fleet
        finally:
            fleet.cancel()
            await asyncio.gather(fleet, return_exceptions=True)
            await made.fleet.close(0.2)
            for gateway in made.gateways.values():
                await gateway.kill()
            made._drop_sql()
