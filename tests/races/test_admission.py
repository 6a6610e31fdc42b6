"""Who may run (L4) is decided after the lock, not beside it; and who sits on one run stops no other."""

from __future__ import annotations

import asyncio
import random
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.cluster import POOL
from tests.harness.postgres import locked, waiters

from perdure_operator.store import batch
from perdure_operator.store.operations import Fence, Outcome
from perdure_operator.store.store import Store

GATEWAYS = 6


async def asleep(store: Store, count: int) -> list[UUID]:
    """Runs that wait for the signal ``go``."""
    found = []
    for _ in range(count):
        held = await runs.running(store)
        await runs.apply(store, runs.wait_for(held, "w", runs.on_signal("go")))
        found.append(held.run)
    return found


async def limit(store: Store, pg: asyncpg.Connection, of: str) -> None:
    if of == "pool":
        await store.upsert_pool("default", "p", POOL, 1)
    else:
        await pg.execute("insert into perdure.tenants (namespace, max_running) values ('default', 1)")


@pytest.mark.parametrize("of", ["pool", "tenant"])
async def test_a_count_is_younger_than_the_lock_that_guards_it(store: Store, pg: asyncpg.Connection, database: str, of: str) -> None:
    """The second wake has its snapshot, and stands still before the limit's lock, when the first one commits."""
    first, second = await asleep(store, 2)
    await limit(store, pg, of)
    if of == "pool":
        await store.upsert_pool("default", "p", POOL, 1)
    pods = [uuid4(), uuid4()]
    for pod in pods:
        await store.pod_hello(pod, "default/p", runs.GATEWAY, reuse=False)
    one, gate = await asyncpg.connect(database), await asyncpg.connect(database)
    try:
        uncommitted = one.transaction()
        await uncommitted.start()
        [granted] = await batch.control(one, [runs.signal(first, "go", "1")], wait=True, idle=pods[:1], gateway=runs.GATEWAY)
        assert granted.leased is not None
        closed = gate.transaction()
        await closed.start()
        # Whoever asks for the limits waits from now on: also one that comes behind the first.
        closing = asyncio.create_task(gate.execute("lock table perdure.tenants in access exclusive mode"))
        await waiters(database, 1)
        waking = asyncio.create_task(store.control([runs.signal(second, "go", "1")], idle=pods[1:], gateway=runs.GATEWAY))
        await waiters(database, 2)
        await uncommitted.commit()
        await closing
        await closed.rollback()
        [outcome] = await waking
    finally:
        await one.close()
        await gate.close()
    assert (outcome.code, outcome.state, outcome.leased) == ("ok", "Pending", None)
    assert await pg.fetchval("select count(*) from perdure.leases") == 1


async def test_many_gateways_wake_runs_of_a_limited_pool_at_once(store: Store, pg: asyncpg.Connection, database: str) -> None:
    """Without any lock of the test: six runs of a pool that may run one are signalled at six gateways, again and again."""
    sleeping = await asleep(store, GATEWAYS)
    await store.upsert_pool("default", "p", POOL, 1)
    connections = [await asyncpg.connect(database) for _ in range(GATEWAYS)]

    async def wake(n: int, turn: int, pod: UUID) -> Outcome:
        await asyncio.sleep(random.random() * 0.004)
        [outcome] = await batch.control(connections[n], [runs.signal(sleeping[n], "go", str(turn))], wait=True, idle=[pod], gateway=f"g{n}")
        return outcome

    for turn in range(250):
        pods = [uuid4() for _ in range(GATEWAYS)]
        for n, pod in enumerate(pods):
            await store.pod_hello(pod, "default/p", f"g{n}", reuse=False)
        outcomes = await asyncio.gather(*(wake(n, turn, pod) for n, pod in enumerate(pods)))
        leased = [runs.Held(run, Fence(o.epoch or 0, o.leased)) for run, o in zip(sleeping, outcomes, strict=True) if o.leased]
        assert len(leased) <= 1, turn
        free = [(f"g{n}", pod) for n, pod in enumerate(pods) if pod not in [held.fence.holder for held in leased]]
        while leased or await pg.fetchval("select exists (select 1 from perdure.runs where state = 'Pending')"):
            for held in leased:
                await runs.apply(store, runs.wait_for(held, f"w{turn}", runs.on_signal("go")))
            leased = []
            if await pg.fetchval("select exists (select 1 from perdure.runs where state = 'Pending')"):
                gateway, pod = free.pop()
                leased = [runs.Held(grant.run, Fence(grant.epoch, grant.pod)) for grant in await store.dispatch(gateway, [pod])]
        await pg.execute("delete from perdure.pods")
    for connection in connections:
        await connection.close()


@pytest.mark.parametrize("locked_runs", [1, 20])
async def test_locked_runs_at_the_head_of_the_queue_do_not_stop_their_pool(store: Store, database: str, locked_runs: int) -> None:
    queued = [await runs.pending(store) for _ in range(locked_runs + 2)]
    pod = await runs.idle_pod(store)
    async with locked(database, *queued[:locked_runs]):
        [grant] = await store.dispatch(runs.GATEWAY, [pod])
        assert grant.run == queued[locked_runs]


async def test_a_locked_run_does_not_stop_a_tenant_that_may_run_one_more(store: Store, pg: asyncpg.Connection, database: str) -> None:
    """The second of its runs stands in for the first, and is refused where the first has got the place."""
    await limit(store, pg, "tenant")
    first, second, third = [await runs.pending(store) for _ in range(3)]
    pods = [await runs.idle_pod(store) for _ in range(3)]
    async with locked(database, first):
        [grant] = await store.dispatch(runs.GATEWAY, pods)
        assert grant.run == second
    assert await store.dispatch(runs.GATEWAY, pods) == []
    await runs.apply(store, runs.work(runs.Held(second, Fence(grant.epoch, grant.pod)), "finish", outcome="succeeded"))
    [grant] = await store.dispatch(runs.GATEWAY, pods)
    assert grant.run == first
    assert third is not None
