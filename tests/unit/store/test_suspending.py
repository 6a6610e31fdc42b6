"""Suspending looks at everything that is due, not at the waits alone; and a stale beat renews nobody's lease."""

from __future__ import annotations

import uuid

import asyncpg

from perdure_operator.store.operations import Control, Fence, Outcome
from perdure_operator.store.store import Beat, NewRun, Store

COLUMNS = {
    "namespace": "ns",
    "pool": "ns/p",
    "max_retries": 3,
    "backoff_seconds": 0,
    "max_backoff_seconds": 0,
    "max_losses": 3,
    "max_tool_retries": 3,
    "grace_seconds": 10,
    "spec": {},
}


async def running(store: Store, run: uuid.UUID | None = None) -> tuple[uuid.UUID, Fence]:
    """A run that a pod of gateway ``g`` holds; a new one, or ``run`` once more."""
    if run is None:
        await store.upsert_pool("ns", "p", {}, None)
        run = uuid.uuid4()
        await store.create_runs([NewRun({**COLUMNS, "run_id": run, "name": str(run)}, b"null")])
    pod = uuid.uuid4()
    await store.pod_hello(pod, "ns/p", "g", reuse=False, run=None, epoch=None)
    [grant] = await store.dispatch("g", [pod])
    assert grant.run == run
    return run, Fence(grant.epoch, pod)


async def finished_child(store: Store, run: uuid.UUID, fence: Fence) -> uuid.UUID:
    """One that has succeeded, and whose parent has not been settled since."""
    child = uuid.uuid4()
    spec = {**COLUMNS, "run_id": child, "name": str(child)}
    await store.control([Control(run, "spawn", {"key": "c", "run": spec}, fence, uuid.uuid4(), b"null", child)])
    held, its = await running(store, child)
    await store.control([Control(held, "finish", {"outcome": "succeeded"}, its, uuid.uuid4(), b"1")])
    return child


def wait(run: uuid.UUID, fence: Fence, kind: str, name: str) -> Control:
    body = {"key": "w", "name": "w", "mode": "any", "on": [{"kind": kind, "name": name}], "timeoutSeconds": None, "suspend": True}
    return Control(run, "wait", body, fence, uuid.uuid4())


async def test_a_cancel_before_the_suspension_cancels(database: str) -> None:
    store = await Store.connect(database)
    run, fence = await running(store)
    await store.control([Control(run, "cancel", {"by": "test", "reason": ""}, request=uuid.uuid4())])
    [outcome] = await store.control([wait(run, fence, "signal", "never")])
    assert outcome.state == "Cancelled"
    assert await store.verify() == []
    await store.close()


async def test_a_child_that_is_done_but_not_applied_wakes_at_the_suspension(database: str) -> None:
    store = await Store.connect(database)
    run, fence = await running(store)
    child = await finished_child(store, run, fence)
    [outcome] = await store.control([wait(run, fence, "child_done", str(child))])
    assert outcome.state == "Pending"
    assert await store.verify() == []
    await store.close()


async def test_a_stale_beat_renews_no_lease(database: str) -> None:
    store = await Store.connect(database)
    run, old = await running(store)
    await store.pod_gone(old.holder, "PodKilled")
    _, heir = await running(store, run)
    connection = await asyncpg.connect(database)
    before = await connection.fetchval("select beat_at from perdure.leases where run_id = $1", run)
    for epoch, holder in ((old.epoch, old.holder), (old.epoch, heir.holder), (heir.epoch, old.holder)):
        assert await store.heartbeat("g", [Beat(run, epoch, holder)], []) == []
    assert await connection.fetchval("select beat_at from perdure.leases where run_id = $1", run) == before
    assert [alive.run for alive in await store.heartbeat("g", [Beat(run, heir.epoch, heir.holder)], [])] == [run]
    await connection.close()
    await store.close()


async def test_what_an_abandoned_wait_has_taken_is_there_again(store: Store, pg: asyncpg.Connection) -> None:
    run, fence = await running(store)

    async def waited(key: str, *abandoned: str, suspend: bool = False) -> Outcome:
        on = [{"kind": "signal", "name": "a"}]
        body = {
            "key": key,
            "name": "w",
            "mode": "any",
            "on": on,
            "suspend": suspend,
            "abandoned": [{"key": key, "seconds": 1.5} for key in abandoned],
        }
        [outcome] = await store.control([Control(run, "wait", body, fence, uuid.uuid4())])
        return outcome

    async def signalled(id_: str) -> None:
        await store.control([Control(run, "signal", {"name": "a", "id": id_}, None, uuid.uuid4(), b"1")])

    assert (await waited("w#0")).answer["status"] == "open"
    await signalled("taken by nobody")
    [outcome] = (await waited("w#1", "w#0")).answer["outcomes"].values()
    assert outcome["fired"][0]["id"] == "taken by nobody"
    assert (await waited("w#2", "w#0", "none")).answer["status"] == "open"
    journal = await pg.fetchrow("select state, output from perdure.journal where run_id = $1 and key = 'w#0'", run)
    assert tuple(journal) == ("abandoned", b"\x001.5")
    assert (await waited("w#0")).answer["status"] == "open", "it listens again, and is older"
    await signalled("for the first")
    [outcome] = (await waited("w#0")).answer["outcomes"].values()
    assert outcome["fired"][0]["id"] == "for the first"
    assert (await waited("w#2", suspend=True)).answer["status"] == "suspended"
    kinds = await pg.fetch("select data ->> 'key' from perdure.events where run_id = $1 and kind = 'wait.abandoned'", run)
    assert [row[0] for row in kinds] == ["w#0"]


async def test_a_wait_for_who_is_no_child_is_refused(store: Store) -> None:
    run, fence = await running(store)
    on = [{"kind": "child_done", "name": str(run)}]
    body = {"key": "w#0", "name": "w", "mode": "any", "on": on, "suspend": False}
    [outcome] = await store.control([Control(run, "wait", body, fence, uuid.uuid4())])
    assert (outcome.code, outcome.detail) == ("invalid-input", "a child_done condition names a run that is no child of this one")


async def test_a_wait_instead_of_another_keeps_its_times_and_has_its_good_signals_again(store: Store, pg: asyncpg.Connection) -> None:
    run, fence = await running(store)
    on = [{"kind": "signal", "name": "a"}, {"kind": "signal", "name": "b"}, {"kind": "timer", "seconds": 0.0}]
    body = {"name": "w", "mode": "all", "on": on, "timeoutSeconds": 60.0, "suspend": False, "fingerprint": "f"}

    async def waited(key: str, **more: object) -> Outcome:
        [outcome] = await store.control([Control(run, "wait", body | {"key": key} | more, fence, uuid.uuid4())])
        return outcome

    for name, id_ in (("a", "good"), ("b", "bad")):
        await store.control([Control(run, "signal", {"name": name, "id": id_}, None, uuid.uuid4(), b"1")])
    assert (await waited("w#0")).answer["status"] == "done"
    assert (await waited("w#0~1", insteadOf="w#0", dropped=[1], fingerprint="other")).code == "wait-conflict"
    await pg.execute("update perdure.clock set shift = interval '61 seconds'")

    [outcome] = (await waited("w#0~1", insteadOf="w#0", dropped=[1])).answer["outcomes"].values()

    # The first wait's timeout has passed; "a" is free again, "b" is used up.
    assert outcome["status"] == "timed_out"
    bound = await pg.fetch("select id, bound_key from perdure.wakeups where run_id = $1 order by id", run)
    assert list(map(tuple, bound)) == [("bad", "w#0"), ("good", None)]
    times = await pg.fetch("select key, timeout_at, due_at from perdure.waits where run_id = $1 order by key", run)
    assert times[0]["timeout_at"] == times[1]["timeout_at"]
    again = await pg.fetch("select at from perdure.wait_conditions where run_id = $1 and idx = 2 order by key", run)
    assert again[0]["at"] == again[1]["at"]
    assert await store.verify() == []


async def test_a_child_that_two_waits_wait_for_stays_with_the_first(database: str) -> None:
    """What a wakeup was bound to is history: a second wait for it has its outcome, and takes nothing away."""
    store = await Store.connect(database)
    run, fence = await running(store)
    child = await finished_child(store, run, fence)
    await store.control([Control(run, "settle", {})])
    for key in ("first", "second"):
        on = [{"kind": "child_done", "name": str(child)}]
        body = {"key": key, "name": "w", "mode": "any", "on": on, "timeoutSeconds": None, "suspend": True}
        [outcome] = await store.control([Control(run, "wait", body, fence, uuid.uuid4())])
        assert outcome.answer["status"] == "done"
    connection = await asyncpg.connect(database)
    assert await connection.fetchval("select bound_key from perdure.wakeups where run_id = $1", run) == "first"
    assert await store.verify() == []
    await connection.close()
    await store.close()
