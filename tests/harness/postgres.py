"""Breakpoints in Postgres: hold a run's row, see who waits for it, and break single runs on purpose."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
from tests.harness.gateways import PATIENCE


@asynccontextmanager
async def locked(dsn: str, *runs: UUID | str) -> AsyncIterator[asyncpg.Connection]:
    """Holds the rows of these runs until the block ends."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute(
                "select 1 from perdure.runs where run_id = any ($1) order by run_id for no key update", [UUID(str(run)) for run in runs]
            )
            yield connection
    finally:
        await connection.close()


async def waiters(dsn: str, count: int, seconds: float = PATIENCE) -> None:
    """Returns when so many sessions of this database wait for a lock."""
    connection = await asyncpg.connect(dsn)
    try:
        deadline = time.monotonic() + seconds
        while True:
            found = await connection.fetchval(
                "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            )
            if found >= count:
                return
            assert time.monotonic() < deadline, f"{found} sessions wait for a lock, not {count}"
            await asyncio.sleep(0.003)
    finally:
        await connection.close()


async def in_order(dsn: str, run: UUID | str, *starts: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Runs the operations at once. The first is the first to get the run's row; two are served in this order, the rest in any."""
    tasks = []
    async with locked(dsn, run):
        for count, start in enumerate(starts, 1):
            tasks.append(asyncio.ensure_future(start()))
            await waiters(dsn, count)
    return list(await asyncio.gather(*tasks))


async def break_run(connection: asyncpg.Connection, run: UUID | str, table: str = "events") -> None:
    """From now on every insert into ``table`` for this run fails with an error that nobody expects."""
    name = f"break_{UUID(str(run)).hex}"
    await connection.execute(
        f"create function perdure.{name}() returns trigger language plpgsql as "
        f"$$ begin raise exception 'broken on purpose' using errcode = 'XX001'; end $$; "
        f"create trigger {name} before insert on perdure.{table} for each row when (new.run_id = '{UUID(str(run))}') "
        f"execute function perdure.{name}()"
    )


async def mend_run(connection: asyncpg.Connection, run: UUID | str) -> None:
    await connection.execute(f"drop function perdure.break_{UUID(str(run)).hex}() cascade")


async def move_clock(connection: asyncpg.Connection, seconds: float) -> None:
    """Moves the store's clock forward, for all who use this database."""
    await connection.execute("update perdure.clock set shift = shift + $1 * interval '1 second'", seconds)


async def contents(connection: asyncpg.Connection) -> dict[str, str]:
    """A digest of every table of the store, without the times at which pods and leases were last heard of."""
    heard = {"leases": " - 'beat_at' - 'told'", "pods": " - 'seen_at'"}
    tables = [row[0] for row in await connection.fetch("select tablename from pg_tables where schemaname = 'perdure' order by 1")]
    query = " union all ".join(
        f"select '{table}', count(*) || ' rows, ' || coalesce(md5(string_agg(t.row, '' order by t.row)), '') "
        f"from (select (to_jsonb(x){heard.get(table, '')})::text as row from perdure.{table} x) t"
        for table in tables
    )
    return {row[0]: row[1] for row in await connection.fetch(query)}


async def row_counts(connection: asyncpg.Connection) -> dict[str, int]:
    """Rows of every table of the store."""
    tables = [row[0] for row in await connection.fetch("select tablename from pg_tables where schemaname = 'perdure' order by 1")]
    query = " union all ".join(f"select '{table}', count(*) from perdure.{table}" for table in tables)
    return {row[0]: row[1] for row in await connection.fetch(query)}
