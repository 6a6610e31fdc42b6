"""Brings a database to this version: numbered migrations once each, then the functions, anew every time.

``NNNN_name.pre.sql`` runs before the new code rolls out, ``NNNN_name.post.sql`` after it (code of the version before must run on the
new schema). Functions (``sql/*.sql``) are ``create or replace``, so they need no numbers; one that got more parameters with defaults
takes the place of the one without them, and old code calls the new one; to what a function returns,
columns may only be added. Everything happens in one transaction under an advisory lock: two migrators wait for each other, and a failure
changes nothing. (A session lock would not survive PgBouncer; this one belongs to the transaction.)

``require_schema`` is for those who must not start before that. The functions count as one more migration there, named after their
content: new code with the numbered migrations of its predecessor would otherwise meet old functions.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar, Literal

import asyncpg

from perdure_operator.domain.errors import PerdureError
from perdure_operator.store.errors import translated

_LOCK = 0x7065726475  # "perdu"
# To Postgres another list of parameters is another function, and a call that fits both is an error. What this transaction has written
# is of this version.
_SUPPLANTED = """
  select old.oid::regprocedure::text from pg_proc old join pg_proc new using (pronamespace, proname)
  where old.pronamespace = 'perdure'::regnamespace
    and age(new.xmin) <= age(pg_current_xact_id()::xid) and age(old.xmin) > age(pg_current_xact_id()::xid)
    and old.pronargs between new.pronargs - new.pronargdefaults and new.pronargs - 1
    and starts_with(concat(new.proargtypes, ' '), ltrim(concat(old.proargtypes, ' ')))
"""
_DROP = re.compile(r"DROP FUNCTION (perdure\.\w+\(.*?\))")
_NAME = re.compile(r"^(\d{4})_\w+\.(pre|post)\.sql$")


class SchemaBehind(PerdureError):
    """The database is not at this version yet."""

    code: ClassVar[str] = "schema-behind"
    status: ClassVar[int] = 503
    retryable: ClassVar[bool] = True
    action: ClassVar[str] = "Run `perdure-operator migrate` of this version."


@dataclass(frozen=True)
class Migration:
    number: int
    phase: Literal["pre", "post"]
    name: str
    sql: str


def migrations() -> list[Migration]:
    """All migrations of this version, in the order in which they run."""
    found = []
    for file in files("perdure_operator.store").joinpath("migrations").iterdir():
        if match := _NAME.match(file.name):
            phase: Literal["pre", "post"] = "pre" if match[2] == "pre" else "post"
            found.append(Migration(int(match[1]), phase, file.name, file.read_text()))
    return sorted(found, key=lambda m: (m.number, m.phase != "pre"))


def functions() -> list[tuple[str, str]]:
    """The files of ``sql/``, in order."""
    folder = files("perdure_operator.store").joinpath("sql")
    return sorted((file.name, file.read_text()) for file in folder.iterdir() if file.name.endswith(".sql"))


async def migrate(dsn: str, phase: Literal["pre", "post", "all"] = "all") -> list[str]:
    """Applies what is missing and gives the names of the migrations that were applied. Safe to call at any time, from anywhere.

    Raises Unavailable, StoreError.
    """
    with translated():
        connection = await asyncpg.connect(dsn)
        try:
            async with connection.transaction():
                return await _migrate(connection, phase)
        finally:
            await connection.close()


async def require_schema(dsn: str) -> None:
    """Raises SchemaBehind when something is missing that this version needs; Unavailable, StoreError."""
    with translated():
        connection = await asyncpg.connect(dsn)
        try:
            made = await connection.fetchval("select to_regclass('perdure.migrations') is not null")
            done = await _applied(connection) if made else frozenset()
        finally:
            await connection.close()
    needed = [*(migration.name for migration in migrations() if migration.phase == "pre"), _functions_name()]
    if missing := [name for name in needed if name not in done]:
        raise SchemaBehind(f"the database lacks {', '.join(missing)}")


async def _migrate(connection: asyncpg.Connection, phase: Literal["pre", "post", "all"]) -> list[str]:
    await connection.execute(f"select pg_advisory_xact_lock({_LOCK})")
    await connection.execute("create schema if not exists perdure")
    await connection.execute(
        "create table if not exists perdure.migrations (name text primary key, applied_at timestamptz not null default now())"
    )
    done = await _applied(connection)
    applied = []
    for migration in migrations():
        if migration.name in done or phase not in ("all", migration.phase):
            continue
        await connection.execute(migration.sql)
        await connection.execute("insert into perdure.migrations (name) values ($1)", migration.name)
        applied.append(migration.name)
    await connection.execute("set local check_function_bodies = off")
    for _, sql in functions():
        await _define(connection, sql)
    for old in await connection.fetch(_SUPPLANTED):
        await connection.execute(f"drop function {old[0]}")
    await connection.execute(
        "insert into perdure.migrations (name) values ($1) on conflict (name) do update set applied_at = now()", _functions_name()
    )
    return applied


async def _define(connection: asyncpg.Connection, sql: str) -> None:
    while True:
        try:
            async with connection.transaction():
                await connection.execute(sql)
                return
        except asyncpg.InvalidFunctionDefinitionError as error:
            # It returns something else than before: only then is it dropped, which those who are in it right now may notice.
            if (found := _DROP.search(error.hint or "")) is None:
                raise
            await connection.execute(f"drop function {found[1]}")


async def _applied(connection: asyncpg.Connection) -> frozenset[str]:
    return frozenset(row["name"] for row in await connection.fetch("select name from perdure.migrations"))


def _functions_name() -> str:
    digest = hashlib.sha256("\n".join(sql for _, sql in functions()).encode())
    return f"functions-{digest.hexdigest()[:16]}"
