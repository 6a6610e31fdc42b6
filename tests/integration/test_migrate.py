"""Who waits for the schema waits for all of it, and no longer; who migrates waits for the database."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import asyncpg
import pytest
from tests.harness.gateways import PATIENCE, free_port

from perdure_operator.domain.errors import Unavailable
from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.store.migrate import SchemaBehind, migrate, require_schema


async def test_the_schema_is_there_when_it_was_migrated(empty_database: str) -> None:
    with pytest.raises(SchemaBehind, match=r"0001_schema\.pre\.sql, .*functions-"):
        await require_schema(empty_database)
    assert "0001_schema.pre.sql" in await migrate(empty_database)
    await require_schema(empty_database)
    assert await migrate(empty_database) == []


async def test_other_functions_are_another_schema(database: str) -> None:
    """A version whose only news is in its functions does not start on old ones."""
    connection = await asyncpg.connect(database)
    await connection.execute("update perdure.migrations set name = 'functions-of-another' where name like 'functions-%'")
    with pytest.raises(SchemaBehind, match=r"^the database lacks functions-[0-9a-f]{16}$"):
        await require_schema(database)
    assert await migrate(database) == []
    await require_schema(database)
    await connection.close()


async def test_a_function_with_a_new_default_takes_the_place_of_the_one_without_it(database: str) -> None:
    """Else a call of the version before fits both, and is an error until its last process is gone."""
    connection = await asyncpg.connect(database)
    for old in ("pool_demand()", "retire_idle(text)"):
        await connection.execute(f"create function perdure.{old} returns int language sql as 'select 1'")
    with pytest.raises(asyncpg.AmbiguousFunctionError):
        await connection.execute("select * from perdure.pool_demand()")
    await migrate(database)
    await connection.execute("select * from perdure.pool_demand()")
    # This one no call of today's can be meant for: it stays for those who know no other.
    await connection.execute("select perdure.retire_idle('a')")
    await connection.close()


async def test_a_function_may_return_more_than_before(database: str) -> None:
    """`create or replace` refuses that: without help no such version could ever be installed over another."""
    connection = await asyncpg.connect(database)
    await connection.execute("drop function perdure.news(text)")
    await connection.execute("create function perdure.news(p_gateway text) returns table (run_id uuid) language sql as 'select null::uuid'")
    await connection.execute("update perdure.migrations set name = 'functions-of-another' where name like 'functions-%'")
    await migrate(database)
    assert "outcomes" in await connection.fetchval("select pg_get_function_result('perdure.news(text)'::regprocedure)")
    await connection.close()


BEFORE_EXECUTORS = """
drop table perdure.executors;
alter table perdure.ledger drop column absent_at, drop column asked_at;
alter table perdure.pods drop column lost;
delete from perdure.migrations where name like '0004%';
insert into perdure.ledger (run_id, key, tool, effect, state, policy, fingerprint, timeout_seconds, epoch, holder, seq, executor_ended)
select gen_random_uuid(), key, 't', 'external', state, 'query', 'f', 1, 3, holder, 1, ended from (values
  ('seen', 'UNKNOWN', '00000000-0000-0000-0000-000000000001'::uuid, false),
  ('unseen', 'UNKNOWN', '00000000-0000-0000-0000-000000000002', false),
  ('ended', 'UNKNOWN', '00000000-0000-0000-0000-000000000003', true), ('done', 'SUCCEEDED', '00000000-0000-0000-0000-000000000001', false)
) before(key, state, holder, ended);
insert into perdure.terminated_pods values ('00000000-0000-0000-0000-000000000001', now());
"""


async def test_what_was_proven_of_an_unknown_effect_stays_proven(database: str) -> None:
    """Of one whose pod was not seen to end an end that is seen later is proof."""
    connection = await asyncpg.connect(database)
    await connection.execute(BEFORE_EXECUTORS)
    assert "0004_executors.pre.sql" in await migrate(database)

    async def gone() -> dict[str, bool]:
        query = "select l.key, x.gone_at is not null as gone from perdure.executors x join perdure.ledger l using (run_id, epoch)"
        return {row["key"]: row["gone"] for row in await connection.fetch(query)}

    assert await gone() == {"seen": True, "unseen": False}
    await connection.execute("select * from perdure.pod_gone('00000000-0000-0000-0000-000000000002')")
    assert await gone() == {"seen": True, "unseen": True}
    await connection.close()


async def test_a_database_that_is_away_is_no_reason_to_give_up(own_postgres: EmbeddedPostgres) -> None:
    await own_postgres.stop()
    with pytest.raises(Unavailable):
        await migrate(own_postgres.dsn)
    roles = [await start(role, own_postgres.dsn) for role in ("wait-for-schema", "migrate")]
    await asyncio.gather(*(told(process, "retry") for process in roles))
    await own_postgres.start()
    async with asyncio.timeout(PATIENCE):
        assert [await process.wait() for process in roles] == [0, 0]


async def test_waiting_ends_when_it_is_told_to() -> None:
    process = await start("wait-for-schema", f"postgresql://postgres@127.0.0.1:{free_port()}/postgres")
    await told(process, "retry")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 128 + signal.SIGTERM, "handled, as the first process of a container must"


async def start(role: str, dsn: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "perdure_operator.main", role, env={**os.environ, "PERDURE_DSN": dsn}, stderr=asyncio.subprocess.PIPE
    )


async def told(process: asyncio.subprocess.Process, word: str) -> None:
    """Returns when its log has the word."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        async for line in process.stderr:
            if word.encode() in line:
                return
    raise AssertionError(f"it ended without saying {word}")
