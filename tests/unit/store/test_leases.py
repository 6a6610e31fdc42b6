"""Leases under contention: two transactions meet, one of them not yet committed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest
from tests.property.runs import columns

from perdure_operator.store.operations import Control
from perdure_operator.store.store import NewRun, Store

GATEWAY = "g"
POOL = "ns/p"


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = await Store.connect(database)
    await store.upsert_pool("ns", "p", {}, None)
    yield store
    await store.close()


@pytest.fixture
async def other(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A second party, in a transaction that the test ends when it likes."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


async def runs(store: Store, count: int) -> list[uuid.UUID]:
    created = await store.create_runs([NewRun(columns(uuid.uuid4(), POOL), b"null") for _ in range(count)])
    return [c.run for c in created]


async def idle_pod(store: Store, gateway: str = GATEWAY, *, reuse: bool = True) -> uuid.UUID:
    pod = uuid.uuid4()
    assert (await store.pod_hello(pod, POOL, gateway, reuse=reuse, run=None, epoch=None)).status == "idle"
    return pod


async def waits_for_a_lock(connection: asyncpg.Connection, function: str) -> None:
    """Returns when somebody's call of ``function`` waits for a row that another has locked. Inside a transaction the first look would be
    shown again and again."""
    query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like $1 and pid <> pg_backend_pid()"
    while not await connection.fetchval(query, f"%{function}(%"):
        await connection.execute("select pg_stat_clear_snapshot(), pg_sleep(0.005)")


@pytest.mark.parametrize("limit", ["pool", "tenant"])
async def test_two_dispatchers_do_not_pass_a_limit_together(store: Store, other: asyncpg.Connection, limit: str) -> None:
    if limit == "pool":
        await store.upsert_pool("ns", "p", {}, 1)
    else:
        await other.execute("insert into perdure.tenants (namespace, max_running) values ('ns', 1)")
    await runs(store, 2)
    first, others = await idle_pod(store, "g1"), [await idle_pod(store, "g2") for _ in range(2)]

    transaction = other.transaction()
    await transaction.start()
    granted = await other.fetch("select * from perdure.dispatch('g1', $1)", [first])
    also = await store.dispatch("g2", others)
    await transaction.commit()

    assert (len(granted), also) == (1, [])
    assert await store.dispatch("g2", others) == []


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_pod_that_says_hello_while_it_is_granted_a_run_hears_of_it(store: Store, other: asyncpg.Connection, reuse: bool) -> None:
    """It has left its gateway, which does not know yet, for another."""
    [run] = await runs(store, 1)
    pod = await idle_pod(store, reuse=reuse)

    transaction = other.transaction()
    await transaction.start()
    await other.fetch("select * from perdure.dispatch($1, $2)", GATEWAY, [pod])
    hello = asyncio.create_task(store.pod_hello(pod, POOL, "another", reuse=reuse, run=None, epoch=None))
    await waits_for_a_lock(other, "pod_hello")
    await transaction.commit()

    status = await hello
    assert (status.status, status.run, status.epoch) == ("leased", run, 1)
    assert await store.verify() == []


async def test_a_pod_that_says_idle_twice_keeps_the_run_that_it_was_granted(store: Store, other: asyncpg.Connection) -> None:
    await runs(store, 1)
    pod = await idle_pod(store)

    transaction = other.transaction()
    await transaction.start()
    await other.fetch("select * from perdure.dispatch($1, $2)", GATEWAY, [pod])
    idle = asyncio.create_task(store.pod_idle(pod, GATEWAY))
    await waits_for_a_lock(other, "pod_idle")
    await transaction.commit()

    await idle
    assert await store.verify() == []


async def test_a_gateway_leases_nothing_to_a_pod_that_has_left_it(store: Store) -> None:
    """It may not know yet: the pod would hear of its run only at its next hello."""
    pod = await idle_pod(store, "another")
    [run] = await runs(store, 1)
    assert await store.dispatch(GATEWAY, [pod]) == []
    [outcome] = await store.control([Control(run, "settle", {})], idle=[pod], gateway=GATEWAY)
    assert outcome.leased is None
    [outcome] = await store.control([Control(run, "settle", {})], idle=[pod], gateway="another")
    assert outcome.leased == pod
