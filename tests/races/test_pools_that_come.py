"""A pool comes or goes while thousands of runs are queued for it: their resources say so, and the queue goes on."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.many import copies
from tests.harness.postgres import waiters
from tests.harness.site import NS, POOL, Site

from perdure_operator.kube.client import AGENTPOOLS
from perdure_operator.store.operations import Fence
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store

MANY = 700
_DUE = "select count(*) from perdure.resources where changed_seq > projected_seq"


@pytest.fixture
async def queued(store: Store, pg: asyncpg.Connection) -> None:
    """Runs one after the other, each with a resource that says all there is to say; one of them is gone."""
    run = await runs.pending(store)
    await copies(pg, run, MANY, every={"runnable_at": "t.runnable_at - n * interval '1 second'"})
    await pg.execute(
        "insert into perdure.resources (run_id, uid, name, changed_seq, projected_seq, gone) "
        "select run_id, gen_random_uuid(), 'n', 1, 1, run_id = $1 from perdure.runs",
        run,
    )


@pytest.mark.usefixtures("queued")
async def test_runs_are_dispatched_while_the_others_are_told(database: str, store: Store, pg: asyncpg.Connection) -> None:
    """Somebody has the resource of the run that is told last but one: the rest of the queue is not held meanwhile."""
    pod = await runs.idle_pod(store)
    held = "select c.run_id from perdure.resources c join perdure.runs r using (run_id) order by r.runnable_at desc offset 1 limit 1"
    async with pg.transaction():
        await pg.execute(f"select from perdure.resources where run_id = ({held}) for update")
        telling = asyncio.create_task(Resources(store).pool_changed("default", "p"))
        await waiters(database, 1)
        [grant] = await store.dispatch(runs.GATEWAY, [pod])
    await telling
    assert await pg.fetchval(_DUE) == MANY, "all but the one whose resource is gone"
    await runs.apply(store, runs.work(runs.Held(grant.run, Fence(grant.epoch, pod)), "finish", outcome="succeeded"))


@pytest.mark.usefixtures("queued")
async def test_a_run_that_is_being_moved_is_not_waited_for(store: Store, pg: asyncpg.Connection) -> None:
    async with pg.transaction():
        await pg.execute("select from perdure.runs order by runnable_at limit 1 for update")
        await Resources(store).pool_changed("default", "p")
    assert await pg.fetchval(_DUE) == MANY - 1


async def test_an_operator_that_starts_tells_nobody_of_the_pools_that_were_there(store: Store, pg: asyncpg.Connection) -> None:
    site = Site(store, pg)

    async def told() -> bool:
        return bool(await pg.fetchval("update perdure.resources set asked_at = null where asked_at is not null returning true"))

    await site.pool(spec=POOL | {"capacity": {"maxPods": 0}})
    async with site.operating():
        await site.create("report")
        await site.until(lambda: pg.fetchval("select count(*) from perdure.resources where projected_seq >= changed_seq"))
        found = await site.kube.get(AGENTPOOLS, NS, "p")
        assert found is not None
        await site.kube.delete(AGENTPOOLS, NS, "p", uid=found["metadata"]["uid"])
        await site.until(told)
        await site.pool(spec=POOL | {"capacity": {"maxPods": 0}})
        await site.until(told)
    async with site.operating() as operator:
        await site.until(lambda: asyncio.sleep(0, operator._pools._known))
        assert not await told()
