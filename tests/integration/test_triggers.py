"""Triggers on the real store: what fires when the clock moves, what is missed, what a trigger remembers, and what becomes of deliveries."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.postgres import move_clock
from tests.harness.triggers import DAILY, MANUAL, Bench, every

from perdure_operator.domain.errors import DeliveryNotFound, TriggerNotFound
from perdure_operator.store.resources import Owner, Resources
from perdure_operator.store.store import Store
from perdure_operator.store.triggers import Emitted
from perdure_operator.store.verify import check as violations

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)


@pytest.fixture
async def bench(store: Store, pg: asyncpg.Connection) -> Bench:
    bench = await Bench(store, pg).setup()
    await bench.set_clock(NOON)
    return bench


# --------------------------------------------------------------------------------------------------------------- the clock


async def test_a_schedule_fires_at_its_instant_and_names_the_run_after_it(bench: Bench) -> None:
    await bench.put("report", DAILY)
    await bench.round()
    assert await bench.runs() == []
    await bench.set_clock(datetime(2026, 3, 11, 5, 59, 58, tzinfo=UTC))
    await bench.round()
    assert await bench.runs() == []
    await bench.set_clock(datetime(2026, 3, 11, 6, 0, 0, 100_000, tzinfo=UTC))
    await bench.round()
    await bench.round()
    assert await bench.runs() == ["report-20260311t060000z"]
    row = await bench.triggers.get("default/report")
    assert row is not None
    assert (row.fired_at, row.next_at) == (datetime(2026, 3, 11, 6, tzinfo=UTC), datetime(2026, 3, 12, 6, tzinfo=UTC))
    [delivery] = await bench.deliveries()
    assert delivery["dedup_key"] == "scheduled:default/report:2026-03-11T06:00:00Z"
    run = await bench.run("report-20260311t060000z")
    assert run["idempotency_key"] == f"delivery:{delivery['delivery_id']}"
    assert json.loads(run["labels"]) == {"perdure.dev/trigger": "report"}
    assert bench.gateway.made == 1


@pytest.mark.parametrize(
    ("catch_up", "fired"),
    [
        ({"policy": "None"}, []),
        ({"policy": "Latest"}, ["report-20260317t060000z"]),
        (None, ["report-20260317t060000z"]),
        ({"policy": "All", "limit": 3}, [f"report-202603{day}t060000z" for day in (15, 16, 17)]),
        ({"policy": "All"}, [f"report-202603{day}t060000z" for day in (13, 14, 15, 16, 17)]),
        ({"policy": "All", "limit": 100}, [f"report-202603{day}t060000z" for day in range(11, 18)]),
    ],
)
async def test_missed_firings_are_made_up_for_as_the_policy_says(bench: Bench, catch_up: dict[str, Any] | None, fired: list[str]) -> None:
    await bench.put("report", DAILY, **({"catchUp": catch_up} if catch_up else {}))
    await bench.set_clock(datetime(2026, 3, 17, 9, tzinfo=UTC))
    await bench.round()
    assert sorted(await bench.runs()) == fired
    await bench.round()
    assert len(await bench.runs()) == len(fired)
    row = await bench.triggers.get("default/report")
    assert row is not None
    assert row.next_at == datetime(2026, 3, 18, 6, tzinfo=UTC)
    for run in fired:
        [reason] = json.loads((await bench.run(run))["reasons"])
        days = 17 - int(run[13:15])
        assert reason["kind"] == "start"
        assert reason["note"] == f"due {f'{days} d' if days else '3 h'} ago: judge whether it still makes sense"
        assert reason["lateSeconds"] == pytest.approx(days * 86_400 + 3 * 3600, abs=60)


async def test_none_forgives_the_lateness_of_a_restart(bench: Bench) -> None:
    await bench.put("report", DAILY, catchUp={"policy": "None"})
    await bench.set_clock(datetime(2026, 3, 11, 6, 0, 50, tzinfo=UTC))
    await bench.round()
    assert await bench.runs() == ["report-20260311t060000z"]
    [reason] = json.loads((await bench.run("report-20260311t060000z"))["reasons"])
    assert "note" not in reason


async def test_what_is_later_than_the_starting_deadline_is_missed(bench: Bench) -> None:
    await bench.put("report", DAILY, catchUp={"policy": "All", "limit": 100}, startingDeadlineSeconds=2 * 86_400)
    await bench.set_clock(datetime(2026, 3, 17, 9, tzinfo=UTC))
    await bench.round()
    assert await bench.runs() == ["report-20260316t060000z", "report-20260317t060000z"]


async def test_a_delivery_that_waits_beyond_the_deadline_makes_no_run(bench: Bench) -> None:
    await bench.put("report", MANUAL, startingDeadlineSeconds=60)
    await bench.emit("report")
    await move_clock(bench.pg, 61)
    await bench.round()
    [delivery] = await bench.deliveries()
    assert (delivery["state"], delivery["message"]) == ("FAILED", "later than its startingDeadlineSeconds")
    assert await bench.runs() == []


async def test_a_million_missed_seconds_cost_no_more_than_what_is_made_up_for(bench: Bench) -> None:
    await bench.put("beat", every(1), catchUp={"policy": "All", "limit": 4})
    await bench.set_clock(NOON + timedelta(days=365))
    await bench.round()
    assert len(await bench.runs()) == 4
    row = await bench.triggers.get("default/beat")
    assert row is not None
    assert row.next_at is not None
    assert timedelta(0) < row.next_at - (NOON + timedelta(days=365)) <= timedelta(seconds=30)


async def test_once_fires_once_and_late_if_nobody_watched(bench: Bench) -> None:
    await bench.put("party", {"at": "2026-03-10T13:00:00+01:00"}, created=NOON - timedelta(days=1))
    await bench.round()
    assert await bench.runs() == ["party-20260310t120000z"]
    [delivery] = await bench.deliveries()
    assert delivery["dedup_key"] == "scheduled-once:default/party:2026-03-10T12:00:00Z"
    row = await bench.triggers.get("default/party")
    assert row is not None
    assert row.next_at is None


# ---------------------------------------------------------------------------------------------------------- what it remembers


async def test_a_trigger_that_comes_again_keeps_its_past(bench: Bench) -> None:
    """Neither does an interval begin anew, nor does an instant that has fired fire again."""
    first = await bench.put("beat", every(3600))
    await bench.set_clock(NOON + timedelta(minutes=90))
    await bench.round()
    assert await bench.runs() == ["beat-20260310t130000z"]
    assert await bench.triggers.delete("default/beat", first)
    await bench.round()
    await bench.put("beat", every(3600))
    row = await bench.triggers.get("default/beat")
    assert row is not None
    assert (row.anchor_at, row.fired_at, row.next_at) == (NOON, NOON + timedelta(hours=1), NOON + timedelta(hours=2))
    assert not await bench.triggers.delete("default/beat", first), "the earlier object's deletion is over"
    await bench.set_clock(NOON + timedelta(minutes=121))
    await bench.round()
    assert await bench.runs() == ["beat-20260310t130000z", "beat-20260310t140000z"]


async def test_an_instant_that_has_fired_never_comes_again(bench: Bench) -> None:
    at = {"at": "2026-03-10T12:00:30Z"}
    first = await bench.put("party", at)
    await move_clock(bench.pg, 31)
    await bench.round()
    await bench.triggers.delete("default/party", first)
    await bench.put("party", at)
    await bench.round()
    # Even if its row was lost: the key is taken.
    await bench.pg.execute("update perdure.triggers set fired_at = null, next_at = '2026-03-10T12:00:30Z'")
    await bench.round()
    assert len(await bench.runs()) == 1


async def test_what_was_due_while_there_was_no_trigger_is_nobodys(bench: Bench) -> None:
    first = await bench.put("report", DAILY)
    await bench.triggers.delete("default/report", first)
    await bench.set_clock(datetime(2026, 3, 12, 5, tzinfo=UTC))
    await bench.round()
    await bench.put("report", DAILY)
    await bench.round()
    assert await bench.runs() == []
    row = await bench.triggers.get("default/report")
    assert row is not None
    assert row.next_at == datetime(2026, 3, 12, 6, tzinfo=UTC)


async def test_a_firing_between_creation_and_the_first_look_is_made_up_for(bench: Bench) -> None:
    await bench.put("report", DAILY, created=datetime(2026, 3, 10, 5, 59, tzinfo=UTC))
    await bench.round()
    assert await bench.runs() == ["report-20260310t060000z"]


async def test_a_changed_source_starts_now_and_anything_else_keeps_its_place(bench: Bench) -> None:
    uid = await bench.put("report", DAILY)
    await bench.set_clock(datetime(2026, 3, 11, 7, tzinfo=UTC))
    await bench.put("report", DAILY, uid=uid, catchUp={"policy": "All"})
    row = await bench.triggers.get("default/report")
    assert row is not None
    assert row.next_at == datetime(2026, 3, 11, 6, tzinfo=UTC)
    await bench.put("report", every(60), uid=uid)
    row = await bench.triggers.get("default/report")
    assert row is not None
    assert row.next_at == datetime(2026, 3, 11, 7, 1, tzinfo=UTC)


async def test_nothing_fires_while_it_is_suspended_and_what_came_in_waits(bench: Bench) -> None:
    uid = await bench.put("report", DAILY, suspend=True)
    emitted = await bench.emit("report", payload=b'{"n": 1}')
    await bench.set_clock(datetime(2026, 3, 13, 7, tzinfo=UTC))
    assert await bench.round() == 0
    assert await bench.states() == ["PENDING"]
    await bench.put("report", DAILY, uid=uid)
    await bench.round()
    names = await bench.runs()
    assert set(names) == {f"report-{emitted.delivery.hex[-12:]}", "report-20260313t060000z"}


async def test_a_suspension_holds_what_is_claimed_or_waits_for_its_next_try(bench: Bench) -> None:
    uid = await bench.put("report", MANUAL)
    await bench.emit("report")
    [claimed] = await bench.triggers.claim("b", 10, 30)
    await bench.put("report", MANUAL, uid=uid, suspend=True)
    assert await bench.gateway.router._route(claimed) == "held"
    await move_clock(bench.pg, 3600)
    assert await bench.round() == 0
    [delivery] = await bench.deliveries()
    assert (delivery["state"], delivery["attempts"]) == ("PENDING", 0)
    await bench.put("report", MANUAL, uid=uid)
    assert await bench.round() == 1
    assert len(await bench.runs()) == 1


async def test_a_deletion_stops_firing_and_closes_what_is_pending(bench: Bench) -> None:
    uid = await bench.put("report", MANUAL)
    await bench.emit("report", payload=b"[1]")
    [claimed] = await bench.triggers.claim("b", 10, 30)
    await bench.emit("report")
    assert await bench.triggers.delete("default/report", uid)
    assert await bench.gateway.router._route(claimed) == "stale"
    assert await bench.round() == 0
    assert [(d["state"], d["message"], d["payload"]) for d in await bench.deliveries()] == [("FAILED", "the trigger was deleted", None)] * 2
    with pytest.raises(TriggerNotFound):
        await bench.emit("report")
    assert await bench.runs() == []


@pytest.mark.parametrize("claimed", [False, True])
async def test_what_a_deletion_closed_does_not_use_up_its_key(bench: Bench, claimed: bool) -> None:
    """Nothing came of it, so the sender's next try is no duplicate. Again and again, for each deletion."""
    emitted = []
    for _ in range(2):
        uid = await bench.put("report", MANUAL)
        emitted.append(await bench.emit("report", id="order-7", payload=b"[1]"))
        if claimed:
            await bench.triggers.claim("b", 10, 30)
        assert await bench.triggers.delete("default/report", uid)
    await bench.put("report", MANUAL)
    emitted.append(await bench.emit("report", id="order-7", payload=b"[1]"))
    assert [one.duplicate for one in emitted] == [False] * 3
    assert await bench.emit("report", id="order-7") == Emitted(emitted[2].delivery, duplicate=True)
    await bench.round()
    assert len(await bench.runs()) == 1
    first, second, third = await bench.deliveries()
    assert (first["superseded_by"], second["superseded_by"]) == (second["delivery_id"], third["delivery_id"])
    assert json.loads(first["decision"]) == {"action": "drop", "reason": "TriggerDeleted"}
    assert [d["state"] for d in (first, second, third)] == ["FAILED", "FAILED", "DONE"]
    assert third["dedup_key"] == "manual:default/report:order-7"
    assert await bench.store.verify() == []


async def test_a_dead_delivery_of_a_deleted_trigger_frees_its_key_once_it_is_redriven_to_nobody(bench: Bench) -> None:
    await bench.pg.execute("delete from perdure.pools")
    uid = await bench.put("report", MANUAL, retry={"maxAttempts": 1})
    emitted = await bench.emit("report", id="order-7")
    await bench.round()
    await bench.triggers.delete("default/report", uid)
    await bench.setup()
    await bench.triggers.redrive("default/report", emitted.delivery)
    await bench.round()
    assert await bench.states() == ["FAILED"]
    await bench.put("report", MANUAL)
    assert not (await bench.emit("report", id="order-7")).duplicate
    await bench.round()
    assert await bench.states() == ["FAILED", "DONE"]


async def test_an_outcome_uses_its_key_up_whatever_is_deleted(bench: Bench) -> None:
    uid = await bench.put("report", MANUAL, startingDeadlineSeconds=60)
    await bench.emit("report", id="made")
    await bench.round()
    await bench.emit("report", id="late")
    await move_clock(bench.pg, 61)
    await bench.round()
    assert await bench.states() == ["DONE", "FAILED"]
    await bench.triggers.delete("default/report", uid)
    await bench.put("report", MANUAL)
    assert (await bench.emit("report", id="made")).duplicate
    assert (await bench.emit("report", id="late")).duplicate


async def test_an_instant_that_a_deletion_closed_stays_closed(bench: Bench) -> None:
    uid = await bench.put("report", DAILY)
    seen = await bench.triggers.get("default/report")
    assert seen is not None
    await bench.set_clock(datetime(2026, 3, 11, 7, tzinfo=UTC))
    await bench.gateway.scheduler.tick()
    await bench.triggers.delete("default/report", uid)
    await bench.put("report", DAILY)
    await bench.pg.execute("update perdure.triggers set next_at = $1", seen.next_at)
    await bench.round()
    assert await bench.states() == ["FAILED"]
    assert await bench.runs() == []


# --------------------------------------------------------------------------------------------------------------- what runs


async def test_what_came_in_is_the_input_and_else_the_templates(bench: Bench) -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"x": "y"}},
        "spec": {"agent": {"poolRef": {"name": "p"}}, "input": {"a": 1}},
    }
    await bench.put("report", MANUAL, template=template)
    big = json.dumps({"text": "x" * 100_000}).encode()
    found = []
    for payload in (None, b'{"b": 2}', big):
        emitted = await bench.emit("report", payload=payload)
        await bench.round()
        found.append(await bench.run(f"report-{emitted.delivery.hex[-12:]}"))
    async with bench.store.reader() as reader:
        assert [json.loads(await reader.payload(run["input"])) for run in found] == [{"a": 1}, {"b": 2}, json.loads(big)]
    assert json.loads(found[0]["labels"]) == {"team": "a", "perdure.dev/trigger": "report"}
    assert all(d["payload"] is None for d in await bench.deliveries()), "the body is the run's now"


async def test_a_run_gets_a_resource_that_its_trigger_owns_unless_it_is_a_row_only(bench: Bench) -> None:
    template = {"metadata": {"annotations": {"x": "y"}}, "spec": {"agent": {"poolRef": {"name": "p"}}}}
    uid = await bench.put("party", {"at": "2026-03-10T12:00:01Z"}, template=template)
    await bench.put("quiet", MANUAL, recording="StoreOnly")
    await bench.emit("quiet")
    await move_clock(bench.pg, 2)
    await bench.round()
    assert len(await bench.runs()) == 2
    [unmade] = await Resources(bench.store).unmade(10)
    assert (unmade.name, unmade.owner) == ("party-20260310t120001z", Owner("Trigger", "party", uid))
    assert unmade.annotations == {"x": "y", "perdure.dev/scheduled-at": "2026-03-10T12:00:01Z"}
    # The object may be gone before the resource is made: its uid still says whose it was, and the collector takes both.
    await bench.triggers.delete("default/party", uid)
    assert [one.owner for one in await Resources(bench.store).unmade(10)] == [Owner("Trigger", "party", uid)]


async def test_forbid_counts_a_suspended_run_as_active(bench: Bench) -> None:
    await bench.put("report", every(60), concurrencyPolicy="Forbid", catchUp={"policy": "All"})
    await move_clock(bench.pg, 61)
    await bench.round()
    held = await runs.lease_next(bench.store)
    await runs.apply(bench.store, runs.wait_for(held, "w", runs.on_signal("go")))
    [name] = await bench.runs()
    assert (await bench.run(name))["state"] == "Suspended"
    await move_clock(bench.pg, 120)
    await bench.round()
    assert await bench.runs() == [name]
    first, *skipped = await bench.deliveries()
    assert len(skipped) == 2
    for delivery in skipped:
        assert (delivery["state"], delivery["superseded_by"]) == ("DONE", first["delivery_id"])
        assert json.loads(delivery["decision"]) == {"action": "skip", "reason": "Forbid", "run": str(held.run)}
        assert delivery["message"] == f"run {name} has not ended"
    await runs.apply(bench.store, runs.verb(held.run, "cancel"))
    await move_clock(bench.pg, 60)
    await bench.round()
    assert len(await bench.runs()) == 2, "what was skipped stays skipped; the next one runs"


async def test_forbid_of_a_trigger_that_came_again_sees_the_earlier_ones_run(bench: Bench) -> None:
    uid = await bench.put("report", MANUAL, concurrencyPolicy="Forbid")
    await bench.emit("report")
    await bench.round()
    await bench.triggers.delete("default/report", uid)
    await bench.put("report", MANUAL, concurrencyPolicy="Forbid")
    await bench.emit("report")
    await bench.round()
    assert len(await bench.runs()) == 1


async def test_allow_runs_beside_each_other(bench: Bench) -> None:
    await bench.put("report", MANUAL)
    await bench.emit("report")
    await bench.emit("report")
    await bench.round()
    assert len(await bench.runs()) == 2
    summary = await bench.triggers.summary("default/report")
    assert summary is not None
    assert (summary.active, summary.pending, summary.dead) == (2, 0, 0)


# ------------------------------------------------------------------------------------------------------------- what fails


async def test_a_missing_pool_is_tried_again_and_then_dead_until_redriven(bench: Bench) -> None:
    await bench.pg.execute("delete from perdure.pools")
    await bench.put("report", MANUAL, retry={"maxAttempts": 3, "backoffSeconds": 10})
    emitted = await bench.emit("report", payload=b"[7]")
    for attempt, wait in ((1, 10), (2, 20)):
        assert await bench.round() == 1
        [delivery] = await bench.deliveries()
        assert (delivery["state"], delivery["attempts"]) == ("PENDING", attempt)
        assert delivery["message"] == "there is no AgentPool p in namespace default"
        await move_clock(bench.pg, wait - 1)
        assert await bench.round() == 0, "not before its back-off"
        await move_clock(bench.pg, 1.1)
    await bench.round()
    assert await bench.states() == ["DEAD"]
    await move_clock(bench.pg, 86_400)
    assert await bench.round() == 0
    await bench.setup()
    with pytest.raises(DeliveryNotFound):
        await bench.triggers.redrive("default/report", uuid4())
    await bench.triggers.redrive("default/report", emitted.delivery)
    with pytest.raises(DeliveryNotFound):
        await bench.triggers.redrive("default/report", emitted.delivery)
    await bench.round()
    assert await bench.states() == ["DONE"]
    [name] = await bench.runs()
    assert (await bench.run(name))["input"] == b"\x00[7]"


async def test_a_taken_name_is_an_error_and_not_another_run(bench: Bench) -> None:
    await runs.pending(bench.store, name="party-20260310t120001z")
    await bench.put("party", {"at": "2026-03-10T12:00:01Z"}, retry={"maxAttempts": 1})
    await move_clock(bench.pg, 2)
    await bench.round()
    [delivery] = await bench.deliveries()
    assert (delivery["state"], delivery["message"]) == ("DEAD", "another run has the name party-20260310t120001z")
    assert len(await bench.runs()) == 1


async def test_old_runs_resources_are_named_and_no_others(bench: Bench, store: Store) -> None:
    await bench.put("report", MANUAL)
    resources = Resources(store)
    uids = []
    for _ in range(6):
        await bench.emit("report")
        await bench.round()
        [unmade] = await resources.unmade(10)
        uids.append(uuid4())
        await resources.made(unmade.run, uids[-1])
    ended: list[str] = []
    for n in range(5):
        held = await runs.lease_next(store)
        await runs.apply(store, runs.work(held, "finish", outcome="failed" if n == 1 else "succeeded", type="T", message="m"))
        ended.append(str(held.run))
    assert await bench.triggers.outdated("default/report", 0, 0) == [], "nobody has looked yet"
    summary = await bench.triggers.summary("default/report")
    assert summary is not None
    assert summary.active == 1
    outdated = await bench.triggers.outdated("default/report", 2, 1)
    assert {one.uid for one in outdated} == {uids[0], uids[2]}
    assert {one.uid for one in await bench.triggers.outdated("default/report", 4, 0)} == {uids[1]}
    for one in outdated:
        await resources.gone(one.uid)
    await bench.triggers.summary("default/report")
    assert await bench.triggers.outdated("default/report", 2, 1) == []
    assert await bench.pg.fetchval("select count(*) from perdure.deliveries where followed = 'ended'") == 3


async def test_verify_finds_what_is_wrong_with_deliveries(bench: Bench) -> None:
    await bench.put("report", MANUAL)
    emitted = await bench.emit("report")
    await bench.round()
    assert await bench.store.verify() == []
    twice = (
        "insert into perdure.deliveries (delivery_id, trigger_key, source, dedup_key, state, fire_at, not_before, created_at) select "
        "gen_random_uuid(), 'default/report', 'schedule', n::text, 'PENDING', 'epoch', 'epoch', 'epoch' from generate_series(1, 2) n"
    )
    wrongs = [
        "update perdure.deliveries set run_id = null",
        "update perdure.deliveries set decision = null",
        "update perdure.deliveries set state = 'PENDING', decision = null, closed_at = null",
        "update perdure.deliveries set payload = 'x'",
        "update perdure.deliveries set decision = perdure.trigger_deleted(), run_id = null",
        "update perdure.deliveries set dedup_key = 'superseded:' || dedup_key",
        "update perdure.runs set idempotency_key = null",
        "delete from perdure.deliveries",
        "delete from perdure.triggers",
        twice,
    ]
    for wrong in wrongs:
        transaction = bench.pg.transaction(isolation="repeatable_read")
        await transaction.start()
        await bench.pg.execute(wrong)
        found = await check(bench.pg)
        await transaction.rollback()
        assert any(v.startswith("10 ") for v in found), wrong
    assert (await bench.deliveries())[0]["delivery_id"] == emitted.delivery


async def check(connection: asyncpg.Connection) -> list[str]:
    return [violation.invariant async for violation in violations(connection)]
