"""The newest state of watched objects, whatever order and gaps the news come in.

Per object the resourceVersion decides, so what is late is ignored; a uid that was seen deleted never comes back. A deletion that nobody
saw (it fell into a gap of the watch) is corrected by ``replace``, and it is only absence: ``deleted`` knows nothing of it.

Objects are kept as JSON: as dictionaries, ten thousand of them would be most of the operator's memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from perdure_operator.kube.resources import Resource

Object = dict[str, Any]
OnChange = Callable[[Resource, str, str], None]
"""Is told kind, namespace and name of what is different now."""

BURIED_SECONDS = 600.0
"""Longer than any list or event can be late."""


@dataclass(frozen=True, slots=True)
class _Kept:
    uid: str
    version: int
    data: bytes


class Cache:
    """Belongs to one event loop. Who reads an object gets a copy of its own."""

    def __init__(self, on_change: OnChange, *, now: Callable[[], float] = time.monotonic) -> None:
        self._on_change, self._now = on_change, now
        self._objects: dict[Resource, dict[tuple[str, str], _Kept]] = {}
        self._deleted: dict[tuple[Resource, str, str], list[Object]] = {}
        self._buried: OrderedDict[str, float] = OrderedDict()

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        known = self._of(resource).get((namespace, name))
        return None if known is None else _decode(known.data)

    def items(self, resource: Resource, namespace: str | None = None) -> Iterable[Object]:
        """Of one namespace or of all. Each is decoded: ask for no more than is needed."""
        return [_decode(known.data) for place, known in self._of(resource).items() if namespace in (None, place[0])]

    def deleted(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The last state of an object of that name that was seen deleted; of several the first. It stays until it is forgotten."""
        found = self._deleted.get((resource, namespace, name))
        return found[0] if found else None

    def forget(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """That deletion is dealt with. Is there another of that name, it is told as a change."""
        left = [found for found in self._deleted.pop((resource, namespace, name), []) if found["metadata"]["uid"] != uid]
        if left:
            self._deleted[resource, namespace, name] = left
            self._on_change(resource, namespace, name)

    def seen(self, resource: Resource, found: Object) -> None:
        """An object is, or was a moment ago, like this."""
        metadata = found["metadata"]
        place = metadata.get("namespace", ""), metadata["name"]
        known, version = self._of(resource).get(place), int(metadata["resourceVersion"])
        if metadata["uid"] in self._buried or (known is not None and known.version >= version):
            return
        # Its half, and of no use to anybody here.
        found = {**found, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}
        self._of(resource)[place] = _Kept(metadata["uid"], version, msgspec.json.encode(found))
        self._on_change(resource, *place)

    def gone(self, resource: Resource, found: Object) -> None:
        """An object was deleted, having been like this."""
        metadata = found["metadata"]
        place = metadata.get("namespace", ""), metadata["name"]
        if metadata["uid"] in self._buried:
            return
        self._bury(metadata["uid"])
        known = self._of(resource).get(place)
        if known is not None and known.uid == metadata["uid"]:
            del self._of(resource)[place]
        self._deleted.setdefault((resource, *place), []).append(found)
        self._on_change(resource, *place)

    def replace(self, resource: Resource, objects: Iterable[Object], version: str, namespace: str | None = None) -> None:
        """These, and no others, were there at ``version``: a consistent list, of one namespace or of all."""
        listed = set()
        for found in objects:
            listed.add(found["metadata"]["uid"])
            self.seen(resource, found)
        for place, known in [*self._of(resource).items()]:
            absent = known.uid not in listed and namespace in (None, place[0])
            if absent and known.version <= int(version):
                del self._of(resource)[place]
                self._on_change(resource, *place)

    def _of(self, resource: Resource) -> dict[tuple[str, str], _Kept]:
        return self._objects.setdefault(resource, {})

    def _bury(self, uid: str) -> None:
        now = self._now()
        self._buried[uid] = now
        while next(iter(self._buried.values())) < now - BURIED_SECONDS:
            self._buried.popitem(last=False)


def _decode(data: bytes) -> Object:
    found: Object = msgspec.json.decode(data)
    return found
