"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import asyncpg
import psutil

SETTINGS = (
    "server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "wal_buffers", "max_wal_size", "wal_sync_method",
    "commit_delay", "autovacuum", "max_connections", "jit", "wal_compression",
)  # fmt: skip
LIBRARIES = ("perdure", "asyncpg", "aiohttp", "uvloop", "msgspec", "dbos", "sqlalchemy", "psycopg")


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def flush_seconds(folder: Path, *, count: int = 100) -> float:
    """Median time of one 8 KiB write and fdatasync where the database lives: the floor under every commit."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * 8192 * count)
        file.flush()
        os.fsync(file.fileno())
        for n in range(count):
            begin = time.perf_counter()
            os.pwrite(file.fileno(), b"\1" * 8192, n * 8192)
            getattr(os, "fdatasync", os.fsync)(file.fileno())
            times.append(time.perf_counter() - begin)
    return sorted(times)[count // 2]


async def describe(dsn: str, folder: Path) -> dict[str, Any]:
    connection = await asyncpg.connect(dsn)
    try:
        postgres = {name: await connection.fetchval("select current_setting($1)", name) for name in SETTINGS}
    finally:
        await connection.close()
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": _model(),
        "cores": psutil.cpu_count(),
        "memoryGiB": round(psutil.virtual_memory().total / 2**30, 1),
        "loadAtStart": round(os.getloadavg()[0], 2),
        "flushMs": round(flush_seconds(folder) * 1e3, 3),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "postgres": postgres,
    }


def in_words(described: dict[str, Any]) -> str:
    postgres = described["postgres"]
    return (
        f"{described['cores']} cores, {described['memoryGiB']} GiB, {described['cpu']}; Postgres {postgres['server_version']}, "
        f"fsync {postgres['fsync']}, a flush takes {described['flushMs']} ms; load {described['loadAtStart']}"
    )
