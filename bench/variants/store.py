"""The store alone: the journal batch called directly, one call at a time, as one worker of the gateway's batcher would."""

from __future__ import annotations

import asyncio
import time
from uuid import UUID, uuid4

from bench.samples import Sample
from bench.stage import NAMESPACE, BenchError, Stage
from bench.variants.variant import OUTPUT, AtPostgres
from perdure_operator.domain.ids import uuid7
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec, AgentRunSpec
from perdure_operator.services.submission import new_run
from perdure_operator.store.operations import Fence, JournalStep
from perdure_operator.store.store import Store

WARM_CALLS = 5
_POOL = AgentPoolSpec.model_validate({"template": {"spec": {"containers": [{"name": "agent", "image": "bench"}]}}})
_SPEC = AgentRunSpec.model_validate({"agent": {"poolRef": {"name": "store"}}})


async def leased_runs(store: Store, count: int) -> list[tuple[UUID, Fence]]:
    """New runs, each leased to a pod that exists only as a row."""
    await store.upsert_pool(NAMESPACE, "store", _POOL.model_dump(mode="json", by_alias=True, exclude_none=True), None)
    await store.create_runs(
        [new_run(run := uuid7(), NAMESPACE, f"store-{run.hex}", _SPEC, _POOL, input_json=b"null") for _ in range(count)]
    )
    pods = [uuid4() for _ in range(count)]
    for pod in pods:
        await store.pod_hello(pod, f"{NAMESPACE}/store", "bench", reuse=False, run=None, epoch=None)
    grants = await store.dispatch("bench", pods)
    if len(grants) != count:
        raise BenchError(f"{len(grants)} of {count} runs were leased")
    return [(grant.run, Fence(grant.epoch, grant.pod)) for grant in grants]


class JournalBatch(AtPostgres):
    def __init__(self, size: int) -> None:
        self.name = f"store-{size}"
        self.what = f"step, {size} a journal batch, one batch at a time"
        self._size = size
        self._store: Store | None = None
        self._runs: list[tuple[UUID, Fence]] = []
        self._calls = 0

    async def prepare(self, stage: Stage) -> None:
        self._store = await Store.connect(await stage.database(self.name.replace("-", "_")), connections=1)
        self._runs = await leased_runs(self._store, self._size)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    async def _call(self) -> None:
        assert self._store is not None
        self._calls += 1
        key = f"step:s#{self._calls}"
        outcomes = await self._store.journal([JournalStep(run, fence, uuid4(), key, "s", "succeeded", OUTPUT) for run, fence in self._runs])
        if any(outcome.code != "ok" for outcome in outcomes):
            raise BenchError(f"a step was refused: {outcomes[0]}")

    async def sample(self, stage: Stage, seconds: float) -> Sample:
        for _ in range(WARM_CALLS):
            await self._call()
        latencies = []
        with stage.meter.measure() as usage:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                begin = time.perf_counter()
                await self._call()
                latencies.append(time.perf_counter() - begin)
                await asyncio.sleep(0)
        return Sample(len(latencies) * self._size, latencies, usage())
