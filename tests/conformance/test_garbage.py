"""The fake's garbage collector. It acts within the call, so what holds at last must hold at once.

With PERDURE_TEST_KUBECONFIG, of a cluster with controllers, the same cases are held against it: see ``garbage.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.cluster.clients import ExistingCluster
from tests.conformance.conftest import WIDGETS, Bench, FakeBench, real_bench
from tests.conformance.garbage import CASES, Until
from tests.harness.fake_kube import FakeKube

from perdure_operator.kube.client import KubeClient

CLUSTER = ExistingCluster.from_environment()
COLLECTOR_SECONDS = 60.0
"""A collector knows a new kind only after its next discovery."""


async def at_once(condition: Callable[[], Awaitable[bool]]) -> None:
    assert await condition()


async def soon(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(COLLECTOR_SECONDS):
        while not await condition():  # noqa: ASYNC110 (the collector gives no sign)
            await asyncio.sleep(0.1)


@pytest.fixture(params=["fake", "cluster"] if CLUSTER else ["fake"])
async def collected(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Bench, Until]]:
    if request.param == "fake":
        bench: Bench = FakeBench(FakeKube())
        bench.kube.statuses.add(WIDGETS)  # type: ignore[attr-defined]
        bench.namespace = await bench.new_namespace()
        yield bench, at_once
        return
    assert CLUSTER is not None
    async with await KubeClient.connect(str(CLUSTER.kubeconfig)) as client:
        bench = await real_bench(client)
        yield bench, soon
        await bench.clean()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_garbage(collected: tuple[Bench, Until], case: Callable[[Bench, Until], Awaitable[None]]) -> None:
    await case(*collected)
