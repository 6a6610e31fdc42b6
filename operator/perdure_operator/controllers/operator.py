"""The operator while it leads: the watch feeds a queue of keys, controllers work it off, and beside them run fleet, projector and resync.

Nothing here is in the way of a run: with the operator gone, gateways lease, wake and finish; only new pods and statuses wait. So whatever
breaks ends the process, and another replica, or this one anew, begins with a look at everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import structlog

from perdure_operator.controllers.agentpool import AgentPools
from perdure_operator.controllers.agentrun import AgentRuns
from perdure_operator.controllers.implicit_pools import ImplicitPools
from perdure_operator.controllers.pods import WorkerPods
from perdure_operator.controllers.trigger import TriggerController
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, PODS, TRIGGERS, KubeApi, Resource
from perdure_operator.kube.informer import Informer
from perdure_operator.kube.names import workers
from perdure_operator.kube.specs.pod import PodSettings
from perdure_operator.kube.workqueue import WorkQueue
from perdure_operator.services.fleet import Fleet
from perdure_operator.services.projector import Projector
from perdure_operator.services.resync import Resync
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store
from perdure_operator.store.triggers import Triggers

log = structlog.get_logger(__name__)

Json = dict[str, Any]
Key = tuple[Resource, str, str]

WATCHED = (AGENTRUNS, AGENTPOOLS, TRIGGERS, PODS)
WORKERS = 16


@dataclass(frozen=True)
class OperatorSettings:
    """``namespaces``: empty for all. ``inline``: the namespaces in which runs may bring their own pod template."""

    pods: PodSettings
    namespaces: Sequence[str] = ()
    inline: Literal["all"] | frozenset[str] = frozenset()
    resync_seconds: float = 300.0

    def allows_inline(self, namespace: str) -> bool:
        return self.inline == "all" or namespace in self.inline


class Watch(Protocol):
    """What is known of the cluster (kube/informer.py). ``deleted``: the last state of an object whose end was seen, until forgotten."""

    synced: asyncio.Event

    async def run(self) -> None: ...
    def get(self, resource: Resource, namespace: str, name: str) -> Json | None: ...
    def items(self, resource: Resource, namespace: str | None = None) -> Iterable[Json]: ...
    def deleted(self, resource: Resource, namespace: str, name: str) -> Json | None: ...
    def forget(self, resource: Resource, namespace: str, name: str, uid: str) -> None: ...
    def replace(self, resource: Resource, objects: Iterable[Json], version: str, namespace: str | None = None) -> None: ...


MakeWatch = Callable[[Sequence[Resource], Sequence[str], Callable[[Resource, str, str], None], Mapping[Resource, str]], Watch]


class Operator:
    """``watch``: what shows the cluster; the real one unless told."""

    def __init__(self, store: Store, kube: KubeApi, settings: OperatorSettings, watch: MakeWatch | None = None) -> None:
        resources = Resources(store)
        watch = watch or partial(Informer, kube=kube)
        # A pod of another installation has no place in this one's store, and would be ended for that.
        selectors = {PODS: workers(settings.pods.installation)}
        self._informer = informer = watch(WATCHED, settings.namespaces, self._changed, selectors)
        self._implicit = implicit = ImplicitPools(store, resources, kube, informer)
        self._projector = Projector(resources, kube, informer)
        self._fleet = fleet = Fleet(
            store, resources, kube, settings.pods, owner=self._uid_of_pool, changed=partial(self._changed, AGENTPOOLS),
        )  # fmt: skip
        self._runs = AgentRuns(store, resources, kube, informer, implicit, inline=settings.allows_inline, wrote=self._wrote)
        self._pods = WorkerPods(store, resources, kube, informer, fleet, wrote=self._wrote)
        self._pools = AgentPools(
            store, resources, kube, informer, fleet, implicit, settings.namespaces,
            changed=self._pool_changed, again=partial(self._changed, AGENTPOOLS),
        )  # fmt: skip
        self._triggers = TriggerController(
            store, Triggers(store), kube, informer, implicit, settings.namespaces,
            inline=settings.allows_inline, hooks_url=settings.pods.gateway_urls[0],
        )  # fmt: skip
        self._resync = Resync(
            resources, kube, informer, WATCHED, settings.namespaces, selectors,
            vanished=self._runs.deleted, seconds=settings.resync_seconds,
        )  # fmt: skip
        self._resync_seconds = settings.resync_seconds
        self._queue: WorkQueue[Key] = WorkQueue("operator", self._reconcile, workers=WORKERS)
        self._reconcilers: dict[Resource, tuple[Callable[[str, str], Awaitable[float | None]], Callable[[Any], Awaitable[None]] | None]] = {
            AGENTRUNS: (self._runs.reconcile, self._runs.deleted),
            PODS: (self._pods.reconcile, self._pods.deleted),
            AGENTPOOLS: (self._pools.reconcile, None),
            TRIGGERS: (self._triggers.reconcile, self._triggers.deleted),
        }

    async def lead(self, term: int) -> None:
        """Until cancelled, or until something breaks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._queue.run(), name="queue")
            group.create_task(self._informer.run(), name="informer")
            await self._informer.synced.wait()
            log.info("the cluster is known", term=term)
            group.create_task(self._resync.run(), name="resync")
            group.create_task(self._projector.run(), name="projector")
            group.create_task(self._pools.run(self._resync_seconds), name="pools")
            group.create_task(self._triggers.run(self._resync_seconds), name="triggers")
            group.create_task(self._fleet.run(term), name="fleet")

    async def _reconcile(self, key: Key) -> float | None:
        resource, namespace, name = key
        reconcile, deleted = self._reconcilers[resource]
        last = self._informer.deleted(resource, namespace, name)
        if last is not None:
            if deleted is not None:
                await deleted(last)
            self._informer.forget(resource, namespace, name, last["metadata"]["uid"])
        return await reconcile(namespace, name)

    # ---------------------------------------------------------------------------------------------------------- joints

    def _changed(self, resource: Resource, namespace: str, name: str) -> None:
        self._queue.add((resource, namespace, name))

    def _wrote(self) -> None:
        self._projector.kick()
        self._fleet.kick()

    def _uid_of_pool(self, namespace: str, name: str) -> str | None:
        found = self._informer.get(AGENTPOOLS, namespace, name)
        if found is None:
            return self._implicit.uid(namespace, name)
        return None if found["metadata"].get("deletionTimestamp") else str(found["metadata"]["uid"])

    def _pool_changed(self, namespace: str, name: str) -> None:
        """Runs that wait for this pool to exist are looked at again."""
        self._fleet.kick()
        for run in self._informer.items(AGENTRUNS, namespace):
            meta, pool = run["metadata"], (run["spec"].get("agent") or {}).get("poolRef") or {}
            if pool.get("name") == name and not (run.get("status") or {}).get("runID"):
                self._queue.add((AGENTRUNS, namespace, meta["name"]))
