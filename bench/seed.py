"""Fills a store with suspended runs, as many as a table can hold, without running them: copies of one that is really suspended.

Every row that the original has in the tables of the core is copied under new ids, so the store's own checks hold for the copies too.
"""

from __future__ import annotations

from collections.abc import Callable

import asyncpg

PART = 20_000

_COPIES = """
create temp table copies on commit drop as
select n, perdure_bench_uuid(n) as run_id from generate_series($1::bigint, $2::bigint) n
"""
# Ids that grow with n like real ones (UUIDv7 begins with the time), so that the indexes grow at their right end as they do in life.
_UUID = """
create or replace function perdure_bench_uuid(n bigint) returns uuid language sql immutable as
$$ select (lpad(to_hex(1700000000000 + n), 12, '0') || '7000' || '8000' || substr(md5(n::text), 1, 12))::uuid $$
"""
_TABLES = ("runs", "run_specs", "events", "journal", "waits", "wait_conditions")


async def fill(dsn: str, original: str, count: int, tell: Callable[[str], None]) -> None:
    """``original``: id of the suspended run to copy ``count`` times."""
    connection = await asyncpg.connect(dsn, command_timeout=3600)
    try:
        await connection.execute(_UUID)
        for table in _TABLES:
            columns = [
                row[0]
                for row in await connection.fetch(
                    "select attname from pg_attribute where attrelid = $1::regclass and attnum > 0 and not attisdropped order by attnum",
                    f"perdure.{table}",
                )
            ]
            values = ", ".join(_value(table, column) for column in columns)
            names = ", ".join(f'"{column}"' for column in columns)
            copy = f"insert into perdure.{table} ({names}) select {values} from copies c, perdure.{table} t where t.run_id = $1::uuid"
            for begin in range(1, count + 1, PART):
                async with connection.transaction():
                    await connection.execute(_COPIES.replace("$1", str(begin)).replace("$2", str(min(count, begin + PART - 1))))
                    await connection.execute(copy, original)
            tell(f"{count:,} suspended runs: {table}")
    finally:
        await connection.close()


def _value(table: str, column: str) -> str:
    if column == "run_id" or (table == "runs" and column == "root_id"):
        return "c.run_id"
    if table == "runs" and column == "name":
        return "t.name || '-' || c.n"
    return f't."{column}"'
