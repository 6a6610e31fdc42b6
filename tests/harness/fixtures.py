"""Fixtures of all tests that run against the real store: what touches it is verified afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from tests.harness.cluster import Cluster, cluster_on
from tests.harness.gateways import Zygote
from tests.harness.gateways import zygote as new_zygote

from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.store.migrate import migrate
from perdure_operator.store.store import Store
from perdure_operator.store.verify import Violation


def described(violations: list[Violation]) -> str:
    return "\n".join(f"{v.invariant}: {v.run}: {v.detail}" for v in violations)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with new_zygote() as process:
        yield process


@pytest.fixture
async def store(database: str, postgres_server: EmbeddedPostgres) -> AsyncIterator[Store]:
    """The store on this test's database. Afterwards all invariants must hold, and Postgres has had no deadlock to break."""
    log = postgres_server.log_file
    start = log.stat().st_size
    opened = await Store.connect(database, connections=40)
    yield opened
    violations = await opened.verify()
    await opened.close()
    assert not violations, described(violations)
    with log.open("rb") as lines:
        lines.seek(start)
        assert b"deadlock detected" not in lines.read()


@pytest.fixture
async def pg(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def cluster(database: str, store: Store, zygote: Zygote, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Gateways, pods and people on this test's database. A gateway may log no error that its test did not take out of ``errors``."""
    async with cluster_on(database, tmp_path, zygote, store) as opened:
        yield opened
        errors = [line for gateway in opened.gateways for line in gateway.errors()]
        await opened.close()
        unexpected = [line for line in errors if not any(word in line for word in opened.expected_errors)]
        assert not unexpected, "\n".join(unexpected[:20])


@pytest.fixture
async def own_cluster(own_postgres: EmbeddedPostgres, zygote: Zygote, tmp_path: Path) -> AsyncIterator[Cluster]:
    """The same on a Postgres that the test may kill. All invariants must hold afterwards; gateways may log what they like."""
    await migrate(own_postgres.dsn)
    store = await Store.connect(own_postgres.dsn, connections=10)
    async with cluster_on(own_postgres.dsn, tmp_path, zygote, store) as opened:
        yield opened
        await opened.close()
        violations = await store.verify()
        await store.close()
        assert not violations, described(violations)
