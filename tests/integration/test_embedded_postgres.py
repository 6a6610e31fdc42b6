"""The embedded server keeps its data through every kind of end, and never shares its folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from perdure_operator.local import postgres_account
from perdure_operator.local.embedded_postgres import DataDirInUse, EmbeddedPostgres, PostgresFailed, Setting

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account")


@pytest.fixture
def folder(server_folder: Path) -> Iterator[Path]:
    path = server_folder / uuid.uuid4().hex[:12]
    path.mkdir(mode=0o711)
    yield path
    shutil.rmtree(path)


def server(folder: Path) -> EmbeddedPostgres:
    return EmbeddedPostgres(folder / "postgres", durable=False)


async def write(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("create table kept (value int); insert into kept values (7)")
    await connection.close()


async def read(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select value from kept"))
    finally:
        await connection.close()


async def test_data_stays_between_starts(folder: Path) -> None:
    async with server(folder) as first:
        await write(first.dsn)
    assert first.pid is None
    async with server(folder) as second:
        assert await read(second.dsn) == 7


async def test_a_start_of_a_running_server_changes_nothing(own_postgres: EmbeddedPostgres) -> None:
    pid = own_postgres.pid
    assert await own_postgres.start() == own_postgres.dsn
    assert own_postgres.pid == pid


async def test_a_killed_server_comes_back_under_the_same_dsn(own_postgres: EmbeddedPostgres) -> None:
    dsn, tcp_dsn = own_postgres.dsn, own_postgres.tcp_dsn
    connection = await asyncpg.connect(dsn)
    await write(dsn)
    backend = psutil.Process(await connection.fetchval("select pg_backend_pid()"))
    await own_postgres.kill()
    assert not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE
    assert await own_postgres.start() == dsn
    assert await read(tcp_dsn) == 7


async def test_a_server_that_somebody_else_killed_starts_again(own_postgres: EmbeddedPostgres) -> None:
    await write(own_postgres.dsn)
    postmaster = psutil.Process(own_postgres.pid)
    lifeline = own_postgres._lifeline
    postmaster.kill()
    postmaster.wait()
    await own_postgres.start()
    assert await read(own_postgres.dsn) == 7
    # It would end whoever has the number of the dead one when we end.
    assert lifeline is not None
    assert lifeline.poll() is not None


OWNER = """
import asyncio, sys
from pathlib import Path
from perdure_operator.local.embedded_postgres import EmbeddedPostgres

async def main():
    server = EmbeddedPostgres(Path(sys.argv[1]), durable=False)
    await server.start()
    print(server.pid, server._lifeline.pid, server.dsn, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def owner(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process, psutil.Process, str]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder / "postgres")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    postmaster, lifeline, dsn = process.stdout.readline().split()
    return process, psutil.Process(int(postmaster)), psutil.Process(int(lifeline)), dsn


def sleeper(uid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], user=uid if os.geteuid() == 0 else None)


async def test_the_server_ends_with_a_killed_owner(folder: Path) -> None:
    process, postmaster, _, _ = owner(folder)
    with process:
        process.kill()
    psutil.wait_procs([postmaster], timeout=20)
    assert not postmaster.is_running() or postmaster.status() == psutil.STATUS_ZOMBIE


async def test_an_orphaned_server_is_replaced(folder: Path) -> None:
    process, postmaster, lifeline, dsn = owner(folder)
    with process:
        await write(dsn)
        lifeline.kill()
        process.kill()
    assert postmaster.is_running()
    async with server(folder) as next_server:
        assert await read(next_server.dsn) == 7
        assert not postmaster.is_running() or postmaster.status() == psutil.STATUS_ZOMBIE


async def test_orphaned_backends_of_a_dead_postmaster_are_ended(folder: Path) -> None:
    process, postmaster, lifeline, dsn = owner(folder)
    with process:
        await write(dsn)
        backends = postmaster.children()
        stuck = backends[0]
        stuck.suspend()
        lifeline.kill()
        postmaster.kill()
        process.kill()
    async with server(folder) as next_server:
        assert await read(next_server.dsn) == 7
        assert not stuck.is_running() or stuck.status() == psutil.STATUS_ZOMBIE


async def test_a_lock_file_with_a_reused_pid_does_not_block(folder: Path) -> None:
    async with server(folder) as first:
        await write(first.dsn)
    # The pid of a living process that Postgres may signal and that is no Postgres.
    other = sleeper(first.data_dir.stat().st_uid)
    (first.data_dir / "postmaster.pid").write_text(f"{other.pid}\n{first.data_dir}\n1\n{first.port}\n\n127.0.0.1\n1 1\nready   \n")
    try:
        async with server(folder) as second:
            assert await read(second.dsn) == 7
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_two_owners_are_kept_apart(folder: Path) -> None:
    async with server(folder) as first:
        with pytest.raises(DataDirInUse):
            await server(folder).start()
        await write(first.dsn)


async def test_an_interrupted_first_start_is_made_anew(folder: Path) -> None:
    half_made = folder / "postgres.new"
    half_made.mkdir()
    (half_made / "PG_VERSION").write_text("18\n")
    async with server(folder) as first:
        await write(first.dsn)


async def test_settings_reach_the_server(folder: Path) -> None:
    quoted = "with 'quotes' and spaces"
    settings: dict[str, Setting] = {"max_connections": 42, "log_connections": "all", "jit": False, "application_name": quoted}
    async with EmbeddedPostgres(folder / "postgres", durable=False, settings=settings) as configured:
        connection = await asyncpg.connect(configured.dsn)
        shown = [await connection.fetchval("select current_setting($1)", name) for name in (*settings, "fsync", "TimeZone")]
        await connection.close()
    assert shown == ["42", "all", "off", quoted, "off", "UTC"]


async def test_a_failed_start_says_what_the_server_said(folder: Path) -> None:
    broken = EmbeddedPostgres(folder / "postgres", durable=False, settings={"shared_buffers": "a lot"})
    with pytest.raises(PostgresFailed, match='invalid value for parameter "shared_buffers"'):
        await broken.start()
    async with server(folder):
        pass


async def test_tcp_needs_the_password_and_the_socket_is_closed_to_others(own_postgres: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(own_postgres.tcp_dsn)
    await connection.close()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(f"postgresql://postgres:guess@127.0.0.1:{own_postgres.port}/postgres")
    assert (own_postgres.data_dir.stat().st_mode & 0o077, own_postgres.log_file.with_suffix(".password").stat().st_mode & 0o077) == (0, 0)


async def test_a_folder_too_deep_for_a_socket_path(folder: Path) -> None:
    deep = folder / ("a" * 60) / ("b" * 60)
    async with EmbeddedPostgres(deep / "postgres", durable=False) as first:
        await write(first.dsn)
    async with EmbeddedPostgres(deep / "postgres", durable=False) as second:
        assert await read(second.dsn) == 7
        shutil.rmtree(second._socket_dir())


@as_root
async def test_root_can_use_a_folder_that_only_root_can_enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_account, "ROOT_HOME", folder / "home")
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    for expected in (None, 7):
        async with server(closed) as running:
            if expected is None:
                await write(running.dsn)
            assert await read(running.dsn) == 7
    assert closed.stat().st_mode & 0o077 == 0
    first_home = (closed / "postgres").resolve().parent
    shutil.rmtree(closed)

    closed.mkdir(mode=0o700)
    async with server(closed) as fresh:
        with pytest.raises(asyncpg.UndefinedTableError):
            await read(fresh.dsn)
    assert not first_home.exists()


@as_root
async def test_root_can_use_programs_that_only_root_can_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_account, "ROOT_HOME", folder / "home")
    monkeypatch.setattr(postgres_account, "reachable", lambda path, account: path.name != "postgres")
    async with server(folder) as running:
        assert running.pid is not None
        assert psutil.Process(running.pid).exe().startswith(str(folder / "home"))
