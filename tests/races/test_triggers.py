"""Several gateways at one trigger: at the tick, at a delivery, at the same event twice, and with a crash between any two commits."""

from __future__ import annotations

import asyncio
import json

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.postgres import move_clock, waiters
from tests.harness.triggers import MANUAL, Bench, GatewayPart, every

from perdure_operator.domain.ids import uuid7
from perdure_operator.services.delivery_router import CLAIM_SECONDS
from perdure_operator.store.store import Store


@pytest.fixture
async def bench(store: Store, pg: asyncpg.Connection) -> Bench:
    return await Bench(store, pg).setup()


async def test_many_gateways_at_the_tick_make_one_run(bench: Bench, store: Store) -> None:
    for n in range(10):
        await bench.put(f"t{n}", every(60))
    gateways = [GatewayPart(store, f"g{n}") for n in range(6)]
    for tick in (1, 2, 3):
        await move_clock(bench.pg, 60.5)
        await asyncio.gather(*(gateway.round() for gateway in gateways))
        await asyncio.gather(*(gateway.round() for gateway in gateways))
        assert len(await bench.runs()) == 10 * tick
        assert set(await bench.states()) == {"DONE"}


async def test_a_tick_that_was_worked_out_before_another_made_it_changes_nothing(bench: Bench) -> None:
    uid = await bench.put("beat", every(60))
    await move_clock(bench.pg, 61)
    seen = await bench.triggers.due(10)
    ticks = [tick for row in seen if (tick := bench.gateway.scheduler._tick_of(row)) is not None]
    assert await bench.triggers.fire(ticks) == 1
    assert await bench.triggers.fire(ticks) == 0
    await move_clock(bench.pg, 60)
    [row] = await bench.triggers.due(10)
    tick = bench.gateway.scheduler._tick_of(row)
    assert tick is not None
    await bench.put("beat", every(3600), uid=uid)
    assert await bench.triggers.fire([tick]) == 0, "the trigger has been written meanwhile"
    assert len(await bench.deliveries()) == 1


async def test_a_tick_waits_for_nobody(bench: Bench, database: str) -> None:
    """A gateway that hangs inside its tick does not hold the other triggers up; the tick that it made not is the next one's."""
    await bench.put("stuck", every(60))
    await bench.put("free", every(60))
    await move_clock(bench.pg, 61)
    other = await asyncpg.connect(database)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("select 1 from perdure.triggers where trigger_key = 'default/stuck' for update")
    await bench.round()
    assert [name[:4] for name in await bench.runs()] == ["free"]
    await transaction.rollback()
    await other.close()
    await bench.round()
    assert sorted(name[:4] for name in await bench.runs()) == ["free", "stuc"]


async def test_a_crash_between_claim_and_decision_leaves_the_delivery_to_the_next(bench: Bench, store: Store) -> None:
    await bench.put("report", MANUAL)
    await bench.emit("report")
    [dead] = await bench.triggers.claim("crashed", 10, CLAIM_SECONDS)
    assert await bench.round() == 0, "it is somebody's"
    await move_clock(bench.pg, CLAIM_SECONDS + 1)
    assert await bench.round() == 1
    assert await bench.states() == ["DONE"]
    # The one that was believed dead was only slow.
    assert await bench.gateway.router._route(dead) == "stale"
    assert len(await bench.runs()) == 1


async def test_a_claim_that_is_over_and_taken_again_decides_nothing(bench: Bench) -> None:
    await bench.put("report", MANUAL)
    await bench.emit("report")
    [slow] = await bench.triggers.claim("slow", 10, 1)
    await move_clock(bench.pg, 2)
    [quick] = await bench.triggers.claim("quick", 10, 30)
    assert await bench.gateway.router._route(slow) == "stale"
    await bench.triggers.failed(slow, "late", None)
    assert await bench.gateway.router._route(quick) == "made"
    assert (len(await bench.runs()), await bench.states()) == (1, ["DONE"])


async def test_whoever_claims_and_dies_each_time_ends_as_dead(bench: Bench) -> None:
    await bench.put("report", MANUAL, retry={"maxAttempts": 3})
    await bench.emit("report")
    for _ in range(3):
        [_claimed] = await bench.triggers.claim("crashes", 10, 10)
        await move_clock(bench.pg, 11)
    await bench.round()
    [delivery] = await bench.deliveries()
    assert (delivery["state"], delivery["message"]) == ("DEAD", "whoever claimed it ended before it was decided")
    assert await bench.runs() == []


async def test_a_commit_whose_answer_was_lost_is_found_made(bench: Bench) -> None:
    """Claimed again after an unknown outcome: the decision is there, and is not taken twice."""
    await bench.put("report", MANUAL)
    await bench.emit("report")
    [claimed] = await bench.triggers.claim("a", 10, 1)
    assert await bench.gateway.router._route(claimed) == "made"
    await move_clock(bench.pg, 60)
    assert await bench.round() == 0
    assert await bench.gateway.router._route(claimed) == "stale"
    assert len(await bench.runs()) == 1


async def test_the_same_event_many_times_at_once_is_one_delivery_and_one_run(bench: Bench, store: Store) -> None:
    await bench.put("report", MANUAL)
    emitted = await asyncio.gather(*(bench.emit("report", id="order-7", payload=str(n).encode()) for n in range(12)))
    assert len({one.delivery for one in emitted}) == 1
    assert [one.duplicate for one in emitted].count(False) == 1
    gateways = [GatewayPart(store, f"g{n}") for n in range(4)]
    await asyncio.gather(*(gateway.round() for gateway in gateways))
    again = await bench.emit("report", id="order-7")
    assert again.duplicate
    await bench.round()
    assert len(await bench.runs()) == 1


async def test_a_key_that_a_deletion_left_is_handed_over_once(bench: Bench, database: str) -> None:
    """All saw the row that gives its key up before one of them took it."""
    uid = await bench.put("report", MANUAL)
    lost = await bench.emit("report", id="order-7")
    await bench.triggers.delete("default/report", uid)
    await bench.put("report", MANUAL)
    blocker = await asyncpg.connect(database)
    async with blocker.transaction():
        await blocker.execute("select 1 from perdure.deliveries for update")
        tasks = [asyncio.create_task(bench.emit("report", id="order-7")) for _ in range(3)]
        await waiters(database, 3)
    await blocker.close()
    emitted = await asyncio.gather(*tasks)
    assert sorted(one.duplicate for one in emitted) == [False, True, True]
    assert len({one.delivery for one in emitted} | {lost.delivery}) == 2
    await bench.round()
    assert len(await bench.runs()) == 1


@pytest.mark.parametrize("taken", [True, False])
async def test_whoever_waits_for_a_key_has_it_if_the_first_one_does_not_take_it(bench: Bench, database: str, taken: bool) -> None:
    uid = await bench.put("report", MANUAL)
    await bench.emit("report", id="order-7")
    await bench.triggers.delete("default/report", uid)
    await bench.put("report", MANUAL)
    first = await asyncpg.connect(database)
    transaction = first.transaction()
    await transaction.start()
    emit = "select duplicate from perdure.emit($1, 'default/report', 'manual', 'manual:default/report:order-7', null, '{}')"
    assert not await first.fetchval(emit, uuid7())
    second = asyncio.create_task(bench.emit("report", id="order-7"))
    await waiters(database, 1)
    await (transaction.commit() if taken else transaction.rollback())
    assert (await second).duplicate is taken
    await first.close()
    await bench.round()
    assert len(await bench.runs()) == 1


async def test_forbid_lets_one_of_many_through(bench: Bench, store: Store) -> None:
    """Each decision looks for an active run under the trigger's lock: two that look at once would both find none."""
    await bench.put("report", MANUAL, concurrencyPolicy="Forbid")
    for _ in range(8):
        await bench.emit("report")
    claims = [(await bench.triggers.claim(f"g{n}", 1, 30))[0] for n in range(8)]
    routers = [GatewayPart(store, f"g{n}").router for n in range(8)]
    outcomes = await asyncio.gather(*(router._route(claim) for router, claim in zip(routers, claims, strict=True)))
    assert sorted(outcomes) == ["made", *["skipped"] * 7]
    assert len(await bench.runs()) == 1


async def test_forbid_looks_after_it_has_the_lock(bench: Bench, database: str) -> None:
    """The other run is made while this decision waits for the lock: a look that was taken before would not see it."""
    await bench.put("report", MANUAL, concurrencyPolicy="Forbid")
    await bench.emit("report")
    await bench.emit("report")
    first, second = await bench.triggers.claim("a", 2, 30)
    blocker = await asyncpg.connect(database)
    async with blocker.transaction():
        await blocker.execute("select 1 from perdure.triggers for update")
        tasks = [asyncio.create_task(bench.gateway.router._route(one)) for one in (first, second)]
        await waiters(database, 2)
    await blocker.close()
    assert sorted(await asyncio.gather(*tasks)) == ["made", "skipped"]


async def test_what_comes_in_while_a_trigger_resumes_is_not_forgotten(bench: Bench, database: str) -> None:
    uid = await bench.put("report", MANUAL, suspend=True)
    blocker = await asyncpg.connect(database)
    async with blocker.transaction():
        await blocker.execute("select 1 from perdure.triggers for update")
        emit = asyncio.create_task(bench.emit("report"))
        await waiters(database, 1)
        resume = asyncio.create_task(bench.put("report", MANUAL, uid=uid))
        await waiters(database, 2)
    await blocker.close()
    await asyncio.gather(emit, resume)
    assert await bench.round() == 1
    assert len(await bench.runs()) == 1


async def test_a_deletion_meets_a_decision_and_one_of_them_is_first(bench: Bench) -> None:
    for n in range(10):
        uid = await bench.put(f"t{n}", MANUAL)
        await bench.emit(f"t{n}")
        [claimed] = await bench.triggers.claim("a", 1, 30)
        deleted, outcome = await asyncio.gather(bench.triggers.delete(f"default/t{n}", uid), bench.gateway.router._route(claimed))
        assert deleted
        assert outcome in ("made", "stale")
    made = await bench.pg.fetchval("select count(*) from perdure.deliveries where state = 'DONE'")
    assert len(await bench.runs()) == made
    assert await bench.pg.fetchval("select count(*) from perdure.deliveries where state not in ('DONE', 'FAILED')") == 0


async def test_a_run_that_ends_while_the_next_one_is_decided_is_seen_ended(bench: Bench, store: Store) -> None:
    await bench.put("report", MANUAL, concurrencyPolicy="Forbid")
    await bench.emit("report")
    await bench.round()
    held = await runs.lease_next(store)
    await bench.emit("report")
    [claimed] = await bench.triggers.claim("a", 1, 30)
    await runs.apply(store, runs.work(held, "finish", outcome="succeeded"))
    assert await bench.gateway.router._route(claimed) == "made"
    [first, second] = await bench.deliveries()
    assert (first["followed"], second["followed"]) == ("ended", "active")
    assert json.loads(second["decision"])["action"] == "newRun"
