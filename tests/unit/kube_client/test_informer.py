"""The informer, with the real kopf, against a server whose watches break in every way that is known of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from tests.harness.fake_apiserver import FakeApiServer
from tests.harness.fake_kube import FakeKube

from perdure_operator.kube import informer as module
from perdure_operator.kube.client import AGENTRUNS, NAMESPACES, PODS, Object, Resource
from perdure_operator.kube.informer import Informer
from perdure_operator.kube.names import MANAGED_BY, MANAGED_BY_LABEL


class Bench:
    def __init__(self, server: FakeApiServer) -> None:
        self.server, self.kube = server, server.kube
        self.changed = asyncio.Condition()
        self.changes: list[tuple[Resource, str, str]] = []
        self.informers: list[Informer] = []
        self.time = 0.0

    def informer(self, *namespaces: str, resources: tuple[Resource, ...] = (AGENTRUNS, PODS)) -> Informer:
        self.informers.append(
            Informer(
                resources,
                namespaces,
                self._change,
                {PODS: f"{MANAGED_BY_LABEL}={MANAGED_BY}"},
                kube=self.kube,
                connection=self.server.connection,
                ticks=lambda: self.time,
            )
        )
        return self.informers[-1]

    async def synced(self, informer: Informer) -> None:
        task, synced = informer.start(), asyncio.create_task(informer.synced.wait())
        await asyncio.wait({task, synced}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    def _change(self, resource: Resource, namespace: str, name: str) -> None:
        self.changes.append((resource, namespace, name))
        self._waker = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns once a change has made it true."""
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(condition)

    async def run(self, name: str, namespace: str = "default") -> Object:
        return await self.kube.create(AGENTRUNS, namespace, {"metadata": {"name": name}, "spec": {"x": 1}})

    async def delete(self, made: Object) -> None:
        metadata = made["metadata"]
        assert await self.kube.delete(AGENTRUNS, metadata["namespace"], metadata["name"], uid=metadata["uid"])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with FakeApiServer(FakeKube(), [AGENTRUNS, PODS]).running() as server:
        bench = Bench(server)
        yield bench
        for informer in bench.informers:
            await informer.stop()


async def test_what_was_there_and_what_comes(bench: Bench) -> None:
    first = await bench.run("first")
    informer = bench.informer()
    await bench.synced(informer)
    assert informer.get(AGENTRUNS, "default", "first") == first
    second = await bench.run("second")
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "second") == second)
    changed = await bench.kube.merge_patch(AGENTRUNS, "default", "first", {"spec": {"x": 2}})
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "first") == changed)
    await bench.delete(second)
    await bench.until(lambda: informer.deleted(AGENTRUNS, "default", "second"))
    assert informer.get(AGENTRUNS, "default", "second") is None
    assert informer.deleted(AGENTRUNS, "default", "second")["metadata"]["uid"] == second["metadata"]["uid"]  # type: ignore[index]
    assert [found["metadata"]["name"] for found in informer.items(AGENTRUNS)] == ["first"]


async def test_an_empty_cluster_is_synced(bench: Bench) -> None:
    informer = bench.informer()
    await bench.synced(informer)
    assert list(informer.items(AGENTRUNS)) == []


async def test_it_writes_nothing(bench: Bench) -> None:
    await bench.run("first")
    bench.kube.calls.clear()
    informer = bench.informer()
    await bench.synced(informer)
    await bench.run("second")
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "second"))
    assert [call.name for call in bench.kube.writes()] == ["second"]


async def test_a_cut_watch_goes_on_where_it_was(bench: Bench) -> None:
    informer = bench.informer()
    first = await bench.run("first")
    await bench.synced(informer)
    bench.server.deaf = True
    second = await bench.run("second")
    await bench.delete(first)
    bench.server.deaf = False
    bench.server.cut()
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "second") == second)
    await bench.until(lambda: informer.deleted(AGENTRUNS, "default", "first"))


async def test_what_vanished_in_a_gap_that_is_forgotten_is_absent_but_not_seen_deleted(bench: Bench) -> None:
    informer = bench.informer()
    first, again = await bench.run("first"), await bench.run("again")
    await bench.synced(informer)
    bench.server.deaf = True
    await bench.delete(first)
    await bench.delete(again)
    reborn = await bench.run("again")
    bench.server.deaf = False
    bench.changes.clear()
    bench.server.expire()
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "again") == reborn)
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "first") is None)
    assert informer.deleted(AGENTRUNS, "default", "first") is None
    assert (AGENTRUNS, "default", "first") in bench.changes


async def test_only_the_namespaces_that_were_named(bench: Bench) -> None:
    for namespace in ("team-a", "team-b", "team-c"):
        await bench.kube.create(NAMESPACES, None, {"metadata": {"name": namespace}})
        await bench.run("run", namespace)
    informer = bench.informer("team-a", "team-b")
    await bench.synced(informer)
    await bench.run("other", "team-c")
    await bench.run("other", "team-b")
    await bench.until(lambda: informer.get(AGENTRUNS, "team-b", "other"))
    places = {(found["metadata"]["namespace"], found["metadata"]["name"]) for found in informer.items(AGENTRUNS)}
    assert places == {("team-a", "run"), ("team-b", "run"), ("team-b", "other")}


async def test_pods_of_others_are_not_watched(bench: Bench) -> None:
    ours = {MANAGED_BY_LABEL: MANAGED_BY}
    spec = {"containers": []}
    informer = bench.informer()
    await bench.synced(informer)
    await bench.kube.create(PODS, "default", {"metadata": {"name": "theirs"}, "spec": spec})
    await bench.kube.create(PODS, "default", {"metadata": {"name": "ours", "labels": ours}, "spec": spec})
    await bench.until(lambda: informer.get(PODS, "default", "ours"))
    assert informer.get(PODS, "default", "theirs") is None


async def test_age_is_that_of_the_most_silent_watch(bench: Bench) -> None:
    informer = bench.informer()
    await bench.synced(informer)

    async def news(name: str) -> None:
        pod = {"metadata": {"name": name, "labels": {MANAGED_BY_LABEL: MANAGED_BY}}, "spec": {"containers": []}}
        await bench.kube.create(PODS, "default", pod)
        await bench.until(lambda: informer.get(PODS, "default", name))

    await news("first")
    await bench.run("first")
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "first"))
    bench.time += 1000
    await news("second")
    assert informer.age() == 1000, "nothing was heard of runs"
    await bench.run("second")
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "second"))
    assert informer.age() == 0


async def test_each_request_carries_the_token_of_the_moment(bench: Bench) -> None:
    informer = bench.informer()
    await bench.synced(informer)
    assert len(set(bench.server.tokens)) == len(bench.server.tokens) > 3


async def test_a_refused_token_is_read_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    informer = bench.informer()
    await bench.synced(informer)
    bench.server.refuse = 401
    watches, asked = bench.server.watches, len(bench.server.tokens)
    bench.server.cut()
    await bench.server.asked(asked + 4)
    bench.server.refuse = None
    await bench.server.watched(watches + 2)
    made = await bench.run("first")
    await bench.until(lambda: informer.get(AGENTRUNS, "default", "first") == made)


async def test_what_ends_kopf_ends_the_task(bench: Bench) -> None:
    # One kind: kopf would forget the error of a second watch, and Python 3.11 cannot stand that it is told of while it parses.
    informer = bench.informer(resources=(AGENTRUNS,))
    await bench.synced(informer)
    bench.server.refuse = 422
    bench.server.cut()
    assert informer._task is not None
    with pytest.raises(Exception, match="refused"):
        await asyncio.wait_for(informer._task, 20)


async def test_stop_ends_the_thread(bench: Bench) -> None:
    informer = bench.informer()
    await bench.synced(informer)
    await informer.stop()
    assert not [thread for thread in module.threading.enumerate() if thread.name == "kopf"]
    again = bench.informer()
    await bench.synced(again)
