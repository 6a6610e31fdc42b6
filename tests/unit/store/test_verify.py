"""`perdure verify`: what it costs, and that it finds what is wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.harness.fixtures import described
from tests.harness.postgres import move_clock, waiters
from tests.harness.runs import Held, apply, on_signal, running, step, wait_for, work
from typer.testing import CliRunner, Result

from perdure_operator.cli.main import app
from perdure_operator.store import verify
from perdure_operator.store.store import Store

HUNDRED = 100


async def steps(store: Store, held: Held, count: int) -> None:
    for start in range(0, count, HUNDRED):
        batch = [step(held, f"step:s#{n}") for n in range(start, min(start + HUNDRED, count))]
        assert {outcome.code for outcome in await store.journal(batch, wait=True)} == {"ok"}


async def rows_read(database: str, pg: asyncpg.Connection) -> int:
    """Rows that Postgres hands out to check the whole store."""

    async def read() -> int:
        # A backend's counts arrive at the latest with its end.
        deadline = time.monotonic() + 20
        while await pg.fetchval("select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await pg.execute("select pg_stat_force_next_flush()")
        return int(await pg.fetchval("select pg_stat_get_db_tuples_returned(oid) from pg_database where datname = current_database()"))

    before = await read()
    own = await Store.connect(database, connections=1)
    violations = await own.verify()
    await own.close()
    assert not violations, described(violations)
    return await read() - before


@pytest.fixture
async def seeding(database: str) -> AsyncIterator[Store]:
    store = await Store.connect(database, connections=1)
    yield store
    await store.close()


async def test_verifying_costs_what_the_log_holds_and_not_its_square(database: str, pg: asyncpg.Connection) -> None:
    read = []
    for steps_each in (500, 1500):
        seeding = await Store.connect(database, connections=1)
        await steps(seeding, await running(seeding), steps_each)
        await seeding.close()
        await pg.execute("analyze")
        read.append(await rows_read(database, pg))
    # Three times the steps of the first and the first: four times as many in all.
    assert read[1] < 4.6 * read[0], read


async def test_two_runs_of_ten_thousand_steps_are_verified(seeding: Store) -> None:
    for _ in range(2):
        await steps(seeding, await running(seeding), 10_000)
    progress = verify.Progress()
    assert [violation async for violation in seeding.violations(progress=progress)] == []
    assert (progress.runs, progress.events) == (2, 2 * 10_002)


async def test_the_memory_of_a_check_does_not_grow_with_the_store(seeding: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "EVENTS_A_SLICE", 25)
    monkeypatch.setattr(verify, "RUNS_A_SLICE", 4)
    holders = [await running(seeding) for _ in range(9)]
    for held in holders:
        await steps(seeding, held, 10)
    progress = verify.Progress()
    found: dict[str, int] = {}
    await _execute(seeding, "update perdure.runs set steps = steps + 1")
    async with aclosing(seeding.violations(progress=progress)) as violations:
        async for violation in violations:
            found[violation.run] = found.get(violation.run, 0) + 1
            # Told while the check goes on: at most two such runs fit into a slice.
            assert progress.runs >= len(found) - 2
    assert found == {str(held.run): 1 for held in holders}
    assert (progress.runs, progress.events) == (9, 9 * 12)


async def _execute(store: Store, sql: str, *arguments: object) -> None:
    async with store.connection() as connection:
        await connection.execute(sql, *arguments)


WRONGS = {
    "a gap": ("delete from perdure.events where run_id = $1 and seq = 9", {"2", "3"}),
    "an end that is missing": ("delete from perdure.events where run_id = $1 and seq >= 20", {"2", "3"}),
    "a sequence that is no row's": ("update perdure.runs set last_seq = last_seq + 1 where run_id = $1", {"3"}),
    "a state that the log does not say": ("update perdure.runs set attempt = 7 where run_id = $1", {"3"}),
    "a step that is not counted": ("update perdure.runs set steps = steps - 1 where run_id = $1", {"3"}),
    "a cancel that the log does not know": ("update perdure.runs set cancel_requested = true where run_id = $1", {"3"}),
    "a cancel that the row does not know": (
        "update perdure.events set kind = 'run.cancel_requested' where run_id = $1 and seq = 9", {"3"},
    ),
    "a row under another epoch": ("update perdure.journal set epoch = 9 where run_id = $1 and key = 'step:s#3'", {"2"}),
    "a step after its lease": (
        "update perdure.events set data = data || '{\"from\": \"Running\"}' where run_id = $1 and seq = 9", {"2"},
    ),
    "a step before its lease": ("update perdure.events set kind = 'step.succeeded' where run_id = $1 and seq = 1", {"2", "3"}),
    "a step under no lease": ("update perdure.events set kind = 'run.noted' where run_id = $1 and kind = 'run.leased'", {"2"}),
    "an epoch that falls": ("update perdure.events set epoch = 0 where run_id = $1 and seq = 9", {"1", "2"}),
    "an epoch that was leased twice": (
        "update perdure.events set kind = 'run.leased' where run_id = $1 and seq = 9", {"1", "3"},
    ),
    "something after the end": ("update perdure.events set kind = 'run.failed' where run_id = $1 and seq = 9", {"3", "4"}),
    "an end without its time": ("update perdure.runs set finished_at = perdure.now() where run_id = $1", {"4"}),
    "a wait that slept on": (
        "insert into perdure.wakeups (run_id, kind, source, name, at, seq) values ($1, 'signal', '[\"go\",\"1\"]', 'go', perdure.now(), 3)",
        {"5"},
    ),
    "a wake that queued nothing": ("update perdure.runs set wake_due = true where run_id = $1", {"5"}),
    "a wakeup that its wait did not take": (
        "insert into perdure.wakeups (run_id, kind, source, at, seq, bound_key) values ($1, 'signal', 's', now(), 3, 'wait:go#0')",
        {"5"},
    ),
    "a signal that two waits took": (
        "update perdure.journal set data = $${\"fired\": [{\"kind\": \"signal\", \"source\": \"s\"}]}$$, kind = 'wait' where run_id = $1",
        {"5"},
    ),
    "an effect without a receipt": ("update perdure.ledger set response = null where run_id = $1", {"6"}),
    "an effect without an intent": (
        "update perdure.ledger set seq = 2 where run_id = $1", {"6"},
    ),
    "an effect at work without a worker": ("update perdure.ledger set state = 'RUNNING' where run_id = $1", {"6"}),
    "an effect that happened twice": (
        "update perdure.events set kind = 'activity.succeeded', data = '{\"key\": \"k\"}' where run_id = $1 and seq = 9", {"3", "6"},
    ),
    "a child that its parent does not know": ("update perdure.runs set parent_id = $1 where run_id <> $1", {"12"}),
    "a child that is nowhere": (
        "update perdure.journal set kind = 'spawn', data = jsonb_build_object('child', gen_random_uuid()) where run_id = $1",
        {"12"},
    ),
    "a holder without a lease": ("update perdure.runs set holder = gen_random_uuid() where run_id = $1", {"1"}),
    "a lease without a run": ("update perdure.leases set run_id = gen_random_uuid()", {"1", "11"}),
    "a log without a run": ("delete from perdure.runs where run_id = $1", {"3"}),
    "a log of nobody": (
        "insert into perdure.events (run_id, seq, epoch, at, kind, data) values (gen_random_uuid(), 1, 0, now(), 'run.created', '{}')",
        {"3"},
    ),
    "a budget that was passed": (
        "insert into perdure.budgets (root_id, kind, maximum, reserved) values ($1, 'steps', 1, 2)", {"8"},
    ),
}  # fmt: skip


@pytest.fixture
async def suspended(seeding: Store) -> UUID:
    """A run with some of everything, and another that runs."""
    held = await running(seeding)
    await steps(seeding, held, 15)
    activity = {
        "key": "k", "tool": "t", "effect": "external", "policy": "ask", "fingerprint": "f", "occurrence": 0, "token": str(uuid4()),
        "timeoutSeconds": 1, "leaseSeconds": 1,
    }  # fmt: skip
    assert (await apply(seeding, work(held, "activity.begin", **activity))).code == "ok"
    end = work(held, "activity.end", key="k", token=activity["token"], state="succeeded", payload=b"1")
    assert (await apply(seeding, end)).code == "ok"
    assert (await apply(seeding, wait_for(held, "wait:go#0", on_signal("go")))).answer["status"] == "suspended"
    await steps(seeding, await running(seeding), 5)
    return held.run


async def test_what_is_wrong_is_found(seeding: Store, suspended: UUID, pg: asyncpg.Connection) -> None:
    assert await seeding.verify() == []
    for name, (sql, wanted) in WRONGS.items():
        transaction = pg.transaction(isolation="repeatable_read")
        await transaction.start()
        await pg.execute(sql, *([suspended] if "$1" in sql else []))
        found = {violation.invariant.split()[0] async for violation in verify.check(pg)}
        of_run = {violation.invariant.split()[0] async for violation in verify.check(pg, runs=[suspended])}
        await transaction.rollback()
        assert found >= wanted, f"{name}: {found}"
        assert of_run <= found, name
        if "$1" in sql and not sql.startswith("delete from perdure.runs"):
            assert of_run >= wanted, f"{name}: {of_run}"


async def test_a_part_of_the_store_can_be_checked(seeding: Store, pg: asyncpg.Connection) -> None:
    old, new = await running(seeding), await running(seeding)
    await move_clock(pg, 7200)
    await steps(seeding, new, 3)
    await pg.execute("update perdure.runs set steps = steps + 1")

    async def found(**what: object) -> set[str]:
        return {violation.run async for violation in seeding.violations(**what)}  # type: ignore[arg-type]

    assert await found() == {str(old.run), str(new.run)}
    assert await found(runs=[old.run]) == {str(old.run)}
    assert await found(since_seconds=3600.0) == {str(new.run)}
    assert await found(since_seconds=9000.0) == {str(old.run), str(new.run)}


async def test_the_command_names_what_is_wrong_and_says_how_far_it_is(
    seeding: Store, pg: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure_operator.cli.verify.QUIET_SECONDS", 0.05)
    wrong, right = await running(seeding), await running(seeding)
    await pg.execute("update perdure.runs set steps = steps + 1 where run_id = $1", wrong.run)

    async def perdure(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["verify", "--dsn", database, *words])

    assert (await perdure(f"run-{right.run}")).stdout == "all invariants hold\n"
    for words in ((), (f"default/run-{wrong.run}",), (str(wrong.run),), ("--since", "1h")):
        found = await perdure(*words, "-o", "json")
        assert found.exit_code == 1
        assert [one["run"] for one in json.loads(found.stdout)["violations"]] == [str(wrong.run)], words
    await move_clock(pg, 7200)
    assert (await perdure("--since", "1.5h")).exit_code == 0
    assert (await perdure("nobody")).exit_code == 3
    assert (await perdure("--since", "1y")).exit_code == 2
    assert (await perdure("--since", "1h", str(wrong.run))).exit_code == 2

    # The check is held up; the test goes on when it has said how far it is.
    async with pg.transaction():
        await pg.execute("lock table perdure.budgets")
        held_up = asyncio.create_task(perdure())
        await waiters(database, 1)
        await asyncio.sleep(0.2)  # time for the command to say something, which it says every 0.05 s
    said = (await held_up).stderr
    assert "0 runs, 0 events checked" in said
    assert "8 reservations stay within the budget" in said
