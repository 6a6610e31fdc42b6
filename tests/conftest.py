"""Postgres for every test that wants one: one real server a test process, a fresh database a test.

    postgres          DSN of the server (database ``postgres``); shared, so make no objects there and do not stop it
    postgres_server   the :class:`EmbeddedPostgres` behind it, for its TCP DSN and the like
    database          DSN of a database of this test alone, migrated; dropped afterwards
    empty_database    the same without tables
    own_postgres      a server of this test alone, to kill and restart

With xdist every worker has its own server. The servers do not flush to disk: a killed server keeps its commits, a machine crash would not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.store.migrate import migrate

# A job in the background ignores these, and whatever it starts would inherit that: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("perdure", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("perdure")

PREFIX = "perdure-tests-"
E2E = "tests/e2e/"


class OneCluster(LoadScopeScheduling):  # type: ignore[misc]
    """End-to-end tests run one after the other, in one process, and begin first: there is one cluster, and they take longest."""

    def _split_scope(self, nodeid: str) -> str:
        return E2E if nodeid.startswith(E2E) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneCluster:
    return OneCluster(config, log)


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """A temporary folder that the server's own system user can enter when the tests run as root (pytest's own can not be entered)."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (owner := re.match(rf"{PREFIX}(\d+)-", old.name)) and not _alive(int(owner[1])):
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def postgres_server(server_folder: Path) -> AsyncIterator[EmbeddedPostgres]:
    async with EmbeddedPostgres(server_folder / "shared", durable=False, settings={"max_connections": 300}) as server:
        yield server


@pytest.fixture(scope="session")
def postgres(postgres_server: EmbeddedPostgres) -> str:
    return postgres_server.dsn


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def migrated_template(postgres_server: EmbeddedPostgres) -> str:
    """Name of a database with all migrations applied, to copy from."""
    await _execute(postgres_server.dsn, 'create database "perdure_template"')
    await migrate(postgres_server.dsn_of("perdure_template"))
    return "perdure_template"


@pytest.fixture
async def database(postgres_server: EmbeddedPostgres, migrated_template: str) -> AsyncIterator[str]:
    async with _copy_of(postgres_server, migrated_template) as dsn:
        yield dsn


@pytest.fixture
async def empty_database(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    async with _copy_of(postgres_server, "template1") as dsn:
        yield dsn


@pytest.fixture
async def own_postgres(server_folder: Path) -> AsyncIterator[EmbeddedPostgres]:
    data_dir = server_folder / f"own-{uuid.uuid4().hex[:12]}"
    async with EmbeddedPostgres(data_dir, durable=False) as server:
        yield server
    shutil.rmtree(data_dir)


@asynccontextmanager
async def _copy_of(server: EmbeddedPostgres, template: str) -> AsyncIterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    await _execute(server.dsn, f'create database "{name}" template "{template}"')
    try:
        yield server.dsn_of(name)
    finally:
        await _execute(server.dsn, f'drop database "{name}" with (force)')


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def _alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
