"""The agent of the benchmarks: ``python -m bench.agent``, started by ``crew.py`` beside a sidecar.

Its first line tells the driver that agent code runs (a datagram with the run and the time). Then, if its input names a window, it takes
steps until that window closes and writes what it saw to a file: the times of steps that ended inside.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from perdure import Run, agent, step

TEXT = "x" * 189
LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Order:
    """``port``: where the driver listens. ``window``: file that will hold the two times of the window (``time.monotonic``), and the prefix
    of the files with the results; empty: nothing more to do."""

    port: int
    window: str = ""


@step
async def work() -> dict[str, str]:
    return {"text": TEXT}


@agent
async def bench(run: Run, input: Order) -> int:
    _tell(input.port, run.id)
    if not input.window:
        return 0
    opens, closes = await _window(Path(input.window))
    latencies = []
    while True:
        begin = time.monotonic()
        await work()
        end = time.monotonic()
        if end >= closes:
            break
        if end >= opens:
            latencies.append(end - begin)
    _write(Path(f"{input.window}.{run.id}"), json.dumps(latencies))
    _tell(input.port, run.id)
    return len(latencies)


async def _window(file: Path) -> tuple[float, float]:
    while (found := _read(file)) is None:  # noqa: ASYNC110  # another process's doing: there is no event to wait for
        await asyncio.sleep(LOOK_SECONDS)
    return found


def _read(file: Path) -> tuple[float, float] | None:
    if not file.exists():
        return None
    opens, closes = json.loads(file.read_text())
    return opens, closes


def _write(file: Path, content: str) -> None:
    file.write_text(content)


def _tell(port: int, run: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.sendto(f"{run} {time.time()!r}".encode(), ("127.0.0.1", port))


if __name__ == "__main__":
    bench.serve()
