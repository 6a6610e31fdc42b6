"""Which run a resource is: by uid, by the label of one that the projector made, by idempotency key, by a name that is free again (K10)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.postgres import move_clock, waiters

from perdure_operator.store.operations import Control
from perdure_operator.store.resources import Admitted, Owner, Resources
from perdure_operator.store.store import NewRun, Store


@dataclass
class Cluster:
    """Resources as a cluster would show them."""

    store: Store
    resources: Resources = field(init=False)

    def __post_init__(self) -> None:
        self.resources = Resources(self.store)

    async def apply(
        self, name: str, *, uid: UUID | None = None, generation: int = 1, bound: UUID | None = None, **columns: Any
    ) -> Admitted:
        run = NewRun(runs.columns(name=name, **columns), b'{"a": 1}')
        return await self.resources.admit(uid or uuid4(), generation, run, bound=bound)

    async def end(self, run: UUID | None) -> None:
        assert run is not None
        assert (await runs.apply(self.store, runs.verb(run, "cancel"))).state == "Cancelled"


@pytest.fixture
async def cluster(store: Store) -> Cluster:
    await store.upsert_pool("default", "p", runs.POOL, None)
    return Cluster(store)


async def test_a_resource_is_its_run_and_no_other(cluster: Cluster) -> None:
    uid = uuid4()
    first = await cluster.apply("report", uid=uid)
    again = await cluster.apply("report", uid=uid)
    assert (first.decision, again.decision) == ("created", "known")
    assert first.run == again.run
    found = await cluster.resources.find(uid)
    assert found is not None
    assert (found.run, found.generation, found.ended) == (first.run, 1, False)
    assert await cluster.resources.find(uuid4()) is None


async def test_the_same_name_waits_until_the_earlier_run_has_ended(cluster: Cluster) -> None:
    earlier = await cluster.apply("report")
    uid = uuid4()
    waiting = await cluster.apply("report", uid=uid)
    assert (waiting.decision, waiting.run) == ("wait", earlier.run)
    await cluster.end(earlier.run)
    later = await cluster.apply("report", uid=uid)
    assert later.decision == "created"
    assert later.run != earlier.run
    async with cluster.store.reader() as reader:
        assert await reader.find("default", "report") == later.run
        assert await reader.find("default", str(earlier.run)) == earlier.run


async def test_two_operators_that_admit_one_resource_make_one_run(cluster: Cluster) -> None:
    uid = uuid4()
    found = await asyncio.gather(*(cluster.apply("report", uid=uid) for _ in range(8)))
    assert len({one.run for one in found if one.run is not None}) == 1
    assert [one.decision for one in found].count("created") == 1
    assert {one.decision for one in found} <= {"created", "known", "wait"}
    assert not [one for one in found if one.decision == "wait" and one.run is not None], "a run that is waited for is cancelled"


async def test_a_run_without_a_resource_keeps_its_name(cluster: Cluster) -> None:
    run = await runs.pending(cluster.store, name="report")
    refused = await cluster.apply("report")
    assert (refused.decision, refused.run) == ("name-taken", run)
    await cluster.end(run)
    assert (await cluster.apply("report")).decision == "created"


async def test_an_idempotency_key_adopts_what_was_done(cluster: Cluster) -> None:
    uid = uuid4()
    first = await cluster.apply("report", uid=uid, idempotency_key="2026-47")
    await cluster.end(first.run)
    await cluster.resources.gone(uid)
    second = uuid4()
    adopted = await cluster.apply("report", uid=second, idempotency_key="2026-47")
    assert (adopted.decision, adopted.run, adopted.state) == ("adopted", first.run, "Cancelled")
    assert await cluster.resources.find(uid) is None
    [due] = await cluster.resources.due(10, progress_seconds=30, wake_seconds=3)
    assert due.uid == second, "its status has to be written, though nothing happens any more"
    assert await cluster.store.runnable_pools(["default/p"]) == []


async def test_a_key_of_a_living_resource_is_taken(cluster: Cluster) -> None:
    first = await cluster.apply("one", idempotency_key="k")
    assert (await cluster.apply("two", idempotency_key="k")).decision == "key-taken"
    await cluster.end(first.run)
    assert (await cluster.apply("two", idempotency_key="k")).decision == "key-taken", "the first resource is still there"


async def test_a_key_whose_run_is_being_cancelled_is_waited_for(cluster: Cluster) -> None:
    uid = uuid4()
    first = await cluster.apply("one", uid=uid, idempotency_key="k")
    held = await runs.lease_next(cluster.store)
    assert held.run == first.run
    await runs.apply(cluster.store, runs.verb(held.run, "cancel"))
    await cluster.resources.gone(uid)
    assert (await cluster.apply("one", idempotency_key="k")).decision == "wait"
    await runs.apply(cluster.store, runs.work(held, "finish", outcome="cancelled"))
    assert (await cluster.apply("one", idempotency_key="k")).decision == "adopted"


async def test_a_key_of_a_run_without_a_resource_is_adopted_alive(cluster: Cluster) -> None:
    run = await runs.pending(cluster.store, name="other", idempotency_key="k")
    uid = uuid4()
    adopted = await cluster.apply("mine", uid=uid, idempotency_key="k")
    assert (adopted.decision, adopted.run, adopted.state) == ("adopted", run, "Pending")
    found = await cluster.resources.find(uid)
    assert found is not None
    assert found.generation == 0, "it was not told the resource's spec yet"


async def spawned(cluster: Cluster, name: str) -> UUID:
    """A child whose resource is not made yet."""
    await cluster.apply("parent")
    spawn, child = runs.spawn(await runs.lease_next(cluster.store), f"spawn:{name}#0", name=name)
    assert (await runs.apply(cluster.store, spawn)).code == "ok"
    return child


async def test_projector_and_controller_bind_a_child_at_once(cluster: Cluster, pg: asyncpg.Connection, database: str) -> None:
    """The watch may bring the new resource before the projector has committed that it made it."""
    child = await spawned(cluster, "child")
    uid = uuid4()
    async with pg.transaction():
        await pg.execute("update perdure.resources set uid = $2 where run_id = $1", child, uid)
        admitting = asyncio.create_task(cluster.apply("child", uid=uid, bound=child))
        await waiters(database, 1)
    assert await admitting == Admitted("bound", child, "Pending")
    assert await cluster.apply("child", uid=uid, bound=child) == Admitted("known", child, "Pending")


async def test_a_resource_of_somebody_else_ends_no_child(cluster: Cluster) -> None:
    """The child's own resource is not made yet, and now it cannot be."""
    child = await spawned(cluster, "child")
    assert await cluster.apply("child") == Admitted("name-taken", child, "Pending")


async def test_a_child_of_a_resource_gets_one_and_is_bound_by_its_label(cluster: Cluster, pg: asyncpg.Connection) -> None:
    parent_uid = uuid4()
    parent = await cluster.apply("parent", uid=parent_uid)
    held = await runs.lease_next(cluster.store)
    spawn, child = runs.spawn(held, "spawn:c#0", name="child")
    wide, row_only = runs.spawn(held, "spawn:w#0", name="wide")
    wide.body["recording"] = "StoreOnly"
    assert {(await runs.apply(cluster.store, op)).code for op in (spawn, wide)} == {"ok"}
    [unmade] = await cluster.resources.unmade(10)
    assert await cluster.resources.unmade(10, besides=["default"]) == []
    assert (unmade.run, unmade.name, unmade.owner) == (child, "child", Owner("AgentRun", "parent", parent_uid))
    # Somebody copies the label to an object of another name: it is not believed.
    assert (await cluster.apply("stranger", bound=child)).decision == "created"
    uid = uuid4()
    bound = await cluster.apply("child", uid=uid, bound=child, generation=2)
    assert (bound.decision, bound.run) == ("bound", child)
    found = await cluster.resources.find(uid)
    assert found is not None
    assert found.generation == 1, "somebody has changed the spec since the projector wrote it"
    assert await cluster.resources.unmade(10) == []
    assert [one.run for one in await cluster.resources.children(parent.run or uuid4())] == [child]
    assert await pg.fetchval("select count(*) from perdure.resources where run_id = $1", row_only) == 0


async def test_what_has_moved_is_due_and_progress_now_and_then(cluster: Cluster, pg: asyncpg.Connection) -> None:
    uid = uuid4()
    await cluster.apply("report", uid=uid)

    async def due() -> list[int]:
        found = await cluster.resources.due(10, progress_seconds=30, wake_seconds=3)
        await cluster.resources.projected(found)
        return [one.row["last_seq"] for one in found]

    assert await due() == [1]
    assert await due() == []
    held = await runs.lease_next(cluster.store)
    assert await due() == [2]
    await cluster.store.journal([runs.step(held, f"step:{n}#0") for n in range(5)], wait=True)
    assert await due() == [], "steps cost the cluster nothing"
    await move_clock(pg, 31)
    assert await due() == [7]
    await runs.apply(cluster.store, runs.work(held, "finish", outcome="succeeded"))
    assert await due() == [8]


async def test_a_woken_run_is_told_of_when_it_runs_or_when_it_takes_too_long(cluster: Cluster, pg: asyncpg.Connection) -> None:
    await cluster.apply("report")
    held = await runs.lease_next(cluster.store)

    async def due() -> list[str]:
        found = await cluster.resources.due(10, progress_seconds=30, wake_seconds=3)
        await cluster.resources.projected(found)
        return [one.row["state"] for one in found]

    async def sleeps_and_is_woken(n: int) -> None:
        await runs.apply(cluster.store, runs.wait_for(held, f"wait:go#{n}", runs.on_signal("go")))
        assert await due() == ["Suspended"]
        await runs.apply(cluster.store, runs.signal(held.run, "go", str(n)))
        assert await due() == []

    await sleeps_and_is_woken(0)
    held = await runs.lease_next(cluster.store)
    assert await due() == ["Running"]
    await sleeps_and_is_woken(1)
    await move_clock(pg, 4)
    assert await due() == ["Pending"]


async def test_a_pause_is_due_though_nothing_moves(cluster: Cluster) -> None:
    """Else `kubectl get agentruns` goes on saying that it waits for a signal."""
    applied = await cluster.apply("report")
    held = await runs.lease_next(cluster.store)
    assert (await runs.apply(cluster.store, runs.wait_for(held, "wait:go#0", runs.on_signal("go")))).state == "Suspended"

    async def due() -> list[bool]:
        found = await cluster.resources.due(10, progress_seconds=30, wake_seconds=3)
        await cluster.resources.projected(found)
        return [one.row["paused"] or one.row["spec_paused"] for one in found]

    run = applied.run or uuid4()
    assert (await due(), await due()) == ([False], [])
    for steer, paused in (
        (runs.verb(run, "pause"), True),
        (runs.verb(run, "resume"), False),
        (Control(run, "spec", {"generation": 2, "desiredState": "Suspended"}), True),
        (Control(run, "spec", {"generation": 3, "desiredState": "Running"}), False),
    ):
        assert (await runs.apply(cluster.store, steer)).state == "Suspended"
        assert (await due(), await due()) == ([paused], [])


async def test_a_changed_spec_is_told_once_and_whatever_it_says_holds(cluster: Cluster) -> None:
    uid = uuid4()
    run = (await cluster.apply("report", uid=uid)).run
    assert run is not None

    async def tell(generation: int, **spec: Any) -> str | None:
        body = {"generation": generation, "desiredState": "Running", "priority": 0, "activeLimitMs": None, "deadlineSeconds": None, **spec}
        return (await runs.apply(cluster.store, Control(run, "spec", body))).state

    assert await tell(2, desiredState="Suspended") == "Suspended"
    assert await tell(2, desiredState="Suspended") == "Suspended"
    # A person's resume does not overrule the spec: the stricter of the two holds (L8).
    assert (await runs.apply(cluster.store, runs.verb(run, "resume"))).state == "Suspended"
    assert await tell(3, priority=7) == "Pending"
    found = await cluster.resources.find(uid)
    assert found is not None
    assert found.generation == 3
    assert await tell(4, desiredState="Cancelled") == "Cancelled"
    assert await tell(5, desiredState="Running") == "Cancelled"


async def test_a_spec_that_is_told_while_a_status_is_written_is_shown_as_observed(cluster: Cluster) -> None:
    run = (await cluster.apply("report")).run
    assert run is not None
    before = await cluster.resources.due(10, progress_seconds=30, wake_seconds=3)
    body = {"generation": 2, "desiredState": "Running", "priority": 7}
    assert (await runs.apply(cluster.store, Control(run, "spec", body))).code == "ok"
    await cluster.resources.projected(before)
    [due] = await cluster.resources.due(10, progress_seconds=30, wake_seconds=3)
    assert due.generation == 2
    await cluster.resources.projected([due])
    assert await cluster.resources.due(10, progress_seconds=30, wake_seconds=3) == []


async def test_the_lead_has_terms(cluster: Cluster, pg: asyncpg.Connection) -> None:
    lead = cluster.resources.lead
    assert await lead("operator", "a", 6) == 1
    assert await lead("operator", "b", 6) is None
    assert await lead("operator", "a", 6) == 1
    await move_clock(pg, 7)
    assert await lead("operator", "b", 6) == 2
    assert await lead("operator", "a", 6) is None
    await cluster.resources.resign("operator", "b")
    assert await lead("operator", "a", 6) == 3


async def test_only_the_leader_makes_places_for_pods(cluster: Cluster) -> None:
    pod = uuid4()
    assert not await cluster.resources.register_pod(pod, "default/p", "r", term=1)
    await cluster.resources.lead("operator", "a", 6)
    assert not await cluster.resources.register_pod(pod, "default/p", "r", term=2)
    assert await cluster.resources.register_pod(pod, "default/p", "r", term=1)
    kube_uid = uuid4()
    assert await cluster.resources.bind_pod(pod, kube_uid)
    assert await cluster.resources.bind_pod(pod, kube_uid)
    assert not await cluster.resources.bind_pod(pod, uuid4())
    assert await cluster.store.worker_pod(str(kube_uid)) == (pod, "default/p")
    assert await cluster.store.worker_pod(str(uuid4())) is None
