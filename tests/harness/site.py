"""An operator on a real store and a cluster in memory, for tests of what it makes of resources and pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from tests.harness import runs
from tests.harness.fake_kube import FakeKube
from tests.harness.fake_watch import FakeWatch

from perdure_operator.controllers.operator import Operator, OperatorSettings
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, EVENTS, PODS, Resource
from perdure_operator.kube.errors import KubeNotFound
from perdure_operator.kube.specs.pod import PodSettings
from perdure_operator.store.operations import Fence
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store

Json = dict[str, Any]

NS = "default"
PATIENCE = 10.0
POOL = {"template": {"spec": {"containers": [{"name": "agent", "image": "agent"}]}}, "capacity": {"minIdle": 0, "maxIdle": 0, "maxPods": 9}}
SETTINGS = OperatorSettings(
    PodSettings(sidecar_image="sidecar", gateway_urls=("https://gateway",), installation="here"), resync_seconds=3600
)
GATEWAY = "g"


class Site:
    """A cluster, a store, and an operator that may come and go."""

    def __init__(self, store: Store, pg: asyncpg.Connection) -> None:
        self.store, self.pg = store, pg
        self.kube = FakeKube()
        self.resources = Resources(store)
        self.watch: FakeWatch | None = None
        self.operator: Operator | None = None
        self.kube.subscribe(self._kubelet)
        self._endings: set[asyncio.Task[None]] = set()

    def _kubelet(self, what: str, resource: Resource, pod: Json) -> None:
        """Ends the containers of a pod that is being deleted, says so, and lets it go."""
        if resource == PODS and what == "MODIFIED" and pod["metadata"].get("deletionTimestamp") and "phase" not in pod.get("status", {}):
            self._endings.add(asyncio.create_task(self._end_pod(pod["metadata"]["name"])))

    async def _end_pod(self, name: str) -> None:
        status = {"phase": "Succeeded", "containerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": 0}}}]}
        with contextlib.suppress(KubeNotFound, KeyError):
            await self.kube.merge_patch(PODS, NS, name, {"status": status}, subresource="status")
            self.kube.remove_pod(NS, name)

    @asynccontextmanager
    async def operating(self, settings: OperatorSettings = SETTINGS) -> AsyncIterator[Operator]:
        term = await self.resources.lead("operator", "test", 3600)
        assert term is not None

        def watch(resources: Any, namespaces: Any, on_change: Any, selectors: Any) -> FakeWatch:
            self.watch = FakeWatch(self.kube, resources, on_change, selectors)
            return self.watch

        self.operator = Operator(self.store, self.kube, settings, watch)
        task = asyncio.create_task(self.operator.lead(term))
        try:
            yield self.operator
        finally:
            task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(done[0], asyncio.CancelledError), done

    async def pool(self, name: str = "p", spec: Json = POOL) -> None:
        await self.kube.create(AGENTPOOLS, NS, {"metadata": {"name": name}, "spec": spec})

    async def create(self, name: str, *, labels: Json | None = None, **spec: Any) -> Json:
        body = {"metadata": {"name": name, "labels": labels or {}}, "spec": {"agent": {"poolRef": {"name": "p"}}, **spec}}
        return await self.kube.create(AGENTRUNS, NS, body)

    async def get(self, name: str) -> Json:
        found = await self.kube.get(AGENTRUNS, NS, name)
        assert found is not None, f"there is no AgentRun {name}"
        return found

    async def until(self, look: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not (found := await look()):  # noqa: ASYNC110  # the operator's doing: there is no event to wait for
                await asyncio.sleep(0.01)
            return found

    async def phase(self, name: str, phase: str) -> Json:
        async def look() -> Json | None:
            found = await self.kube.get(AGENTRUNS, NS, name)
            return found if found is not None and (found.get("status") or {}).get("phase") == phase else None

        found: Json = await self.until(look)
        return found

    async def events(self, reason: str) -> list[Json]:
        """Waits for the events of this reason."""

        async def look() -> list[Json]:
            return [event for event in (await self.kube.list(EVENTS, NS))[0] if event["reason"] == reason]

        found: list[Json] = await self.until(look)
        return found

    async def gone(self, name: str) -> None:
        async def look() -> bool:
            return await self.kube.get(AGENTRUNS, NS, name) is None

        await self.until(look)

    async def pods(self, count: int, *, besides: str = "") -> list[Json]:
        async def look() -> tuple[list[Json]] | None:
            found = [pod for pod in (await self.kube.list(PODS, NS))[0] if pod["metadata"]["name"] != besides]
            return (found,) if len(found) == count else None

        found: tuple[list[Json]] = await self.until(look)
        return found[0]

    async def lease(self, pod: Json) -> runs.Held:
        """The pod comes up and gets the run that it was made for."""
        known = await self.until(lambda: self.store.worker_pod(pod["metadata"]["uid"]))
        await self.store.pod_hello(known[0], known[1], GATEWAY, reuse=False)
        [grant] = await self.store.dispatch(GATEWAY, [known[0]])
        return runs.Held(grant.run, Fence(grant.epoch, known[0]))

    async def come_up(self) -> None:
        for pod in (await self.kube.list(PODS, NS))[0]:
            if known := await self.store.worker_pod(pod["metadata"]["uid"]):
                await self.store.pod_hello(known[0], known[1], GATEWAY, reuse=False)
