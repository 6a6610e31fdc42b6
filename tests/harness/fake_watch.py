"""The watch on the fake cluster: what kube/informer.py is on a real one, with cuts on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.harness.fake_kube import FakeKube
from tests.harness.selectors import selects

from perdure_operator.kube.client import Resource

Json = dict[str, Any]
Place = tuple[Resource, str, str]


class FakeWatch:
    """``cut``: from now on nothing is heard; ``resume``: what changed in between is heard of again, but no deletion (a 410)."""

    def __init__(
        self,
        kube: FakeKube,
        resources: Sequence[Resource],
        on_change: Callable[[Resource, str, str], None],
        selectors: Mapping[Resource, str],
    ) -> None:
        self._kube, self._resources, self._on_change, self._selectors = kube, resources, on_change, selectors
        self._seen: dict[Place, Json] = {}
        self._deleted: dict[Place, Json] = {}
        self._cut = False
        self.synced = asyncio.Event()

    async def run(self) -> None:
        unsubscribe = self._kube.subscribe(self._hear)
        try:
            await self._list()
            self.synced.set()
            await asyncio.Event().wait()
        finally:
            unsubscribe()

    async def _list(self) -> None:
        for resource in self._resources:
            for found in (await self._kube.list(resource, None))[0]:
                self._hear("ADDED", resource, found)

    def _hear(self, what: str, resource: Resource, found: Json) -> None:
        if self._cut or resource not in self._resources:
            return
        meta = found["metadata"]
        if not selects(self._selectors.get(resource, ""), meta.get("labels", {})):
            return
        place = (resource, meta["namespace"], meta["name"])
        if what == "DELETED":
            self._seen.pop(place, None)
            self._deleted[place] = found
        else:
            self._seen[place] = found
        self._on_change(*place)

    def cut(self) -> None:
        self._cut = True

    async def resume(self) -> None:
        self._cut = False
        await self._list()

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        return self._seen.get((resource, namespace, name))

    def items(self, resource: Resource, namespace: str | None = None) -> Iterable[Json]:
        return [found for place, found in self._seen.items() if place[0] == resource and namespace in (None, place[1])]

    def deleted(self, resource: Resource, namespace: str, name: str) -> Json | None:
        return self._deleted.get((resource, namespace, name))

    def forget(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        found = self._deleted.get((resource, namespace, name))
        if found is not None and found["metadata"]["uid"] == uid:
            del self._deleted[resource, namespace, name]

    def replace(self, resource: Resource, objects: Iterable[Json], version: str, namespace: str | None = None) -> None:
        known = {place for place in self._seen if place[0] == resource}
        now = {(resource, o["metadata"]["namespace"], o["metadata"]["name"]): o for o in objects}
        for place in known - now.keys():
            del self._seen[place]
            self._on_change(*place)
        for place, found in now.items():
            if self._seen.get(place) != found:
                self._seen[place] = found
                self._on_change(*place)
