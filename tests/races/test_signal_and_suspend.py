"""W2: a run suspends while its signal comes. Whoever gets the row's lock first, the signal is bound once and the run goes on.

A third connection holds the row until both sides wait for it in the wanted order; Postgres serves the one first that came first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.cluster import Cluster
from tests.harness.pods import signal
from tests.harness.postgres import in_order

from perdure import protocol as wire
from perdure_operator.store.operations import Outcome
from perdure_operator.store.store import Store

KEY = "wait:go#0"


async def bound(pg: asyncpg.Connection, run: object) -> list[tuple[str, str | None]]:
    """Id and wait of every signal, in order."""
    query = "select id, bound_key from perdure.wakeups where run_id = $1::text::uuid and kind = 'signal' order by seq"
    rows = await pg.fetch(query, str(run))
    return [(row["id"], row["bound_key"]) for row in rows]


async def test_signal_first_on_the_store(database: str, store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    sent, waited = await in_order(
        database,
        held.run,
        lambda: runs.apply(store, runs.signal(held.run, "go", "1", b'"hello"')),
        lambda: runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("go"))),
    )
    assert sent.answer["duplicate"] is False
    assert waited.answer["status"] == "done"
    assert waited.answer["outcomes"][KEY]["fired"][0]["id"] == "1"
    assert waited.state == "Running"
    assert await bound(pg, held.run) == [("1", KEY)]


async def test_suspend_first_on_the_store(database: str, store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    waited, sent = await in_order(
        database,
        held.run,
        lambda: runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("go"))),
        lambda: runs.apply(store, runs.signal(held.run, "go", "1")),
    )
    assert waited.answer["status"] == "suspended"
    assert sent.state == "Pending"
    assert await bound(pg, held.run) == [("1", KEY)]


async def test_many_signals_around_a_suspend_wake_once(database: str, store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)

    def send(id: str) -> Callable[[], Awaitable[Outcome]]:
        return lambda: runs.apply(store, runs.signal(held.run, "go", id))

    await in_order(
        database,
        held.run,
        lambda: runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("go"))),
        *(send(str(n)) for n in range(5)),
    )
    taken = await bound(pg, held.run)  # behind the first waiter Postgres keeps no order
    assert [wait for _, wait in taken] == [KEY, None, None, None, None]
    order = [id for id, _ in taken]
    assert await pg.fetchval("select count(*) from perdure.events where kind = 'run.woken'") == 1
    again = await runs.lease_next(store)
    assert [s.id for s in (await store.context(held.run)).signals] == order[1:]
    # The next wait takes the next signal: first in, first out.
    second = await runs.apply(store, runs.wait_for(again, "wait:go#1", runs.on_signal("go")))
    assert second.answer["outcomes"]["wait:go#1"]["fired"][0]["id"] == order[1]


async def test_one_wakeup_goes_to_one_of_two_waits(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    for n in range(2):
        await runs.apply(store, runs.wait_for(held, f"wait:go#{n}", runs.on_signal("go"), suspend=False))
    await runs.apply(store, runs.signal(held.run, "go", "only"))
    states = await pg.fetch("select key, state from perdure.waits order by seq")
    assert [tuple(row) for row in states] == [("wait:go#0", "satisfied"), ("wait:go#1", "open")]


@pytest.mark.parametrize("signal_first", [True, False])
async def test_through_two_gateways(cluster: Cluster, signal_first: bool) -> None:
    a, b = await cluster.start("a", "b")
    api = cluster.api(b)
    run = await api.create()
    pod = await cluster.holder(a)

    async def wait() -> wire.WaitAnswer:
        return await pod.wait(KEY, signal("go"))

    async def send() -> dict[str, Any]:
        return await api.signal(run, "go", {"n": 1}, key="one")

    # Both gateways skip the locked row, go to their slow lanes and wait there.
    if signal_first:
        _, answer = await in_order(cluster.dsn, run, send, wait)
        assert answer.status == "done"
        [fired] = answer.outcomes[KEY].fired
        assert (fired.id, bytes(fired.payload)) == ("one", b'{"n":1}')
        assert pod.heard(wire.LeaseLost) == 0
    else:
        answer, _ = await in_order(cluster.dsn, run, wait, send)
        assert answer.status == "suspended"
        context = await (await cluster.pod(a)).lease()
        [entry] = [e for e in context.journal if e.key == KEY]
        assert entry.state == "satisfied"
        assert [reason.id for reason in context.reasons] == ["one"]
    assert await bound(cluster.pg, run) == [("one", KEY)]
    assert await a.metric("perdure_slow_lane_total") == 1
    assert await b.metric("perdure_slow_lane_total") == 1


async def test_a_held_wait_hears_of_its_signal_at_once(cluster: Cluster) -> None:
    """A wait that keeps its pod is told by a push, also when the signal came in at another gateway."""
    a, b = await cluster.start("a", "b")
    run = await cluster.api(b).create()
    pod = await cluster.holder(a)
    assert (await pod.wait(KEY, signal("go"), suspend=False)).status == "open"
    await cluster.api(b).signal(run, "go", "payload")
    poke = await pod.poke()
    assert bytes(poke.outcomes[KEY].fired[0].payload) == b'"payload"'
    # The journal says the same to whoever asks again.
    assert (await pod.wait(KEY, signal("go"))).outcomes == poke.outcomes


async def test_suspend_on_several_waits_is_refused_or_answered_never_lost(database: str, store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    for name in ("x", "y"):
        await runs.apply(store, runs.wait_for(held, f"wait:{name}#0", runs.on_signal(name), suspend=False))
    unknown = await runs.apply(store, runs.work(held, "suspend", waits=["wait:z#0"]))
    assert unknown.code == "wait-conflict"
    _, suspended = await in_order(
        database,
        held.run,
        lambda: runs.apply(store, runs.signal(held.run, "y", "1")),
        lambda: runs.apply(store, runs.work(held, "suspend", waits=["wait:x#0", "wait:y#0"])),
    )
    assert suspended.answer["status"] == "done"
    assert list(suspended.answer["outcomes"]) == ["wait:y#0"]
    assert suspended.state == "Running"
