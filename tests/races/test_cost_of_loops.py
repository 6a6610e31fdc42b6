"""What a background loop asks costs what is due, never what exists: counted in rows that Postgres reads, of a store in which thousands
of runs sleep, wait in back-off, have ended or are at work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.many import copies

from perdure_operator import store as store_package
from perdure_operator.services.sweeper import LIMIT, Sweeper
from perdure_operator.store.store import Store

MANY = 3000
_READ = "select coalesce(sum(seq_tup_read + idx_tup_fetch), 0)::bigint from pg_stat_xact_user_tables where schemaname = 'perdure'"


@pytest.fixture
async def crowd(store: Store, pg: asyncpg.Connection) -> None:
    """Of one run asleep, one in back-off, one that has ended and one at work each: thousands. One run can be leased."""
    asleep = await runs.running(store)
    await runs.apply(store, runs.wait_for(asleep, "w", runs.on_signal("go"), {"kind": "timer", "seconds": 1e6}))
    ended = await runs.running(store)
    await runs.apply(store, runs.work(ended, "finish", outcome="succeeded"))
    at_work = await runs.running(store)
    later = await runs.pending(store)
    past = {"state_since": "t.state_since - interval '2 hours'"}
    await copies(pg, asleep.run, MANY, every=past)
    await copies(pg, ended.run, MANY, every=past)
    await copies(pg, at_work.run, 200)
    soon = {"runnable_at": "t.runnable_at + interval '1 hour'", "rank": "t.rank + 3600", "priority": "t.priority"}
    await copies(pg, later, MANY, every=soon)
    await pg.execute("vacuum analyze")


async def rows_read(pg: asyncpg.Connection, query: str, *arguments: object) -> int:
    """In the second call of a session: the first one reads the catalogue and makes plans."""
    await pg.fetch(query, *arguments)
    async with pg.transaction():
        before = await pg.fetchval(_READ)
        await pg.fetch(query, *arguments)
        return int(await pg.fetchval(_READ)) - before


LIMITS = {
    "select * from perdure.missed_wakes(5, 90)": 50,
    "select * from perdure.runnable_pools('{default/p}')": 5,
    "select * from perdure.runnable('default/p', 8, now(), 32)": 300,
    "select * from perdure.due_runs(256)": 5,
    "select * from perdure.unapplied_runs(256)": 5,
    "select * from perdure.news('test')": 250,
    "select * from perdure.silent_leases(15)": 450,
    "select * from perdure.pool_demand(null, now(), 10000)": 300,
    "select perdure.retire_silent_pods(60)": 300,
}
"""Rows that a call may read: above what is due, two hundred runs at work among it, and far below the thousands that are not."""


@pytest.mark.usefixtures("crowd")
async def test_rows_read(pg: asyncpg.Connection) -> None:
    read = {query: await rows_read(pg, query) for query in LIMITS}
    assert {query: rows for query, rows in read.items() if rows > LIMITS[query]} == {}


async def test_the_sweep_finds_what_was_missed(store: Store, pg: asyncpg.Connection) -> None:
    """A run that nobody woke, in each of the two ways: the wakeup came while it slept, and it fell asleep over a wakeup."""
    missed = []
    for _ in range(3):
        held = await runs.running(store)
        await runs.apply(store, runs.wait_for(held, "w", runs.on_signal("go")))
        missed.append(held.run)
    insert = (
        "insert into perdure.wakeups (run_id, kind, source, name, id, at, seq) "
        "values ($1, 'signal', 'x', 'go', '1', perdure.now() - $2 * interval '1 second', 0)"
    )
    await pg.execute(insert, missed[0], 20.0)
    await pg.execute(insert, missed[1], 7200.0)
    await pg.execute("update perdure.runs set wake_due = true where run_id = $1", missed[2])
    asleep_since = "update perdure.runs set state_since = perdure.now() - $2 * interval '1 second' where run_id = $1"
    for run, seconds in zip(missed, (86400.0, 30.0, 86400.0), strict=True):
        await pg.execute(asleep_since, run, seconds)
    assert set(await store.missed_wakes(5, 90)) == set(missed)
    await pg.execute("delete from perdure.wakeups where source = 'x'")
    await pg.execute("update perdure.runs set wake_due = false")
    assert await store.missed_wakes(5, 90) == []


async def test_the_sweep_finds_more_than_one_look_shows(store: Store, pg: asyncpg.Connection) -> None:
    """Also behind as many that it cannot wake."""
    held = await runs.running(store)
    await runs.apply(store, runs.wait_for(held, "w", runs.on_signal("go")))
    await copies(pg, held.run, 3 * LIMIT, every={"wake_due": "true", "state_since": "t.state_since - interval '1 day'"})
    woken: set[UUID] = set()

    async def settle(found: Sequence[UUID]) -> None:
        assert len(found) <= LIMIT
        assert not woken & set(found)
        woken.update(found)

    await Sweeper(store, settle).sweep()
    assert len(woken) == 3 * LIMIT
    await pg.execute("update perdure.runs set wake_due = false")


_ONCE = re.compile(r":= (coalesce\(p_at, )?perdure\.now\(\)|select (\*, )?perdure\.now\(\)|function perdure\.now\(\)")
"""Assigned to a variable, or read by a select of its own (or of one row by its key)."""


def test_the_clock_is_read_once_a_statement() -> None:
    """perdure.now() is volatile: in a condition it would be called for each row, and no index could answer it."""
    folder = Path(str(store_package.__file__)).parent
    wrong = []
    for file in [*folder.glob("*.py"), *folder.glob("sql/*.sql")]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            joined = re.search(r"\(select perdure\.now\(\) as now\) n", line)  # the planner merges it into the statement
            if (joined or "perdure.now()" in _ONCE.sub("", line)) and not line.lstrip().startswith("--"):
                wrong.append(f"{file.name}:{number}: {line.strip()}")
    assert wrong == []
