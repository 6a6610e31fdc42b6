"""What the demo starts and looks at behind the scenes: the sinks, ``perdure dev``, and the processes of both."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
_KINDS = {
    "perdure.sidecar": "worker: sidecar",
    "examples.report.agent": "worker: report agent",
    "examples.report.summarise": "worker: summarise agent",
    "perdure_operator.main": "gateway",
    "postgres": "Postgres",
}


_CLOCK = re.compile(r"^\d\d:\d\d:\d\d ")


class StartFailed(Exception):
    """A process that the demo needs ended before it was ready; ``str()`` is what it said last."""


@dataclass(frozen=True)
class Sinks:
    """Addresses of the outside world: ``http`` a URL, ``smtp`` host:port."""

    http: str
    smtp: str

    @property
    def environment(self) -> dict[str, str]:
        """What the agents read their receivers from."""
        return {
            "STORE_URL": f"{self.http}/objects",
            "WEBHOOK_URL": f"{self.http}/notifications",
            "MAILBOX_URL": f"{self.http}/mails",
            "SMTP_ADDRESS": self.smtp,
        }


@asynccontextmanager
async def running_sinks(folder: Path, *options: str) -> AsyncIterator[Sinks]:
    """On free ports; they end with the context. ``options``: more for their command line."""
    ports = ("--http-port", "0", "--smtp-port", "0")
    command = (sys.executable, "-m", "examples.report.sinks", *ports, "--folder", str(folder), *options)
    async with _running(command, {}, stdout=PIPE) as process:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise StartFailed("the sinks did not start")
        yield Sinks(**dict(word.split("=", 1) for word in line.split()[1:]))


@dataclass(frozen=True)
class Dev:
    """A running ``perdure dev`` on the folder ``state``. ``url`` and ``token``: of its gateway."""

    state: Path
    process: psutil.Process
    url: str
    token: str


@asynccontextmanager
async def running_dev(
    pools: Path, state: Path, environment: dict[str, str], told: Callable[[str], None] | None = None
) -> AsyncIterator[Dev]:
    """``perdure dev`` with the manifests ``pools`` in a fresh state folder. Raises StartFailed with what it said last.

    ``told`` gets each line that it says until it is ready: the first start takes a while.
    """
    command = (_perdure(), "dev", "--fresh", "-f", str(pools), "--state-dir", str(state))
    with tempfile.TemporaryFile() as output:
        async with _running(command, environment, stdout=output.fileno(), stderr=output.fileno()) as process:
            read = 0
            while (session := _session(state)) is None or session["pid"] != process.pid:
                # Not by seek and read: the process writes where this file stands.
                lines, end, _ = os.pread(output.fileno(), 65536, read).rpartition(b"\n")
                read += len(lines + end)
                if told is not None:
                    for line in lines.decode(errors="replace").splitlines():
                        told(_CLOCK.sub("", line))
                if process.returncode is not None:
                    output.seek(0)
                    raise StartFailed(output.read().decode(errors="replace")[-2000:].strip())
                await asyncio.sleep(0.02)
            yield Dev(state, psutil.Process(process.pid), session["urls"][0], session["token"])


async def kill_worker(dev: Dev, run: str) -> list[str]:
    """SIGKILLs sidecar and agent of the worker that holds ``run``, by the command line; the lines that it printed."""
    process = await asyncio.create_subprocess_exec(
        _perdure(),
        "kill",
        run,
        env={**os.environ, "PERDURE_STATE": str(dev.state)},
        cwd=ROOT,
        stdout=PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode().strip()
    if process.returncode:
        raise StartFailed(f"perdure kill {run}: {output}")
    return output.splitlines()


async def no_workers(dev: Dev) -> None:
    """Returns when the last worker is gone. Nobody announces the end of a process that somebody else started."""
    while any(kind.startswith("worker") for _, kind in processes(dev)):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def processes(dev: Dev) -> list[tuple[int, str]]:
    """Every living process below ``perdure dev``: (pid, what it is)."""
    found = []
    for process in dev.process.children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if line:
            found.append((process.pid, next((kind for name, kind in _KINDS.items() if name in line), "other")))
    return found


def census(dev: Dev) -> dict[str, int]:
    """How many processes there are of each kind, workers at their two kinds even when there are none."""
    counts = Counter(kind for _, kind in processes(dev))
    return {kind: counts[kind] for kind in dict.fromkeys(_KINDS.values())}


def _session(state: Path) -> dict[str, Any] | None:
    try:
        session: dict[str, Any] = json.loads((state / "dev.json").read_text())
    except FileNotFoundError:
        return None
    return session


def _perdure() -> str:
    return str(Path(sys.executable).with_name("perdure"))


@asynccontextmanager
async def _running(command: tuple[str, ...], environment: dict[str, str], stdout: int, stderr: int | None = None) -> AsyncIterator[Process]:
    """Its own session, so that Ctrl-C reaches only the demo, which then ends everything in order."""
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **environment}, cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
