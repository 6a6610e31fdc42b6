"""The informer on the fake behind HTTP and on a real apiserver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from tests.conformance.conftest import WIDGETS, Bench
from tests.harness.fake_apiserver import FakeApiServer
from tests.harness.fake_kube import FakeKube

from perdure_operator.kube.client import Resource
from perdure_operator.kube.connection import connect
from perdure_operator.kube.informer import Informer


class Watch:
    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.informer: Informer

    def change(self, resource: Resource, namespace: str, name: str) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
async def watch(bench: Bench, request: pytest.FixtureRequest) -> AsyncIterator[Watch]:
    watch = Watch()
    async with AsyncExitStack() as stack:
        if isinstance(bench.kube, FakeKube):
            server = await stack.enter_async_context(FakeApiServer(bench.kube, [WIDGETS]).running())
            connection = server.connection
        else:
            kubeconfig = request.getfixturevalue("kubeconfig")
            connection = lambda: connect(kubeconfig)  # noqa: E731
        await bench.widget("before")
        watch.informer = Informer([WIDGETS], [bench.namespace], watch.change, {}, kube=bench.kube, connection=connection)
        task, synced = watch.informer.start(), asyncio.create_task(watch.informer.synced.wait())
        await asyncio.wait({task, synced}, return_when=asyncio.FIRST_COMPLETED)
        assert synced.done(), task
        yield watch
        await watch.informer.stop()


async def test_it_sees_what_a_read_sees(bench: Bench, watch: Watch) -> None:
    get = lambda name: watch.informer.get(WIDGETS, bench.namespace, name)  # noqa: E731
    for name in ("before", "after"):
        if name == "after":
            await bench.widget("after")
        await watch.until(lambda name=name: get(name))
        found, read = get(name), await bench.read(name)
        read["metadata"].pop("managedFields", None)
        assert found == read
    changed = await bench.kube.merge_patch(WIDGETS, bench.namespace, "after", {"spec": {"x": 2}})
    await watch.until(lambda: get("after")["spec"] == {"x": 2})  # type: ignore[index]
    assert await bench.kube.delete(WIDGETS, bench.namespace, "after", uid=changed["metadata"]["uid"])
    await watch.until(lambda: watch.informer.deleted(WIDGETS, bench.namespace, "after"))
    assert get("after") is None
    assert [found["metadata"]["name"] for found in watch.informer.items(WIDGETS)] == ["before"]
