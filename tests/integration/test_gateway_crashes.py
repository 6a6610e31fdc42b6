"""Gateways and Postgres are killed again and again under load.

Nothing that was acknowledged is lost, nothing happens twice, every run ends well. The seed is printed; the same seed makes the same
choices, though not the same timing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from tests.harness.api import Api, Refused, Sent
from tests.harness.cluster import Cluster
from tests.harness.worker import STEPS, World, fleet, insistent

from perdure_operator.local.embedded_postgres import EmbeddedPostgres

RUNS, PODS, LEASE = 24, 12, 1.5
PATIENCE = 60.0


def seeded(dies: float) -> World:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return World(random.Random(seed), dies)


async def load(cluster: Cluster, world: World) -> list[dict[str, Any]]:
    """Creates the runs and sends each its signal, twice under the same key. Gives what was answered."""

    async def one(n: int) -> dict[str, Any]:
        await asyncio.sleep(world.rng.random() * 4)
        body = {"name": f"r{n}", "spec": {"agent": {"poolRef": {"name": "p"}}}}
        run = (await insistent(cluster, "POST", "/runs", body, f"create-{n}", world))["runId"]
        await asyncio.sleep(world.rng.random() * 2)
        answers = [await insistent(cluster, "POST", f"/runs/{run}/signals/go", n, f"go-{n}", world) for _ in range(2)]
        assert answers[0]["seq"] == answers[1]["seq"]
        return {"run": run, "seq": answers[0]["seq"], "id": f"go-{n}"}

    return list(await asyncio.gather(*(one(n) for n in range(RUNS))))


async def storm(cluster: Cluster, world: World, blow: Callable[[], Awaitable[None]], blows: int) -> list[dict[str, Any]]:
    """The load, with so many blows to it; afterwards until all runs have ended."""
    await cluster.start("a", "b", lease_seconds=LEASE)
    started = time.monotonic()
    pods = asyncio.create_task(fleet(cluster, world, PODS))
    sent = asyncio.create_task(load(cluster, world))
    for _ in range(blows):
        await asyncio.sleep(0.2 + world.rng.random() * 0.8)
        await blow()
    answered = await asyncio.wait_for(sent, PATIENCE)
    unfinished = "from perdure.runs r where finished_at is null"
    while await cluster.pg.fetchval(f"select count(*) {unfinished}"):
        if time.monotonic() > started + PATIENCE or pods.done():
            raise AssertionError(await cluster.pg.fetchval(f"select jsonb_agg(to_jsonb(r)) {unfinished}"))
        await asyncio.sleep(0.05)
    pods.cancel()
    await asyncio.gather(pods, return_exceptions=True)
    return answered


async def check(cluster: Cluster, world: World, answered: list[dict[str, Any]]) -> None:
    pg = cluster.pg
    assert await pg.fetchval("select count(*) from perdure.runs where state = 'Succeeded'") == RUNS
    journal = {(str(row["run_id"]), row["key"]): row["seq"] for row in await pg.fetch("select run_id, key, seq from perdure.journal")}
    lost = {key: seq for key, seq in world.acknowledged.items() if journal.get(key) != seq}
    assert not lost, "acknowledged and lost"
    assert len(world.acknowledged) >= RUNS  # the load did do something
    steps = await pg.fetch("select run_id, data ->> 'key', count(*) from perdure.events where kind like 'step.%' group by 1, 2")
    assert len(steps) == RUNS * (STEPS + 1)
    assert {row["count"] for row in steps} == {1}
    taken = await pg.fetch("select run_id, id, seq from perdure.wakeups where kind = 'signal'")
    signals = {(str(row["run_id"]), row["id"]): row["seq"] for row in taken}
    assert signals == {(a["run"], a["id"]): a["seq"] for a in answered}
    assert sorted(world.effects.values()) == [1] * RUNS, "an effect happened twice, or not at all"


async def test_gateways_are_killed_under_load(cluster: Cluster) -> None:
    world = seeded(dies=0.05)

    async def blow() -> None:
        gateway = world.rng.choice(cluster.gateways)
        await gateway.kill()
        await asyncio.sleep(world.rng.random() * 0.3)
        await gateway.start()

    await check(cluster, world, await storm(cluster, world, blow, 5))


async def test_postgres_and_gateways_are_killed_under_load(own_cluster: Cluster, own_postgres: EmbeddedPostgres) -> None:
    cluster, world = own_cluster, seeded(dies=0.05)

    async def blow() -> None:
        if world.rng.random() < 0.3:
            gateway = world.rng.choice(cluster.gateways)
            await gateway.kill()
            await gateway.start()
            return
        await own_postgres.kill()
        await asyncio.sleep(world.rng.random() * 0.3)
        await own_postgres.start()
        await cluster.reconnect()

    await check(cluster, world, await storm(cluster, world, blow, 6))


async def test_what_people_see_of_an_outage(own_cluster: Cluster, own_postgres: EmbeddedPostgres) -> None:
    """Reads are refused as worth a retry, a tail breaks off without its end and can be resumed, a signal is taken when Postgres is back."""
    gateway, api = await own_cluster.one()
    run = await api.create()
    tail = asyncio.create_task(follow(api, run))
    pod = await own_cluster.holder(gateway)
    await own_postgres.kill()
    seen = await asyncio.wait_for(tail, 10)
    refused = await api.raw("GET", f"/runs/{run}")
    assert (refused.status, refused.problem.type, refused.problem.retryable) == (503, "urn:perdure:unavailable", True)
    assert not await gateway.answers("/readyz")
    assert await gateway.answers("/healthz")
    sent = asyncio.create_task(api.signal(run, "go", key="one"))
    finished = asyncio.create_task(pod.finish())
    await own_postgres.start()
    await own_cluster.reconnect()
    assert await finished == "Succeeded"
    with suppress(Refused):  # the run may have ended first
        assert (await sent)["duplicate"] is False
    rest = await follow(api, run, last_event_id=seen[-1].id)
    assert [event.event for event in seen + rest][-2:] == ["run.succeeded", "end"]
    assert [int(event.id) for event in seen + rest[:-1]] == list(range(1, len(seen + rest)))


async def follow(api: Api, run: str, **options: Any) -> list[Sent]:
    return [event async for event in api.tail(run, **options)]
