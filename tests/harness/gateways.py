"""Real gateway processes under a test's control: start, kill, freeze, start again on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

PATIENCE = 20.0
"""Seconds that a test waits for what must happen before it fails."""

LEASE_SECONDS = 8.0
"""Long enough that a busy machine loses no lease that a test did not mean to lose."""


class Zygote:
    """The process that forks gateways; see ``zygote.py``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_root()
        )

    def fork(self, env: dict[str, str], log: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"env": env, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    try:
        yield process
    finally:
        process.close()


def _root() -> Path:
    return Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Gateway:
    """One gateway: ``process`` None, and ``pid`` 0, while it does not run. ``log`` is what it wrote, JSON lines."""

    name: str
    port: int
    env: dict[str, str]
    log: Path
    zygote: Zygote
    http: aiohttp.ClientSession
    process: psutil.Process | None = None
    """Knows when it began, so that no signal goes to a stranger who has its number by then."""

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Returns when it is ready."""
        pid = self.zygote.fork(self.env, self.log)
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process = psutil.Process(pid)
        deadline = time.monotonic() + PATIENCE
        while not await self.answers("/readyz"):
            if self.process is None or not self.process.is_running() or time.monotonic() > deadline:
                raise AssertionError(f"gateway {self.name} does not start:\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(0.01)

    async def answers(self, path: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self.http.get(self.url + path, timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        return False

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM; returns when it has ended by itself."""
        await self._end(signal.SIGTERM)

    def freeze(self) -> None:
        assert self.process is not None
        self.process.suspend()

    def thaw(self) -> None:
        assert self.process is not None
        self.process.resume()

    async def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        deadline = time.monotonic() + PATIENCE
        while process.is_running():
            assert time.monotonic() < deadline, f"gateway {self.name} does not end on {number.name}"
            await asyncio.sleep(0.005)

    async def metric(self, name: str, **labels: str) -> float:
        """One sample of its metrics; 0 when it was never counted."""
        async with self.http.get(self.url + "/metrics") as response:
            text = await response.text()
        want = name + ("{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}" if labels else "")
        for line in text.splitlines():
            if line.startswith(want + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def errors(self) -> list[str]:
        """Lines of its log that nobody expects: tracebacks and unexpected failures."""
        text = self.log.read_text() if self.log.exists() else ""
        return [line for line in text.splitlines() if '"level": "error"' in line or line.startswith(("Traceback", "ERROR"))]
