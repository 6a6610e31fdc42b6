"""Who gets which run (L4): each run once, in the order of priority and age, within the limits; and the short way from a wake to a warm
pod."""

from __future__ import annotations

import asyncio
from collections import Counter

import asyncpg
from tests.harness import runs
from tests.harness.cluster import POOL, Cluster
from tests.harness.pods import signal
from tests.harness.postgres import move_clock, waiters

from perdure import protocol as wire
from perdure_operator.store.store import Store

KEY = "wait:go#0"


async def test_two_gateways_lease_each_run_once(cluster: Cluster) -> None:
    gateways = await cluster.start("a", "b")
    names = [f"r{n}" for n in range(60)]
    pods = [await cluster.pod(gateways[n % 2]) for n in range(60)]
    # Two batches at once, one at each gateway.
    await asyncio.gather(*(cluster.api(gateways[n]).create_many(names[n * 30 : n * 30 + 30]) for n in range(2)))
    contexts = await asyncio.gather(*(pod.lease() for pod in pods))
    assert sorted(context.name for context in contexts) == sorted(names)
    assert {context.epoch for context in contexts} == {1}
    leased = await cluster.pg.fetch("select run_id from perdure.events where kind = 'run.leased'")
    assert Counter(row[0] for row in leased).most_common(1)[0][1] == 1
    assert all(pod.heard(wire.Lease) == 0 for pod in pods)
    assert set(await asyncio.gather(*(pod.finish() for pod in pods))) == {"Succeeded"}


async def test_a_run_for_each_pod_and_no_more(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    for name in ("one", "two", "three"):
        await api.create(name)
    pods = [await cluster.holder(gateway) for _ in range(2)]
    assert [pod.context.name for pod in pods if pod.context] == ["one", "two"]
    view = await api.view("three")
    assert (view.state, view.reason) == ("Pending", "Queued")
    assert "idle pod of pool default/p" in view.message


async def test_priority_then_age(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    for name, priority in [("old", 0), ("low", -5), ("high", 10), ("middle", 5)]:
        await api.create(name, priority=priority)
    await move_clock(cluster.pg, 601)  # ten points of priority are worth ten minutes of waiting
    await api.create("highest-but-late", priority=10)
    got = []
    for _ in range(5):
        context = (await cluster.holder(gateway)).context
        assert context is not None
        got.append(context.name)
    assert got == ["high", "middle", "old", "highest-but-late", "low"]


async def test_a_reusing_pod_takes_one_run_after_the_other(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    pod = await cluster.pod(gateway, reuse=True)
    for name in ("one", "two", "three"):
        await api.create(name)
        assert (await pod.lease()).name == name
        frame = await pod.ask(wire.Finish(outcome="succeeded"))
        assert isinstance(frame, wire.Answer)
        assert frame.released
        assert pod.heard(wire.Lease) == 0
        pod.send(wire.Idle())


async def test_a_pod_is_used_once_unless_it_says_otherwise(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create_many(["one", "two"])
    pod = await cluster.holder(gateway)
    await pod.finish()
    pod.send(wire.Idle())
    await pod.next(wire.Retire)
    assert (await api.view("two")).state == "Pending"


async def test_the_pools_limit_holds(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    api = cluster.api(a)
    await api.call("PUT", "/pools/small", {"spec": {**POOL, "capacity": {"maxPods": 2}}})
    for name in ("one", "two", "three"):
        await api.create(name, pool="small")
    pods = [await cluster.holder(gateway, pool="default/small") for gateway in (a, b)]
    third = await cluster.pod(a, pool="default/small")
    view = await api.view("three")
    assert (view.state, view.reason) == ("Pending", "PoolLimit")
    await pods[0].finish()
    assert (await third.lease()).name == "three"


async def test_the_limit_holds_when_two_gateways_look_at_once(database: str, store: Store, pg: asyncpg.Connection) -> None:
    """Both have counted before either has committed: the table of leases can be read then, not written. The second looks at more runs than
    the first has locked."""
    for _ in range(4):
        await runs.pending(store)
    pods = {name: [await runs.idle_pod(store, gateway=name) for _ in range(count)] for name, count in (("a", 1), ("b", 4))}
    await store.upsert_pool("default", "p", POOL, 1)
    async with pg.transaction():
        await pg.execute("lock table perdure.leases in share mode")
        first = asyncio.ensure_future(store.dispatch("a", pods["a"]))
        await waiters(database, 1)
        second = asyncio.ensure_future(store.dispatch("b", pods["b"]))
        await asyncio.wait([second], timeout=2)
    assert [len(grants) for grants in await asyncio.gather(first, second)] == [1, 0]


async def test_the_namespaces_limit_holds_and_tenants_share(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await cluster.pg.execute("insert into perdure.tenants (namespace, max_running) values ('default', 1)")
    await api.create_many(["one", "two"])
    first = await cluster.holder(gateway)
    second = await cluster.pod(gateway)
    assert (await api.view("two")).reason == "TenantLimit"
    await first.finish()
    assert (await second.lease()).name == "two"


async def test_a_missing_pool_leaves_its_run_pending_and_says_so(cluster: Cluster) -> None:
    _, api = await cluster.one()
    run = await api.create()
    await cluster.pg.execute("delete from perdure.pools")
    why = await api.call("GET", f"/runs/{run}/why")
    assert (why["reason"], why["message"]) == ("PoolNotFound", "there is no AgentPool default/p")


# ------------------------------------------------------------------------------------------------------- the short way


async def suspended(cluster: Cluster, name: str) -> str:
    """A run that waits for the signal ``go``."""
    [gateway, *_] = cluster.gateways
    run = await cluster.api(gateway).create(name)
    pod = await cluster.holder(gateway)
    assert (await pod.wait(KEY, signal("go"))).status == "suspended"
    return run


async def test_a_signal_leases_in_its_own_commit(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await suspended(cluster, "waiting")
    before = await gateway.metric("perdure_leases_total", path="direct")
    pod = await cluster.pod(gateway)
    answer = await api.signal(run, "go")
    assert (await pod.lease()).run_id == run
    assert await gateway.metric("perdure_leases_total", path="direct") == before + 1
    leased = (await api.events(run))[-1]
    assert (leased["kind"], leased["seq"]) == ("run.leased", answer["seq"] + 3)  # received, satisfied, woken, leased
    assert await pod.finish() == "Succeeded"


async def test_the_direct_way_overtakes_nobody(store: Store) -> None:
    """Another run of the pool is queued: the idle pod is that one's."""
    held = await runs.running(store)
    await runs.apply(store, runs.wait_for(held, "w", runs.on_signal("go")))
    other = await runs.pending(store)
    pod = await runs.idle_pod(store)
    [outcome] = await store.control([runs.signal(held.run, "go", "1")], idle=[pod], gateway=runs.GATEWAY)
    assert (outcome.state, outcome.leased) == ("Pending", None)
    [grant] = await store.dispatch(runs.GATEWAY, [pod])
    assert grant.run == other


async def test_the_direct_way_needs_a_pod_of_the_right_pool(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await suspended(cluster, "waiting")
    await cluster.store.upsert_pool("default", "other", POOL, 5)
    stranger = await cluster.pod(gateway, pool="default/other")
    await api.signal(run, "go")
    assert (await api.view(run)).state == "Pending"
    assert stranger.heard(wire.Lease) == 0
    assert (await (await cluster.pod(gateway)).lease()).run_id == run


async def test_many_wakes_queue_a_run_once(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await suspended(cluster, "waiting")
    await asyncio.gather(*(api.signal(run, "go", n) for n in range(20)))
    pods = [await cluster.pod(gateway) for _ in range(3)]
    done, _ = await asyncio.wait([asyncio.ensure_future(pod.lease(2)) for pod in pods], return_when=asyncio.FIRST_COMPLETED)
    context = done.pop().result()
    unbound = [reason for reason in context.reasons if reason.kind == "signal"]
    assert len(unbound) == 20  # the one that woke it, and the nineteen that no wait has taken
    assert (await api.kinds(run)).count("run.leased") == 2
