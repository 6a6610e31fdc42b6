"""Steps at the pod API: N pods at work over N WebSockets, each sends its next step when the last is committed."""

from __future__ import annotations

import asyncio
import time

from bench.pod import Pod, check, crew
from bench.samples import Sample
from bench.stage import Gateway, Stage
from bench.variants.variant import OUTPUT, AtGateway
from perdure import protocol as wire

POOL = "podapi"
WARM_SECONDS = 0.4
LEASE_SECONDS = 60.0


class _Tally:
    """``open``: the window in which answers are counted. ``stopped``: no further step is sent."""

    def __init__(self) -> None:
        self.open = False
        self.stopped = False
        self.latencies: list[float] = []


class _Stepper:
    def __init__(self, pod: Pod, tally: _Tally) -> None:
        self._pod = pod
        self._tally = tally
        self._number = 0
        self._sent = 0.0
        self.idle = asyncio.Event()

    def step(self) -> None:
        self._number += 1
        self._sent = time.perf_counter()
        self._pod.operate(b'{"op":"step.end","key":"step:s#%d","name":"s","output":%b}' % (self._number, OUTPUT), self._answered)

    def _answered(self, _: wire.Answer) -> None:
        if self._tally.open:
            self._tally.latencies.append(time.perf_counter() - self._sent)
        if self._tally.stopped:
            self.idle.set()
        else:
            self.step()


class PodSteps(AtGateway):
    def __init__(self, runs: int) -> None:
        self.name = f"pod-{runs}"
        self.what = f"step at the pod API, {runs} run{'s' if runs > 1 else ''}"
        self._runs = runs

    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample:
        await gateway.pool(POOL)
        pods = await crew(gateway, POOL, self._runs)
        try:
            await gateway.runs(POOL, self._runs)
            async with asyncio.timeout(LEASE_SECONDS):
                await asyncio.gather(*(pod.leased for pod in pods))
            tally = _Tally()
            steppers = [_Stepper(pod, tally) for pod in pods]
            for stepper in steppers:
                stepper.step()
            await asyncio.sleep(WARM_SECONDS)
            before = await _batches(gateway)
            tally.open = True
            with stage.meter.measure() as usage:
                await asyncio.sleep(seconds)
                tally.open = False
            commits, operations, spent = (b - a for a, b in zip(before, await _batches(gateway), strict=True))
            tally.stopped = True
            check(pods)
            await asyncio.gather(*(stepper.idle.wait() for stepper in steppers))
            await asyncio.gather(*(pod.call(b'{"op":"finish","outcome":"succeeded"}') for pod in pods))
            check(pods)
        finally:
            for pod in pods:
                pod.leave()
        extra = {"operationsACommit": round(operations / max(1.0, commits), 1), "commitMs": round(spent / max(1.0, commits) * 1e3, 2)}
        return Sample(len(tally.latencies), tally.latencies, usage(), extra)


async def _batches(gateway: Gateway) -> tuple[float, float, float]:
    """Commits, the operations in them, and the seconds that they took together, since the gateway's start."""
    async with gateway.http.get(f"{gateway.url}/metrics") as answer:
        lines = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if not line.startswith("#"))
    return (
        float(lines["perdure_batch_operations_count"]),
        float(lines["perdure_batch_operations_sum"]),
        float(lines["perdure_commit_seconds_sum"]),
    )
