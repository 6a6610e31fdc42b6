"""Wakes at the pod API: a run that holds no pod gets a signal; how long until its lease, with all its context, is at a warm pod.

The clock starts before the signal's HTTP request is sent, so that its way in and its commit are part of the figure. A warm pod is an idle
WebSocket at the same gateway; what an agent adds (fork, first line) is measured with agents.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from bench.pod import Pod, check, crew
from bench.samples import Sample, percentile
from bench.stage import BenchError, Gateway, Stage
from bench.variants.variant import AtGateway

POOL = "wake"
SIGNAL = "go"
AT_ONCE = 64
LEASE_SECONDS = 30.0
WAIT = b'{"op":"wait","key":"wait:go#0","name":"go","on":[{"kind":"signal","name":"go"}],"suspend":true}'


async def suspended(gateway: Gateway, pool: str, waits: Sequence[bytes], *, input: Any = None) -> list[str]:
    """A new run of the pool for each wait, leased once and now waiting without a pod; gives their ids."""
    pods = await crew(gateway, pool, len(waits))
    await gateway.runs(pool, len(waits), input=input)
    async with asyncio.timeout(LEASE_SECONDS):
        await asyncio.gather(*(pod.leased for pod in pods))
    answers = await asyncio.gather(*(pod.call(wait) for pod, wait in zip(pods, waits, strict=True)))
    check(pods)
    for pod in pods:
        pod.leave()
    if not all(answer.released for answer in answers):
        raise BenchError("a run did not suspend")
    return [pod.leased.result().run for pod in pods]


async def finish(pods: Sequence[Pod]) -> None:
    await asyncio.gather(*(pod.call(b'{"op":"finish","outcome":"succeeded"}') for pod in pods))
    check(list(pods))
    for pod in pods:
        pod.leave()


class Wake(AtGateway):
    """``at_once`` runs get their signals at the same moment, and as many pods are warm."""

    def __init__(self, at_once: int) -> None:
        self.name = f"wake-{at_once}"
        self.what = "signal sent → lease at a warm pod" + (f", {at_once} at once" if at_once > 1 else ", one at a time")
        self._at_once = at_once
        self._sent: dict[str, float] = {}
        self._accepted: dict[str, float] = {}

    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample:
        await gateway.pool(POOL)
        latencies: list[float] = []
        after: list[float] = []
        left: list[str] = []
        with stage.meter.measure() as usage:
            end = time.monotonic() + seconds
            while time.monotonic() < end or not latencies:
                if not left:
                    left = await suspended(gateway, POOL, [WAIT] * AT_ONCE)
                runs = [left.pop() for _ in range(self._at_once)]
                pods = await crew(gateway, POOL, self._at_once)
                await asyncio.gather(*(self._signal(gateway, run) for run in runs))
                async with asyncio.timeout(LEASE_SECONDS):
                    leases = await asyncio.gather(*(pod.leased for pod in pods))
                for pod, lease in zip(pods, leases, strict=True):
                    latencies.append(pod.lease_at - self._sent[lease.run])
                    after.append(max(0.0, pod.lease_at - self._accepted[lease.run]))
                await finish(pods)
        await self._drain(gateway, left)
        accepted = {f"afterAcceptedP{n}Ms": round(percentile(after, n / 100) * 1e3, 2) for n in (50, 99)}
        return Sample(len(latencies), latencies, usage(), accepted)

    async def _signal(self, gateway: Gateway, run: str) -> None:
        self._sent[run] = time.time()
        await gateway.call("POST", f"runs/{run}/signals/{SIGNAL}")
        self._accepted[run] = time.time()

    async def _drain(self, gateway: Gateway, runs: Sequence[str]) -> None:
        await asyncio.gather(*(gateway.call("POST", f"runs/{run}/cancel") for run in runs))
