"""A worker that says nothing for a whole lease has lost it (L3), whatever it says later; and our own outage is nobody's silence (R6)."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest
from tests.harness import runs
from tests.harness.api import Refused
from tests.harness.cluster import Cluster
from tests.harness.many import copies
from tests.harness.pods import FakePod, signal
from tests.harness.postgres import move_clock

from perdure import protocol as wire
from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.services.reaper import Reaper
from perdure_operator.store.operations import Control, Fence, Outcome
from perdure_operator.store.store import Beat, Store

LEASE = 1.0


async def begin(pod: FakePod) -> wire.ActivityDecision:
    body = wire.ActivityBegin(tool="send_mail", arguments=msgspec.Raw(b'{"to":"a"}'))
    return await pod.get(wire.ActivityDecision, body)


async def test_a_silent_pod_loses_its_run_and_never_writes_again(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b", lease_seconds=LEASE)
    run = await cluster.api(a).create()
    pod = await cluster.holder(a)
    await pod.step("step:s#0")
    begun = await begin(pod)
    pod.silence()
    heir = await cluster.holder(b)
    assert heir.context is not None
    assert (heir.run, heir.context.attempt) == (run, 2)
    assert [reason.kind for reason in heir.context.reasons] == ["start", "lost"]
    assert [entry.state for entry in heir.context.ledger] == ["UNKNOWN"]

    # The old one wakes up: its words come under an old epoch.
    late: list[wire.Body] = [
        wire.StepEnd(key="step:late#0", name="late"),
        wire.EventAppend(kind="late"),
        wire.CheckpointSave(),
        wire.WaitBegin(key="wait:late#0", on=[signal("x")], suspend=True),
        wire.Spawn(key="spawn:late#0"),
        wire.ActivityBegin(tool="other"),
        wire.Finish(outcome="succeeded"),
    ]
    for body in late:
        with pytest.raises(Refused, match="lease-lost"):
            await pod.op(body)
    assert (await pod.next(wire.LeaseLost)).epoch == 1
    for _ in range(5):
        pod.send(wire.Beat(run=run, epoch=1))
    await pod.flushed()

    # A receipt is evidence: it settles what nobody knew, and the heir does not send the mail again.
    end = wire.ActivityEnd(key=begun.key, token=begun.token or "", state="succeeded", response=msgspec.Raw(b'"id-7"'))
    recorded = await pod.get(wire.ActivityRecorded, end)
    assert (recorded.state, recorded.evidence) == ("SUCCEEDED", True)
    again = await begin(heir)
    assert (again.decision, bytes(again.response)) == ("receipt", b'"id-7"')  # type: ignore[arg-type]
    assert await cluster.pg.fetchval("select holder from perdure.leases") == heir.id
    assert await heir.finish() == "Succeeded"
    assert "step:late#0" not in [row[0] for row in await cluster.pg.fetch("select key from perdure.journal")]
    assert await cluster.pg.fetchval("select count(*) from perdure.runs") == 1


async def test_an_effect_is_not_repeated_while_its_silent_executor_may_still_act(cluster: Cluster) -> None:
    gateway, api = await cluster.one(lease_seconds=LEASE)
    await api.create()
    pod = await cluster.holder(gateway)
    body = wire.ActivityBegin(tool="send_mail", on_unknown="assume-not-done", timeout_seconds=3600)
    first = await pod.get(wire.ActivityDecision, body)
    pod.silence()
    heir = await cluster.holder(gateway)
    waiting = await heir.get(wire.ActivityDecision, body)
    assert waiting.decision == "unknown"
    assert 3500 < waiting.retry_after_seconds <= 3600 + LEASE
    await cluster.store.pod_gone(pod.id, "PodDeleted")
    granted = await heir.get(wire.ActivityDecision, body)
    assert (granted.decision, granted.key, granted.attempt) == ("execute", first.key, 2)
    assert granted.token != first.token


async def test_a_pod_that_comes_back_too_late_is_told_so(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b", lease_seconds=LEASE)
    await cluster.api(a).create()
    pod = await cluster.holder(a)
    await pod.cut()
    heir = await cluster.holder(b)
    await pod.connect(b)
    await pod.next(wire.Retire)
    with pytest.raises(Refused, match="lease-lost"):
        await pod.step("step:late#0")
    assert await heir.finish() == "Succeeded"


async def test_a_pod_that_only_beats_keeps_its_run_under_a_storm_of_signals(cluster: Cluster) -> None:
    """Heartbeats pass over rows that a batch has locked: they must not be passed over for a whole lease."""
    a, b = await cluster.start("a", "b", lease_seconds=LEASE)
    run = await cluster.api(a).create()
    pod = await cluster.holder(a)
    started = asyncio.get_running_loop().time()

    async def storm(n: int) -> None:
        api = cluster.api((a, b)[n % 2])
        while asyncio.get_running_loop().time() < started + 2 * LEASE:
            await api.signal(run, "noise", n)

    await asyncio.gather(*(storm(n) for n in range(6)))
    assert await cluster.pg.fetchval("select epoch from perdure.leases") == 1
    assert pod.lost == []


async def test_a_lease_that_is_locked_at_every_beat_is_renewed_all_the_same(cluster: Cluster) -> None:
    """A beat passes over what is locked. Here it is free for no more than an instant, for two leases long."""
    [gateway] = await cluster.start("a", lease_seconds=LEASE)
    run = await cluster.api(gateway).create()
    pod = await cluster.holder(gateway)
    held = await asyncpg.connect(cluster.dsn)
    until = asyncio.get_running_loop().time() + 2 * LEASE
    while asyncio.get_running_loop().time() < until:
        async with held.transaction():
            await held.execute("select 1 from perdure.leases where run_id = $1::text::uuid for update", run)
            await asyncio.sleep(0.05)
    await held.close()
    assert await cluster.pg.fetchval("select epoch from perdure.leases") == 1
    assert pod.lost == []


async def test_a_lease_that_somebody_sits_on_costs_no_other(cluster: Cluster) -> None:
    [gateway] = await cluster.start("a", lease_seconds=LEASE)
    await cluster.api(gateway).create_many([f"r{n}" for n in range(5)])
    pods = [await cluster.holder(gateway) for _ in range(5)]
    held = await asyncpg.connect(cluster.dsn)
    async with held.transaction():
        await held.execute("select 1 from perdure.leases where run_id = $1::text::uuid for update", pods[0].run)
        await asyncio.sleep(4 * LEASE)
    await held.close()
    assert [pod.lost for pod in pods[1:]] == [[]] * 4


async def test_an_outage_of_postgres_costs_no_lease(own_cluster: Cluster, own_postgres: EmbeddedPostgres) -> None:
    cluster = own_cluster
    a, b = await cluster.start("a", "b", lease_seconds=LEASE)
    names = [f"r{n}" for n in range(6)]
    await cluster.api(a).create_many(names)
    pods = [await cluster.holder((a, b)[n % 2]) for n in range(6)]
    await own_postgres.kill()
    open_ = [pod.ask(wire.StepEnd(key="step:during#0", name="s")) for pod in pods]
    await asyncio.sleep(1.3 * LEASE)  # the outage itself
    await own_postgres.start()
    await cluster.reconnect()
    # Operations that were sent in the outage are answered after it.
    assert all(isinstance(frame, wire.Answer) for frame in await asyncio.gather(*open_))
    await asyncio.sleep(1.4 * LEASE)  # long enough for a reaper that had not waited
    assert await cluster.pg.fetchval("select count(*) from perdure.events where kind = 'run.lost'") == 0
    for pod in pods:
        assert await pod.finish() == "Succeeded"


# ------------------------------------------------------------------------------------------------- the reaper's judgement


class Judged:
    """A reaper on the real store, with a clock of its own; the store's clock is moved along."""

    def __init__(self, store: Store, pg: asyncpg.Connection, lease: float = 10.0) -> None:
        self.store, self.pg = store, pg
        self.now = 1000.0
        self.reaper = Reaper(store, self.apply, lease_seconds=lease)
        self.beat_first: list[runs.Held] = []

    async def apply(self, operation: Control) -> Outcome:
        beats = [Beat(h.run, h.fence.epoch, h.fence.holder) for h in self.beat_first if h.run == operation.run]
        await self.store.heartbeat(runs.GATEWAY, beats, [])
        return await runs.apply(self.store, operation)

    async def passes(self, seconds: float, *, every: float = 1.0) -> int:
        """Looks again and again while this time passes; gives how many leases it ended."""
        ended = 0
        for _ in range(int(seconds / every)):
            self.now += every
            await move_clock(self.pg, every)
            ended += await self.reaper.look(self.now)
        return ended


async def leases(store: Store, pg: asyncpg.Connection, count: int) -> list[runs.Held]:
    new = [await runs.pending(store) for _ in range(count)]
    pods = [await runs.idle_pod(store) for _ in new]
    return [runs.Held(grant.run, Fence(grant.epoch, grant.pod)) for grant in await store.dispatch(runs.GATEWAY, pods)]


async def test_a_few_silent_leases_end(store: Store, pg: asyncpg.Connection) -> None:
    await leases(store, pg, 5)
    judged = Judged(store, pg)
    assert await judged.passes(9) == 0
    assert await judged.passes(3) == 5


async def test_after_a_gap_of_its_own_it_waits_a_whole_lease(store: Store, pg: asyncpg.Connection) -> None:
    await leases(store, pg, 3)
    judged = Judged(store, pg)
    await judged.passes(5)
    assert await judged.passes(30, every=30) == 0  # it was away: so may the heartbeats have been
    assert await judged.passes(9) == 0
    assert await judged.passes(2) == 3


async def test_an_unusual_share_is_held_until_it_has_lasted(store: Store, pg: asyncpg.Connection) -> None:
    held = await leases(store, pg, 30)
    judged = Judged(store, pg)
    assert await judged.passes(45) == 0
    # Nine come back, the others do not: 21 of 30 is still more than single nodes explain.
    await store.heartbeat(runs.GATEWAY, [Beat(h.run, h.fence.epoch, h.fence.holder) for h in held[:9]], [])
    assert await judged.passes(3) == 0
    # One more: 20 is what may happen.
    await store.heartbeat(runs.GATEWAY, [Beat(h.run, h.fence.epoch, h.fence.holder) for h in held[9:10]], [])
    assert await judged.passes(1) == 20


async def test_what_stays_silent_for_five_leases_is_believed(store: Store, pg: asyncpg.Connection) -> None:
    await leases(store, pg, 25)
    judged = Judged(store, pg)
    assert await judged.passes(49) == 0
    assert await judged.passes(2) == 25


async def test_a_beat_that_comes_after_the_look_counts(store: Store, pg: asyncpg.Connection) -> None:
    held = await leases(store, pg, 2)
    judged = Judged(store, pg)
    judged.beat_first = held[:1]
    assert await judged.passes(12) == 1
    assert await pg.fetchval("select run_id from perdure.leases") == held[0].run


async def test_expiry_of_another_epoch_ends_nothing(store: Store) -> None:
    held = await runs.running(store)
    stale = Control(held.run, "expire", {"leaseEpoch": held.fence.epoch - 1, "reason": "x"})
    assert (await runs.apply(store, stale)).answer == {"expired": False}
    stranger = Control(uuid4(), "expire", held.lease)
    assert (await runs.apply(store, stranger)).code == "run-not-found"
    assert isinstance(held.run, UUID)


async def test_thousands_that_fall_silent_at_once_are_counted_whole(store: Store, pg: asyncpg.Connection) -> None:
    """The list of silent leases ends at a thousand; of six thousand that is less than the share which is unusual."""
    held = await runs.running(store)
    await copies(pg, held.run, 5999)
    judged = Judged(store, pg)
    everybody = "update perdure.leases set beat_at = perdure.now()"
    for _ in range(16):
        await pg.execute(everybody)
        assert await judged.passes(1) == 0
    assert await judged.passes(25) == 0
    assert await pg.fetchval("select count(*) from perdure.leases") == 6000
