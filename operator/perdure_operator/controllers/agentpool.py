"""AgentPool: what the store and the gateways know of a pool follows its resource, and its status says what it has.

A pool that is deleted takes its idle pods along; runs that name it wait until there is one of that name again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import structlog
from pydantic import ValidationError

from perdure_operator.controllers.implicit_pools import ImplicitPools
from perdure_operator.kube.api.problems import in_words
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.kube.client import AGENTPOOLS, KubeApi
from perdure_operator.kube.errors import KubeConflict, KubeNotFound
from perdure_operator.services.conditions import READY, Verdict, condition, condition_of
from perdure_operator.services.fleet import Fleet, template_revision
from perdure_operator.services.polling import Poll
from perdure_operator.services.projector import Cache
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import PoolDemand, Store

log = structlog.get_logger(__name__)

Json = dict[str, Any]

STATUS_SECONDS = 10.0
STARTING_SECONDS = 1.0
COUNTS = ("idle", "starting", "leased", "runnable")


class AgentPools:
    """``namespaces``: those that are watched, empty for all. ``changed``: runs may wait for this pool (namespace, name), and the fleet
    should look. ``again``: this pool is to be reconciled."""

    def __init__(
        self, store: Store, resources: Resources, kube: KubeApi, cache: Cache, fleet: Fleet, implicit: ImplicitPools,
        namespaces: Sequence[str], *,
        changed: Callable[[str, str], None], again: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._store, self._resources, self._kube, self._cache, self._fleet = store, resources, kube, cache, fleet
        self._implicit = implicit
        self._namespaces, self._changed, self._again = namespaces, changed, again
        self._known: dict[tuple[str, str], tuple[str, int]] = {}
        self._untold: set[tuple[str, str]] = set()

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Gives the seconds after which the numbers in the status are looked at again. Raises PerdureError."""
        resource = self._cache.get(AGENTPOOLS, namespace, name)
        if resource is None or resource["metadata"].get("deletionTimestamp"):
            self._known.pop((namespace, name), None)
            if await self._implicit.restore(namespace, name, gone=resource is None):
                return None
            if await self._resources.drop_pool(namespace, name):
                self._untold.add((namespace, name))
            await self._resources.retire_pods_of(namespace, name)
            await self._tell_queued(namespace, name)
            self._changed(namespace, name)
            return None
        try:
            spec = AgentPoolSpec.model_validate(resource["spec"], by_alias=True, by_name=False)
        except ValidationError as error:
            await self._say(resource, {}, Verdict("False", "InvalidSpec", in_words(error, AgentPoolSpec, under=("spec",))))
            return None
        version = (str(resource["metadata"]["uid"]), int(resource["metadata"]["generation"]))  # one that was made anew begins at 1 again
        if self._known.get((namespace, name)) != version:
            if await self._store.upsert_pool(namespace, name, spec.to_json(), spec.capacity.max_pods if spec.capacity else None):
                self._untold.add((namespace, name))
            before = self._known.get((namespace, name))
            if before is not None and before[0] != version[0]:
                await self._resources.retire_pods_of(namespace, name)
            await self._tell_queued(namespace, name)
            self._known[namespace, name] = version
            self._changed(namespace, name)
        if await self._implicit.remove_unused(resource):
            return None
        pool = f"{namespace}/{name}"
        demand = next(iter(await self._store.pool_demand(pool)), None)
        known = {"revision": template_revision(spec.to_json()), **_counts(demand)}
        trouble = self._fleet.troubles.get(pool)
        if trouble is not None:
            ready = Verdict("False", trouble.reason, trouble.in_words()["message"])
        else:
            ready = _ready(resource, known, (spec.capacity.min_idle if spec.capacity else None) or 0)
        await self._say(resource, known, ready)
        return STARTING_SECONDS if ready.status == "Unknown" else STATUS_SECONDS

    async def run(self, seconds: float) -> NoReturn:
        """Until cancelled: finds pools that were deleted while nobody watched."""
        await Poll("pools could not be compared with the cluster", seconds=seconds, outage=seconds).run(self.look)

    async def look(self) -> None:
        """Each absence is proven by a GET, and the pool is dropped by its reconciliation, where it may have come back meanwhile.

        However many are missing, they go, unlike runs and triggers (R7). What is cancelled stays cancelled, but a pool that went wrongly
        leaves its runs waiting, and is back as soon as the watch or a list shows it. One that stays wrongly keeps its pods, and starts new
        ones in the next namespace of that name; and of a namespace that was deleted all pools are missing at once.
        """
        for pool in await self._store.pools():
            namespace, _, name = pool.partition("/")
            if self._namespaces and namespace not in self._namespaces:
                continue
            if self._cache.get(AGENTPOOLS, namespace, name) is None and await self._kube.get(AGENTPOOLS, namespace, name) is None:
                log.info("a pool of the store is none of the cluster", pool=pool)
                self._again(namespace, name)

    async def _tell_queued(self, namespace: str, name: str) -> None:
        """Runs are told once that a pool came or went; also when the first try fails: the next reconciliation finds no change any more."""
        if (namespace, name) in self._untold:
            await self._resources.pool_changed(namespace, name)
            self._untold.discard((namespace, name))

    async def _say(self, resource: Json, known: Json, ready: Verdict) -> None:
        """Writes only what is different: numbers that stand still cost nothing."""
        meta, old = resource["metadata"], resource.get("status") or {}
        status: Json = {"observedGeneration": meta["generation"], "conditions": [condition("Ready", ready, resource)], **known}
        if all(old.get(key) == value for key, value in status.items()):
            return
        try:
            await self._kube.merge_patch(AGENTPOOLS, meta["namespace"], meta["name"], {"status": status}, subresource="status")
        except (KubeNotFound, KubeConflict) as error:
            log.info("a pool's status could not be written", pool=meta["name"], error=str(error))


def _ready(resource: Json, known: Json, warm: int) -> Verdict:
    """Of a pool that nothing is wrong with. Only one that is to have warm pods, and has had none of this template, is not ready yet: what
    waits for it (Helm, Flux) would otherwise wait for a run that somebody may create next week."""
    if known["idle"] or known["leased"]:
        return READY
    old = resource.get("status") or {}
    if warm and not (condition_of(resource, "Ready").get("status") == "True" and old.get("revision") == known["revision"]):
        return Verdict("Unknown", "Starting", f"the first of {warm} warm pods has not come up yet")
    return Verdict("True", "NoPodsWanted", "pods are started for runs as they come") if not warm else READY


def _counts(demand: PoolDemand | None) -> dict[str, int]:
    return {name: int(getattr(demand, name)) if demand else 0 for name in COUNTS}
