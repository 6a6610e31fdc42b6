"""Many idle pods at one gateway: how fast they get in, and what they take of its memory."""

from __future__ import annotations

import time

import psutil

from bench.pod import crew
from bench.samples import Sample
from bench.stage import Gateway, Stage
from bench.variants.variant import AtGateway

POOL = "connected"


class Connected(AtGateway):
    """All connect once a round, whatever ``seconds`` says."""

    def __init__(self, pods: int) -> None:
        self.name = f"connect-{pods}"
        self.what = f"{pods:,} pods connect, until all are idle"
        self._pods = pods

    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample:
        await gateway.pool(POOL)
        with stage.meter.measure() as usage:
            begin = time.monotonic()
            pods = await crew(gateway, POOL, self._pods)
            spent = time.monotonic() - begin
        memory = psutil.Process(gateway.pid).memory_info().rss / 2**20
        for pod in pods:
            pod.leave()
        return Sample(self._pods, [spent / self._pods], usage(), {"gatewayMiB": round(memory, 1)})
