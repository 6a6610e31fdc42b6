"""Several gateways at one trigger: at the tick, at a delivery, at the same event twice, and with a crash between any two commits."""

from __future__ import annotations

import asyncio
import contextlib
import json

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.postgres import move_clock, waiters
from tests.harness.triggers import MANUAL, Bench, GatewayPart, every

from perdure_operator.domain.errors import Unavailable
from perdure_operator.domain.ids import uuid7
from perdure_operator.services.delivery_router import CLAIM_SECONDS
from perdure_operator.store.store import NewRun, Store
from perdure_operator.store.triggers import Claimed, Rules


@pytest.fixture
async def bench(store: Store, pg: asyncpg.Connection) -> Bench:
    return await Bench(store, pg).setup()


class Outage:
    """The store answers no more once a round of the gateway has decided ``at`` deliveries; with ``committed`` only the answer is lost."""

    def __init__(self, gateway: GatewayPart) -> None:
        self.at: int | None = None
        self.committed = False
        self._decided = 0
        self._claim, self._decide = gateway.deliveries.claim, gateway.deliveries.route
        gateway.deliveries.claim = self._claimed  # type: ignore[method-assign]
        gateway.deliveries.route = self._route  # type: ignore[method-assign]

    async def _claimed(self, by: str, limit: int, seconds: float) -> list[Claimed]:
        self._decided = 0
        return await self._claim(by, limit, seconds)

    async def _route(self, claimed: Claimed, rules: Rules, run: NewRun) -> str:
        if self._decided == self.at:
            if self.committed:
                await self._decide(claimed, rules, run)
            raise Unavailable("the database did not answer")
        self._decided += 1
        return await self._decide(claimed, rules, run)


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


async def test_an_outage_costs_no_attempt_and_what_it_left_is_routed_when_the_store_answers(bench: Bench) -> None:
    """Eight of them: more than a delivery has attempts. Between two of them the clock stands still."""
    await bench.put("report", MANUAL, retry={"maxAttempts": 3})
    outage = Outage(bench.gateway)
    for n in range(8):
        await bench.emit("report", id=f"first-{n}")
        await bench.emit("report", id=f"second-{n}")
        outage.at = n % 2  # before anything was decided, and in the middle
        with pytest.raises(Unavailable):
            await bench.round()
        outage.at = None
        await bench.round()
        assert set(await bench.states()) == {"DONE"}, f"after outage {n + 1}"
    assert {(row["attempts"], row["claims"]) for row in await bench.deliveries()} <= {(1, 1), (1, 2)}
    assert len(await bench.runs()) == 16
    assert bench.gateway.made == 12, "the dispatcher hears of what a round made, its first half too"


async def test_an_outage_of_many_looks_kills_no_delivery(bench: Bench) -> None:
    """The store takes the claim and then fails, always: no delivery pays for it but the one that was being decided, and that one late."""
    await bench.put("report", MANUAL, retry={"maxAttempts": 1})
    for _ in range(3):
        await bench.emit("report")
    outage = Outage(bench.gateway)
    outage.at = 0
    looks = 0
    for _ in range(60):
        try:
            await bench.round()
        except Unavailable:
            looks += 1
        await move_clock(bench.pg, 20)
    assert looks >= 50
    outage.at = None
    await bench.round()
    await move_clock(bench.pg, 30)
    await bench.round()
    assert await bench.states() == ["DONE"] * 3


async def test_a_claim_whose_answer_was_lost_is_claimed_anew(bench: Bench) -> None:
    await bench.put("report", MANUAL)
    await bench.emit("report")
    real = bench.gateway.deliveries.claim

    async def lost(by: str, limit: int, seconds: float) -> list[Claimed]:
        await real(by, limit, seconds)
        raise Unavailable("the connection is gone")

    bench.gateway.deliveries.claim = lost  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await bench.round()
    assert await bench.states() == ["CLAIMED"]
    bench.gateway.deliveries.claim = real  # type: ignore[method-assign]
    assert await bench.round() == 1
    assert await bench.states() == ["DONE"]


async def test_a_decision_whose_answer_was_lost_is_not_taken_again(bench: Bench) -> None:
    await bench.put("report", MANUAL)
    await bench.emit("report", id="a")
    await bench.emit("report", id="b")
    outage = Outage(bench.gateway)
    outage.at, outage.committed = 0, True
    with pytest.raises(Unavailable):
        await bench.round()
    made = await bench.runs()
    assert len(made) == 1
    outage.at = None
    assert await bench.round() == 1, "only the other one"
    assert await bench.states() == ["DONE", "DONE"]
    assert len(await bench.runs()) == 2
    assert made[0] in await bench.runs()


async def test_after_an_outage_a_gateway_gives_back_only_what_is_still_its_own(bench: Bench, store: Store) -> None:
    """Its claims ended in the outage, and the one that another gateway has taken meanwhile is that one's."""
    await bench.put("report", MANUAL)
    for _ in range(3):
        await bench.emit("report")
    outage = Outage(bench.gateway)
    outage.at = 1
    with pytest.raises(Unavailable):
        await bench.round()
    await move_clock(bench.pg, CLAIM_SECONDS + 1)
    other = GatewayPart(store, "b")
    [taken] = await bench.triggers.claim("b", 1, CLAIM_SECONDS)
    outage.at = None
    assert await bench.round() == 1, "the third; the first is decided"
    assert await other.router._route(taken) == "made"
    assert await bench.states() == ["DONE"] * 3
    assert len(await bench.runs()) == 3


async def test_two_gateways_in_one_outage_make_each_run_once(bench: Bench, store: Store) -> None:
    await bench.put("report", MANUAL)
    gateways = [bench.gateway, GatewayPart(store, "b")]
    outages = [Outage(gateway) for gateway in gateways]
    for n in range(30):
        await bench.emit("report")
        for k, outage in enumerate(outages):
            outage.at, outage.committed = (n % 3 if n % 2 else None), (n + k) % 4 == 0
        await asyncio.gather(*(gateway.round() for gateway in gateways), return_exceptions=True)
    for outage in outages:
        outage.at = None
    await move_clock(bench.pg, 5)
    for gateway in (*gateways, *gateways):
        await gateway.round()
    assert await bench.states() == ["DONE"] * 30
    assert len(await bench.runs()) == 30


async def test_a_gateway_that_ends_leaves_its_claims_to_the_others_at_once(bench: Bench, store: Store) -> None:
    await bench.put("report", MANUAL)
    await bench.emit("report")
    inside = asyncio.Event()

    async def hangs(*_: object) -> str:
        inside.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    bench.gateway.deliveries.route = hangs  # type: ignore[method-assign]
    loop = asyncio.create_task(bench.gateway.router.run())
    await inside.wait()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert await GatewayPart(store, "b").round() == 1
    assert await bench.states() == ["DONE"]


async def test_what_kills_whoever_claims_it_ends_as_dead_and_counts_anew_when_redriven(bench: Bench) -> None:
    await bench.put("report", MANUAL, retry={"maxAttempts": 3})
    emitted = await bench.emit("report")
    for _ in range(50):
        [_claimed] = await bench.triggers.claim("crashes", 10, 10)
        await move_clock(bench.pg, 11)
    assert await bench.round() == 0
    [delivery] = await bench.deliveries()
    assert (delivery["state"], delivery["attempts"]) == ("DEAD", 0)
    assert delivery["message"] == (
        "claimed 50 times and never decided: each time the gateway ended, or the database stopped answering, in the middle of it"
    )
    assert await bench.runs() == []
    assert await bench.store.verify() == []
    await bench.triggers.redrive("default/report", emitted.delivery)
    await bench.round()
    [delivery] = await bench.deliveries()
    assert (delivery["state"], delivery["attempts"]) == ("DONE", 1)


async def test_what_takes_the_store_along_holds_nobody_up_and_ends_as_dead(bench: Bench) -> None:
    """The statement that decides it ends its connection, each time; the gateway lives on."""
    await bench.put("report", MANUAL)
    poison = (await bench.emit("report")).delivery
    real = bench.gateway.deliveries.route

    async def route(claimed: Claimed, rules: Rules, run: NewRun) -> str:
        if claimed.delivery == poison:
            raise Unavailable("the database did not answer")
        return await real(claimed, rules, run)

    bench.gateway.deliveries.route = route  # type: ignore[method-assign]
    for n in range(60):
        await bench.emit("report")
        for _ in range(2):
            with contextlib.suppress(Unavailable):
                await bench.round()
        assert (await bench.states())[1:] == ["DONE"] * (n + 1)
        await move_clock(bench.pg, 31)
    assert (await bench.states())[0] == "DEAD"


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
