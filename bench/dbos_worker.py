"""A DBOS application in a process of its own: ``python -m bench.dbos_worker URL``.

Each line of its standard input, ``{"runs": n, "warm": s, "seconds": s}``, is one measurement: n workflows at once, each a loop of steps.
``open`` is written when the window begins, then one line of JSON with what was counted inside it.

DBOS as its documentation shows it: async workflows and async steps, the default configuration (pool of 20 connections, LISTEN/NOTIFY),
called from the event loop that launched it.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time

import msgspec
from dbos import DBOS, DBOSConfig

TEXT = "x" * 189


class Order(msgspec.Struct):
    runs: int
    warm: float
    seconds: float


class _Window:
    """Times of ``time.monotonic``; steps that end between the two are counted."""

    def __init__(self) -> None:
        self.opens = math.inf
        self.closes = math.inf
        self.latencies: list[float] = []


_window = _Window()


@DBOS.step()
async def work() -> dict[str, str]:
    return {"text": TEXT}


@DBOS.workflow()
async def loop() -> int:
    number = 0
    while True:
        number += 1
        begin = time.monotonic()
        await work()
        end = time.monotonic()
        if end >= _window.closes:
            return number
        if end >= _window.opens:
            _window.latencies.append(end - begin)


def say(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


async def measure(order: Order) -> None:
    _window.latencies = []
    _window.opens = _window.closes = math.inf
    handles = [await DBOS.start_workflow_async(loop) for _ in range(order.runs)]
    await asyncio.sleep(order.warm)
    _window.opens = time.monotonic()
    _window.closes = _window.opens + order.seconds
    say("open")
    await asyncio.sleep(order.seconds)
    say({"latencies": list(_window.latencies)})
    for handle in handles:
        await handle.get_result(polling_interval_sec=0.05)
    say("over")


async def main() -> None:
    config: DBOSConfig = {"name": "perdure-bench", "system_database_url": sys.argv[1], "log_level": "ERROR"}
    DBOS(config=config)
    DBOS.launch()
    say("ready")
    try:
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            await measure(msgspec.json.decode(line, type=Order))
    finally:
        DBOS.destroy()


if __name__ == "__main__":
    asyncio.run(main())
