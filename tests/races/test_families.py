"""Parents and children: an effect on another run is a row that a second transaction applies (V1-V5). None is lost, none is applied
twice."""

from __future__ import annotations

import asyncio
import time
from uuid import UUID

import asyncpg
import msgspec
import pytest
from tests.harness import runs
from tests.harness.cluster import POOL, Cluster
from tests.harness.pods import FakePod, child, timer
from tests.harness.postgres import in_order, move_clock

from perdure import protocol as wire
from perdure_operator.domain.ids import uuid7
from perdure_operator.store.operations import Control, Fence
from perdure_operator.store.store import Store

JOIN = "wait:join#0"


async def family(store: Store, policy: str = "cancel") -> tuple[runs.Held, runs.Held]:
    """A running parent and its running child."""
    parent = await runs.running(store)
    spawn, kid = runs.spawn(parent, "spawn:c#0", policy)
    await runs.apply(store, spawn)
    held = await runs.lease_next(store)
    assert held.run == kid
    return parent, held


async def state(pg: asyncpg.Connection, run: UUID) -> str:
    return str(await pg.fetchval("select state from perdure.runs where run_id = $1", run))


def finish(held: runs.Held, outcome: str = "succeeded") -> Control:
    return runs.work(held, "finish", outcome=outcome, error=None)


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_child_done_against_cancel_of_the_parent(database: str, store: Store, pg: asyncpg.Connection, cancel_first: bool) -> None:
    parent, kid = await family(store)
    await runs.apply(store, runs.wait_for(parent, JOIN, runs.on_child(kid.run)))
    await runs.apply(store, finish(kid))
    assert await store.unapplied_runs() == [parent.run]
    both = [lambda: runs.apply(store, runs.verb(parent.run, "cancel")), lambda: runs.apply(store, runs.settle(parent.run))]
    await in_order(database, parent.run, *(both if cancel_first else both[::-1]))
    assert await state(pg, parent.run) == "Cancelled"
    woken = await pg.fetchval("select count(*) from perdure.events where kind = 'run.woken'")
    assert woken == (0 if cancel_first else 1)
    assert await store.unapplied_runs() == []


@pytest.mark.parametrize("finish_first", [True, False])
async def test_a_child_that_ends_while_its_parent_is_cancelled(
    database: str, store: Store, pg: asyncpg.Connection, finish_first: bool
) -> None:
    parent, kid = await family(store)
    await runs.apply(store, runs.wait_for(parent, JOIN, runs.on_child(kid.run)))
    await runs.apply(store, runs.verb(parent.run, "cancel"))
    assert await store.unapplied_runs() == [kid.run]
    both = [lambda: runs.apply(store, finish(kid)), lambda: runs.apply(store, runs.settle(kid.run))]
    done, _ = await in_order(database, kid.run, *(both if finish_first else both[::-1]))
    if finish_first:
        assert await state(pg, kid.run) == "Succeeded"
    else:  # the cancel came first: the child may not succeed any more, and says so
        assert await runs.apply(store, finish(kid)) != done
        assert (await runs.apply(store, finish(kid, "cancelled"))).answer == {"state": "Cancelled"}
    # What the parent and the child inserted for each other has nobody to take it: it is done with all the same.
    await store.control([runs.settle(run) for run in await store.unapplied_runs()])
    assert await store.unapplied_runs() == []


async def test_nothing_is_applied_to_a_run_that_has_ended(store: Store, pg: asyncpg.Connection) -> None:
    """Otherwise the applier would find the same rows for ever."""
    parent, kid = await family(store, "detach")
    await runs.apply(store, finish(parent))
    await runs.apply(store, finish(kid))
    assert await store.unapplied_runs() == [parent.run]
    before = await pg.fetchval("select last_seq from perdure.runs where run_id = $1", parent.run)
    await runs.apply(store, runs.settle(parent.run))
    assert await store.unapplied_runs() == []
    assert await pg.fetchval("select last_seq from perdure.runs where run_id = $1", parent.run) == before


@pytest.mark.parametrize(("policy", "parents_end", "childs_end"), [
    ("cancel", "succeeded", "Cancelled"),
    ("cancel", "failed", "Cancelled"),
    ("detach", "succeeded", "Pending"),
    ("fail_parent", "succeeded", "Cancelled"),
])  # fmt: skip
async def test_policies_when_the_parent_ends(store: Store, pg: asyncpg.Connection, policy: str, parents_end: str, childs_end: str) -> None:
    parent = await runs.running(store)
    spawn, kid = runs.spawn(parent, "spawn:c#0", policy)
    await runs.apply(store, spawn)
    await runs.apply(store, finish(parent, parents_end))
    await store.control([runs.settle(run) for run in await store.unapplied_runs()])
    assert await state(pg, kid) == childs_end


async def test_a_failed_child_fails_its_parent_if_that_is_its_policy(store: Store, pg: asyncpg.Connection) -> None:
    parent, kid = await family(store, "fail_parent")
    await runs.apply(store, finish(kid, "failed"))
    await runs.apply(store, runs.settle(parent.run))
    row = await pg.fetchrow("select state, reason, error from perdure.runs where run_id = $1", parent.run)
    assert row is not None
    assert (row["state"], row["reason"]) == ("Failed", "ChildFailed")
    assert str(kid.run) in row["error"]


async def test_a_thousand_children_end_at_once(cluster: Cluster) -> None:
    """One wait joins them all: one wake, and the whole outcome with it."""
    count = 1000
    gateway, api = await cluster.one()
    store = cluster.store
    await store.upsert_pool("default", "kids", POOL, 10_000)
    # The children's pods are rows that never beat: on a slow machine they are silent for a lease.
    cluster.expected_errors.append("unusually many leases are silent")
    parent_id = await api.create("parent")
    parent = await cluster.holder(gateway)
    assert parent.epoch is not None
    fence = Fence(parent.epoch, parent.id)
    spawned = [runs.spawn(runs.Held(UUID(parent_id), fence), f"spawn:k#{n}", pool="default/kids") for n in range(count)]
    assert {outcome.code for outcome in await store.control([spawn for spawn, _ in spawned])} == {"ok"}
    kids = [str(kid) for _, kid in spawned]
    pods = [uuid7() for _ in range(count)]
    await cluster.pg.executemany(
        "insert into perdure.pods (pod_id, pool, state, gateway, since, seen_at) values ($1, 'default/kids', 'idle', 'x', now(), now())",
        [(pod,) for pod in pods],
    )
    held = [runs.Held(grant.run, Fence(grant.epoch, grant.pod)) for grant in await store.dispatch("x", pods)]
    assert len(held) == count
    assert (await parent.wait(JOIN, *map(child, kids), mode="all")).status == "suspended"
    heir = await cluster.pod(gateway)
    started = time.monotonic()
    await asyncio.gather(*(store.control([finish(h) for h in held[n : n + 50]]) for n in range(0, count, 50)))
    ended = time.monotonic()
    context = await heir.lease(30)
    print(f"ends {ended - started:.2f} s, then woken and delivered in {time.monotonic() - ended:.2f} s")
    assert context.run_id == parent_id
    [entry] = [e for e in context.journal if e.key == JOIN]
    outcome = msgspec.json.decode(bytes(entry.output), type=wire.WaitOutcome)
    assert (outcome.status, len(outcome.fired)) == ("satisfied", count)
    assert sorted(fired.index for fired in outcome.fired) == list(range(count))
    kinds = await cluster.pg.fetch("select kind, count(*) from perdure.events where run_id = $1 group by kind", UUID(parent_id))
    counts = {row["kind"]: row["count"] for row in kinds}
    assert (counts["run.woken"], counts["child.done"], counts["wait.satisfied"]) == (1, count, 1)
    assert await heir.finish() == "Succeeded"


async def test_an_agent_that_holds_its_pod_hears_of_its_child_and_of_its_timer(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create("parent")
    parent = await cluster.holder(gateway)
    kid = await parent.spawn("spawn:k#0")
    assert (await parent.wait("wait:kid#0", child(kid), suspend=False)).status == "open"
    worker = await cluster.holder(gateway)
    await worker.finish()
    assert (await parent.poke()).outcomes["wait:kid#0"].status == "satisfied"
    assert (await parent.wait("wait:soon#0", timer(0.2), suspend=False)).status == "open"
    assert (await parent.poke()).outcomes["wait:soon#0"].fired[0].kind == "timer"


async def obey(pod: FakePod) -> None:
    """An agent that stops when it is told to."""
    while not (await pod.poke()).cancel:
        pass
    await pod.finish("cancelled")


async def test_a_cancel_goes_down_ten_levels(cluster: Cluster) -> None:
    """Each level has a member that runs, one that is suspended, one that is queued; one worker does not listen."""
    a, b = await cluster.start("a", "b")
    api = cluster.api(a)
    await cluster.store.upsert_pool("default", "nobody", POOL, 10)
    root = await api.create("root", terminationGracePeriodSeconds=0)
    obeying, deaf = [], cluster.new_pod()
    for level in range(10):
        pod = await cluster.holder((a, b)[level % 2])
        await pod.spawn("spawn:queued#0", pool="nobody")
        await pod.spawn("spawn:paused#0", spec={"desiredState": "Suspended"})
        if level == 9:
            await pod.wait("wait:x#0", wire.Condition(kind="signal", name="never"))
            break
        await pod.spawn("spawn:next#0", spec={"terminationGracePeriodSeconds": 0})
        if level != 4:
            obeying.append(asyncio.create_task(obey(pod)))
        else:
            deaf = pod
    await api.verb(root, "cancel")
    await asyncio.gather(*obeying[:4])
    while not (await deaf.poke()).cancel:
        pass
    await move_clock(cluster.pg, 6)  # past its grace, and the five seconds for last words
    await asyncio.gather(*obeying)
    await deaf.next(wire.LeaseLost)
    tree = await cluster.api(b).call("GET", f"/runs/{root}/tree")
    members = [tree["run"], *tree["descendants"]]
    assert len(members) == 30
    await asyncio.gather(*(api.until(member["runId"], "Cancelled") for member in members))
