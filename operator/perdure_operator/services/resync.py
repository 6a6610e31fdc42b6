"""Compares the store with the cluster now and then: what the watch missed is found here, and no absence is taken for a deletion (R7).

A consistent list corrects the cache. Of what the store believes to exist and the list does not show, each object is asked for by name
before it counts as gone; and when unusually many are missing at once, none is, and that is said.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.client import AGENTRUNS, KubeApi, Resource
from perdure_operator.observability import metrics
from perdure_operator.store.resources import Resources, Tracked

log = structlog.get_logger(__name__)

Json = dict[str, Any]

UNUSUAL_COUNT = 20
UNUSUAL_SHARE = 0.1
RETRY_SECONDS = 5.0


def unusual(missing: int, active: int) -> bool:
    """R7: more absences than people make, in one namespace, between two looks."""
    return missing > max(UNUSUAL_COUNT, UNUSUAL_SHARE * active)


class Cache(Protocol):
    def replace(self, resource: Resource, objects: Iterable[Json], version: str, namespace: str | None = None) -> None: ...


class Resync:
    """``vanished`` is given the identity of a resource that is proven to be gone without anybody having seen its deletion."""

    def __init__(
        self, resources: Resources, kube: KubeApi, cache: Cache, watched: Sequence[Resource], namespaces: Sequence[str],
        selectors: Mapping[Resource, str], *, vanished: Callable[[Json], Awaitable[None]], seconds: float,
    ) -> None:  # fmt: skip
        self._resources, self._kube, self._cache = resources, kube, cache
        self._watched, self._namespaces, self._selectors = watched, namespaces, selectors
        self._vanished, self._seconds = vanished, seconds

    async def run(self) -> None:
        """Until cancelled. The first look is at once: the operator may have been down for long."""
        while True:
            pause = self._seconds * random.uniform(0.8, 1.2)
            try:
                await self.look()
            except PerdureError as error:
                log.warning("the cluster could not be compared with the store", error=str(error))
                pause = RETRY_SECONDS
            await asyncio.sleep(pause)

    async def look(self) -> int:
        """Gives the number of resources that were found to be gone."""
        # The store first: what is made while we list is then in the list, and not in the store's answer.
        tracked = await self._resources.tracked()
        seen: set[str] = set()
        for resource in self._watched:
            for namespace in self._namespaces or (None,):
                objects, version = await self._kube.list(resource, namespace, labels=self._selectors.get(resource, ""))
                self._cache.replace(resource, objects, version, namespace)
                if resource == AGENTRUNS:
                    seen |= {o["metadata"]["uid"] for o in objects}
        active: dict[str, int] = defaultdict(int)
        missing: dict[str, list[Tracked]] = defaultdict(list)
        for one in tracked:
            active[one.namespace] += one.active
            if str(one.uid) not in seen and (not self._namespaces or one.namespace in self._namespaces):
                missing[one.namespace].append(one)
        return sum([await self._absent(namespace, ones, active[namespace]) for namespace, ones in missing.items()])

    async def _absent(self, namespace: str, ones: list[Tracked], active: int) -> int:
        if unusual(count := sum(one.active for one in ones), active):
            metrics.RESYNC_HOLDS.inc()
            log.error(
                "unusually many resources are missing: their runs go on (docs/install.md says how to end them)",
                namespace=namespace,
                missing=count,
                active=active,
            )
            ones = [one for one in ones if not one.active]
        gone = [one for one in ones if await self._is_gone(one)]
        for one in gone:
            await self._vanished({"metadata": {"namespace": one.namespace, "name": one.name, "uid": str(one.uid)}})
        return len(gone)

    async def _is_gone(self, one: Tracked) -> bool:
        found = await self._kube.get(AGENTRUNS, one.namespace, one.name)
        return found is None or found["metadata"]["uid"] != str(one.uid)
