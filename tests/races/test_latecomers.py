"""What comes late, or in the moment in which something else is decided, changes nothing that was decided or acknowledged before."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn, cast
from uuid import UUID, uuid4

import asyncpg
import pytest
from aiohttp import WSMessage, WSMsgType, web
from tests.harness import runs
from tests.harness.cluster import Cluster
from tests.harness.pods import signal
from tests.harness.postgres import move_clock, waiters

from perdure import protocol as wire
from perdure_operator.gateway.auth import PodIdentity
from perdure_operator.gateway.pods import Hub
from perdure_operator.gateway.pools import Pools
from perdure_operator.services.reaper import Reaper
from perdure_operator.store import batch
from perdure_operator.store.operations import Control, Outcome
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Beat, Store


def spec(held: runs.Held, generation: int, state: str, priority: int) -> Control:
    body = {"generation": generation, "desiredState": state, "priority": priority}
    return Control(held.run, "spec", body | dict.fromkeys(("activeLimitMs", "deadlineSeconds", "maxToolRetries")))


async def test_a_leader_that_wakes_up_does_not_bring_back_an_older_spec(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    await pg.execute(
        "insert into perdure.resources (run_id, uid, name, generation, changed_seq) values ($1, gen_random_uuid(), 'n', 1, 1)", held.run
    )
    for generation, state, priority in ((3, "Running", 50), (2, "Suspended", 0)):
        assert (await runs.apply(store, spec(held, generation, state, priority))).code == "ok"
    found = await pg.fetchrow("select spec_paused, priority, c.generation from perdure.runs join perdure.resources c using (run_id)")
    assert found is not None
    assert tuple(found) == (False, 50, 3)
    await runs.apply(store, spec(held, 4, "Suspended", 7))
    assert tuple(await pg.fetchrow("select spec_paused, priority from perdure.runs") or ()) == (True, 7)


@pytest.mark.parametrize("kind", ["suspend", "wait"])
async def test_a_request_that_changed_nothing_gets_the_same_answer_late(store: Store, pg: asyncpg.Connection, kind: str) -> None:
    """Executed anew it would listen again where the agent has given up, and take the signal that another wait is to get."""
    held = await runs.running(store)
    await runs.apply(store, runs.wait_for(held, "w1", runs.on_signal("a"), suspend=False))
    await runs.apply(store, runs.signal(held.run, "a", "1"))
    late = runs.wait_for(held, "w1", runs.on_signal("a")) if kind == "wait" else runs.work(held, "suspend", waits=["w1"], abandoned=[])
    first = await runs.apply(store, late)
    assert first.answer["status"] == "done"
    other = runs.wait_for(held, "w2", runs.on_signal("b"), suspend=False)
    other.body["abandoned"] = [{"key": "w1", "seconds": 1.0}]
    await runs.apply(store, other)
    again = await runs.apply(store, late)
    assert (again.code, again.answer["status"], again.state) == ("ok", "done", "Running")
    assert await pg.fetchval("select bound_key from perdure.wakeups") is None
    assert await pg.fetchval("select state from perdure.waits where key = 'w1'") == "closed"


async def test_a_wait_that_is_asked_for_again_and_again_keeps_its_outcome_once(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    await runs.apply(store, runs.wait_for(held, "w", runs.on_signal("a"), suspend=False))
    await runs.apply(store, runs.signal(held.run, "a", "1", b'"' + b"x" * 900 + b'"'))
    asked = [runs.wait_for(held, "w", runs.on_signal("a")) for _ in range(20)]
    first = [(await runs.apply(store, request)).answer for request in asked]
    assert [(await runs.apply(store, request)).answer for request in asked] == first
    assert first[0]["outcomes"]["w"]["fired"][0]["payload"]
    assert await pg.fetchval("select max(length(answer::text)) from perdure.requests where answer ? 'decided'") < 100


async def test_a_lease_that_was_granted_at_a_gateway_which_its_pod_has_left_tells_its_news_at_the_new_one(
    store: Store, pg: asyncpg.Connection, database: str
) -> None:
    """The grant is being committed there while the pod says hello here, and waits for its own row."""
    run = await runs.pending(store)
    pod = await runs.idle_pod(store, gateway="left")
    other = await asyncpg.connect(database)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("select * from perdure.dispatch('left', $1)", [pod])
    hello = asyncio.create_task(store.pod_hello(pod, "default/p", "new", reuse=False, nth=2))
    await waiters(database, 1)
    await transaction.commit()
    await other.close()
    assert (await hello).run == run
    assert [news.run for news in await store.news("new")] == [run]


async def test_a_late_resume_does_not_end_a_pause_that_came_after_it(store: Store) -> None:
    held = await runs.running(store)
    resume = runs.verb(held.run, "resume")
    await runs.apply(store, resume)
    await runs.apply(store, runs.verb(held.run, "pause"))
    await runs.apply(store, resume)
    [alive] = await store.heartbeat(runs.GATEWAY, [Beat(held.run, held.fence.epoch, held.fence.holder)], [])
    assert alive.pause


@pytest.mark.parametrize("acknowledged", ["before the parent ends", "while the parent ends"])
async def test_an_acknowledged_detach_holds(store: Store, pg: asyncpg.Connection, database: str, acknowledged: str) -> None:
    parent = await runs.running(store)
    spawn, child = runs.spawn(parent, "k")
    await runs.apply(store, spawn)
    other = await asyncpg.connect(database)
    transaction = other.transaction()
    await transaction.start()
    [detached] = await batch.control(other, [Control(child, "detach", {"by": "orphan"})], wait=True)
    assert detached.code == "ok"
    if acknowledged == "before the parent ends":
        await transaction.commit()
    await runs.apply(store, runs.work(parent, "finish", outcome="succeeded"))
    if acknowledged == "while the parent ends":
        await transaction.commit()
    await other.close()
    await store.control([runs.settle(run) for run in await store.unapplied_runs()])
    assert await store.unapplied_runs() == []
    row = await pg.fetchrow("select state, cancel_requested, parent_policy from perdure.runs where run_id = $1", child)
    assert tuple(row or ()) == ("Pending", False, "detach")


async def test_a_detach_after_the_cancel_is_not_acknowledged(store: Store) -> None:
    parent = await runs.running(store)
    spawn, child = runs.spawn(parent, "k")
    await runs.apply(store, spawn)
    held = await runs.lease_next(store)
    assert held.run == child
    await runs.apply(store, runs.work(parent, "finish", outcome="succeeded"))
    await runs.apply(store, runs.settle(child))
    assert (await runs.apply(store, Control(child, "detach", {"by": "orphan"}))).code == "cancel-requested"


async def test_a_lease_whose_beat_is_being_committed_does_not_expire(store: Store, pg: asyncpg.Connection, database: str) -> None:
    held = await runs.running(store)
    await move_clock(pg, 20)
    other = await asyncpg.connect(database)
    transaction = other.transaction()
    await transaction.start()
    beat = ([held.run], [held.fence.epoch], [held.fence.holder])
    await other.execute("select * from perdure.heartbeat('test', $1, $2, $3, '{}')", *beat)
    expiring = asyncio.create_task(runs.apply(store, Control(held.run, "expire", held.lease | {"silentSeconds": 15})))
    await waiters(database, 1)
    await transaction.commit()
    await other.close()
    assert (await expiring).answer == {"expired": False}


async def test_a_pod_that_starts_slowly_is_left_to_its_fleet(store: Store, pg: asyncpg.Connection) -> None:
    """It may wait for a node, or for an image, for as long as the fleet allows; an idle one that nobody hears of is no capacity."""
    resources = Resources(store)
    term = await resources.lead("operator", "me", 6)
    assert term is not None
    await store.upsert_pool("default", "p", {}, None)
    slow, idle = uuid4(), await runs.idle_pod(store)
    assert await resources.register_pod(slow, "default/p", "r", term=term)
    await move_clock(pg, 599)

    async def apply(operation: Control) -> Outcome:
        return await runs.apply(store, operation)

    await Reaper(store, apply, lease_seconds=15).look(0.0)
    states = dict(await pg.fetch("select pod_id, state from perdure.pods"))
    assert states == {slow: "starting", idle: "retiring"}


async def test_a_wake_reaches_a_pod_that_reconnects_in_that_moment(cluster: Cluster, database: str) -> None:
    """Its lease has been read for redelivery when the signal comes, and is not there yet: whatever is told now nobody hears."""
    gateway, api = await cluster.one(lease_seconds=8)
    bystander = await cluster.pod(gateway)  # its lease makes the gateway ask for news
    await api.create()
    await bystander.lease()
    pod = await cluster.pod(gateway)
    run = await api.create()
    await pod.lease()
    assert (await pod.wait("wait:x#0", signal("go"), suspend=False, name="x")).status == "open"
    gate = await asyncpg.connect(database)
    closed = gate.transaction()
    await closed.start()
    await gate.execute("lock table perdure.checkpoints in access exclusive mode")  # read after the journal, in the same context
    await pod.cut()
    connecting = asyncio.create_task(pod.connect(gateway, pod.hello()))
    await waiters(database, 1)
    await api.signal(run, "go")
    told = "select told = poke from perdure.leases where run_id = $1::text::uuid"
    async with asyncio.timeout(10):
        while not await cluster.pg.fetchval(told, run):
            await cluster.pg.execute("select pg_sleep(0.01)")
    await closed.rollback()
    await gate.close()
    await connecting
    context = await pod.lease()
    assert [(entry.key, entry.state) for entry in context.journal] == [("wait:x#0", "open")]
    async with asyncio.timeout(2):  # a beat of this lease
        while "wait:x#0" not in (await pod.poke()).outcomes:
            pass
    assert await pod.finish() == "Succeeded"


class Wire:
    """The socket of a pod that says hello and listens."""

    def __init__(self, hello: wire.Hello) -> None:
        self.hello, self.heard = wire.encode_frame(hello), list[wire.FromGateway]()

    async def receive(self) -> WSMessage:
        return WSMessage(WSMsgType.BINARY, self.hello, "")

    def __aiter__(self) -> Wire:
        return self

    async def __anext__(self) -> NoReturn:
        raise StopAsyncIteration

    async def send_bytes(self, data: bytes) -> None:
        self.heard.append(wire.decode_from_gateway(data))


@pytest.mark.parametrize("known", [True, False])
async def test_a_lease_that_ended_before_it_was_read_is_not_delivered(store: Store, known: bool) -> None:
    """A run keeps its epoch when it is suspended: the state says that nobody holds it."""
    held = await runs.running(store)
    await runs.apply(store, runs.wait_for(held, "w", runs.on_signal("go"), suspend=False))

    class Suspending:
        """The store; between hello and the reading of the run its suspension is committed, which a gateway before had in its hands."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def context(self, run: UUID, *portion: Any) -> Any:
            outcome = await runs.apply(store, runs.work(held, "suspend", waits=["w"], abandoned=[]))
            assert outcome.state == "Suspended"
            return await store.context(run, *portion)

    belief = {"run": str(held.run), "epoch": held.fence.epoch} if known else {}
    socket = Wire(wire.Hello(protocol=wire.PROTOCOL_VERSION, sidecar="t", connection=1, **belief))
    hub = Hub(cast(Store, Suspending()), runs.GATEWAY, cast(Pools, None), lease_seconds=15, kick=lambda: None)
    await hub.serve(PodIdentity(held.fence.holder, "default/p"), cast(web.WebSocketResponse, socket))
    assert hub.holder(held.run) is None
    assert [type(frame) for frame in socket.heard] == [wire.Welcome, wire.LeaseLost] if known else [wire.Welcome]
