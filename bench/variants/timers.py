"""Timers: how late is the lease of a run whose timer has come due, in an empty store and in one where very many runs sleep.

Two stores on the same server take turns. The due time is the store's (``clock_timestamp()``), the lease's the driver's: the same clock of
the same machine. Sleeping runs wait for a timer a month away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import datetime

import msgspec

from bench.pod import crew
from bench.samples import Sample
from bench.seed import fill
from bench.stage import Stage
from bench.variants.variant import AtPostgres
from bench.variants.wake import LEASE_SECONDS, finish, suspended
from perdure.protocol import RunContext

POOL = "timers"
AT_ONCE = 32
FIRST_SECONDS = 0.5
SPREAD_SECONDS = 0.8
SLEEP = b'{"op":"wait","key":"sleep:sleep#0","name":"sleep","on":[{"kind":"timer","seconds":%g}],"suspend":true}'
MONTH = 30 * 86_400


class Timer(AtPostgres):
    """``sleeping`` other runs in the store. It starts its own gateway, on its own database."""

    def __init__(self, sleeping: int, tell: Callable[[str], None]) -> None:
        self.name = f"timer-{sleeping}"
        self.what = f"timer due → lease at a warm pod, {sleeping:,} runs sleeping"
        self._sleeping = sleeping
        self._database = f"timers_{sleeping}"
        self._tell = tell

    async def prepare(self, stage: Stage) -> None:
        dsn = await stage.database(self._database)
        if not self._sleeping:
            return
        async with stage.gateway(self._database) as gateway:
            await gateway.pool(POOL)
            [original] = await suspended(gateway, POOL, [SLEEP % MONTH])
        await fill(dsn, original, self._sleeping - 1, self._tell)
        await stage.settle(self._database)

    async def sample(self, stage: Stage, seconds: float) -> Sample:
        latencies: list[float] = []
        async with stage.gateway(self._database) as gateway:
            await gateway.pool(POOL)
            with stage.meter.measure() as usage:
                end = time.monotonic() + seconds
                while time.monotonic() < end or not latencies:
                    await suspended(gateway, POOL, [SLEEP % (FIRST_SECONDS + n * SPREAD_SECONDS / AT_ONCE) for n in range(AT_ONCE)])
                    pods = await crew(gateway, POOL, AT_ONCE)
                    async with asyncio.timeout(LEASE_SECONDS):
                        leases = await asyncio.gather(*(pod.leased for pod in pods))
                    for pod, lease in zip(pods, leases, strict=True):
                        latencies.append(pod.lease_at - due_at(lease.context))
                    await finish(pods)
        return Sample(len(latencies), latencies, usage())


def due_at(context: bytes) -> float:
    """When the timer that woke the run was due, in seconds since 1970."""
    reasons = msgspec.json.decode(context, type=RunContext).reasons
    return next(datetime.fromisoformat(reason.at).timestamp() for reason in reasons if reason.kind == "timer")
