"""Operations of many strangers share a commit: one that fails harms nobody else, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.cluster import Cluster
from tests.harness.pods import FakePod, decoded, signal
from tests.harness.postgres import break_run, mend_run, row_counts

from perdure import protocol as wire
from perdure_operator.domain.errors import StoreError
from perdure_operator.store.operations import SliceWrite
from perdure_operator.store.store import Store

PODS = 6


async def together(cluster: Cluster, pods: list[FakePod], body: wire.Body) -> list[wire.Answer | wire.Refusal]:
    """The same operation of every pod, so that they meet in one batch: the gateway is frozen until all have been sent."""
    [gateway] = cluster.gateways
    gateway.freeze()
    open_ = [pod.ask(body) for pod in pods]
    await asyncio.gather(*(pod.flushed() for pod in pods))
    gateway.thaw()
    return list(await asyncio.gather(*open_))


@pytest.mark.parametrize(
    ("body", "table"),
    [
        (wire.StepEnd(key="step:x#0", name="x"), "journal"),
        (wire.EventAppend(kind="x"), "events"),
        (wire.WaitBegin(key="wait:x#0", on=[signal("x")], suspend=True), "waits"),
    ],
    ids=["steps", "events", "waits"],
)
async def test_an_unexpected_error_hits_only_its_own_run(cluster: Cluster, body: wire.Body, table: str) -> None:
    gateway, api = await cluster.one()
    cluster.expected_errors.append("operation failed")
    await api.create_many([f"r{n}" for n in range(PODS)])
    pods = [await cluster.holder(gateway) for _ in range(PODS)]
    bad = pods[2]
    assert bad.run is not None
    await break_run(cluster.pg, bad.run, table)
    frames = await together(cluster, pods, body)
    assert await gateway.metric("perdure_batch_replays_total") >= 1
    for pod, frame in zip(pods, frames, strict=True):
        if pod is bad:
            assert isinstance(frame, wire.Refusal)
            assert (frame.problem.type, frame.problem.status, frame.problem.retryable) == ("urn:perdure:internal", 500, False)
        else:
            assert isinstance(frame, wire.Answer), frame
    kinds = await api.kinds(bad.run)
    assert kinds == ["run.created", "run.leased"]
    # The connection of the bad one is as good as before.
    await mend_run(cluster.pg, bad.run)
    decoded(await bad.ask(body))


async def test_a_refused_operation_rolls_back_alone(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create_many([f"r{n}" for n in range(PODS)])
    pods = [await cluster.holder(gateway) for _ in range(PODS)]
    await pods[0].op(wire.EventAppend(kind="first"))
    before = await row_counts(cluster.pg)
    frames = await together(cluster, pods, wire.EventAppend(kind="x", expected_seq=2))
    assert isinstance(frames[0], wire.Refusal)
    assert frames[0].problem.type == "urn:perdure:concurrent-append"
    assert frames[0].problem.retryable
    assert all(isinstance(frame, wire.Answer) for frame in frames[1:])
    after = await row_counts(cluster.pg)
    assert after["events"] - before["events"] == PODS - 1
    assert await gateway.metric("perdure_batch_replays_total") == 0


async def test_what_a_refused_operation_had_written_is_gone(store: Store, pg: asyncpg.Connection) -> None:
    """A spawn writes the log and the journal before the name turns out to be taken."""
    await runs.pending(store, name="taken", spec_paused=True)
    first, second = await runs.running(store), await runs.running(store)
    spawn, _ = runs.spawn(first, "spawn:c#0")
    spawn.body["run"]["name"] = "taken"
    event = runs.work(second, "event", kind="x", expectedSeq=None)
    before = await row_counts(pg)
    refused, done = await store.control([spawn, event])
    assert (refused.code, done.code) == ("name-taken", "ok")
    after = await row_counts(pg)
    assert {table: after[table] - before[table] for table in after if after[table] != before[table]} == {"events": 1, "requests": 1}


async def test_the_store_aborts_a_batch_as_a_whole(store: Store, pg: asyncpg.Connection) -> None:
    """What the gateway's replay one by one stands on."""
    good, bad = await runs.running(store), await runs.running(store)
    await break_run(pg, bad.run, "journal")
    before = await row_counts(pg)
    with pytest.raises(StoreError, match="broken on purpose"):
        await store.journal([runs.step(good, "a"), runs.step(bad, "a")])
    assert await row_counts(pg) == before


async def test_slices_of_a_refused_operation_are_not_stored(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    refused = runs.work(held, "event", kind="x", expectedSeq=77)
    kept = runs.work(held, "checkpoint", type="step", coversSeq=0)
    pieces = (SliceWrite("plan", b'"' + b"x" * 5000 + b'"'),)
    [first], [second] = [await store.control([replace(op, slices=pieces)]) for op in (refused, kept)]
    assert (first.code, second.code) == ("concurrent-append", "ok")
    assert await pg.fetchval("select count(*) from perdure.slices") == 1
    assert await pg.fetchval("select count(*) from perdure.blobs") == 1


async def test_an_unknown_run_in_a_batch_is_answered_by_itself(store: Store) -> None:
    held = await runs.running(store)
    stranger = runs.Held(uuid4(), held.fence)
    outcomes = await store.control([runs.work(who, "event", kind="x", expectedSeq=None) for who in (stranger, held)])
    assert [outcome.code for outcome in outcomes] == ["run-not-found", "ok"]
    steps = await store.journal([runs.step(who, "a") for who in (stranger, held)])
    assert [outcome.code for outcome in steps] == ["run-not-found", "ok"]
