"""What Kubernetes' own controllers do to objects whose owner or namespace goes, seen on 1.36.

background   dependents are deleted once the owner object is gone, not when it is marked
foreground   those that block their owner are deleted while it waits for them, the others when it is gone
orphan       dependents lose the reference, then the owner its ``orphan`` finalizer
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perdure_operator.kube.client import NAMESPACES, Object, Resource

if TYPE_CHECKING:
    from tests.harness.fake_kube import FakeKube


class Garbage:
    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube
        self._collecting = False

    def collect(self) -> None:
        """Until nothing is left to do."""
        if self._collecting:
            return
        self._collecting = True
        try:
            before = -1
            while before != self._kube.version:
                before = self._kube.version
                self._step()
        finally:
            self._collecting = False

    def _all(self) -> list[tuple[Resource, Object]]:
        return [(resource, found) for resource, objects in self._kube.objects.items() for found in [*objects.values()]]

    def _step(self) -> None:
        """Does what is to be done about one object, the first that needs anything."""
        before = self._kube.version
        uids = {found["metadata"]["uid"] for _, found in self._all()}
        for resource, found in self._all():
            finalizers = found["metadata"].get("finalizers", [])
            owners = found["metadata"].get("ownerReferences", [])
            if "orphan" in finalizers:
                self._orphan(found)
                self._drop(resource, found, "orphan")
            elif "foregroundDeletion" in finalizers:
                if not self._delete_blocking(found):
                    self._drop(resource, found, "foregroundDeletion")
            elif owners and "deletionTimestamp" not in found["metadata"] and not any(owner["uid"] in uids for owner in owners):
                self._kube.end(resource, found)
            if self._kube.version != before:
                return
        self._empty_namespaces()

    def _dependents(self, owner: Object) -> Iterator[tuple[Resource, Object, dict[str, Any]]]:
        for resource, found in self._all():
            for reference in found["metadata"].get("ownerReferences", []):
                if reference["uid"] == owner["metadata"]["uid"]:
                    yield resource, found, reference

    def _orphan(self, owner: Object) -> None:
        for resource, found, reference in list(self._dependents(owner)):
            left = [other for other in found["metadata"]["ownerReferences"] if other != reference]
            self._kube.release(resource, found, ownerReferences=left or None)

    def _delete_blocking(self, owner: Object) -> bool:
        """Marks the dependents that the owner waits for; whether any of them is still there."""
        for resource, found, reference in list(self._dependents(owner)):
            if reference.get("blockOwnerDeletion") and "deletionTimestamp" not in found["metadata"]:
                has_own = any(True for _ in self._dependents(found))
                self._kube.end(resource, found, propagation="Foreground" if has_own else "Background")
        return any(reference.get("blockOwnerDeletion") for _, _, reference in self._dependents(owner))

    def _drop(self, resource: Resource, found: Object, finalizer: str) -> None:
        namespace, name = found["metadata"].get("namespace", ""), found["metadata"]["name"]
        current = self._kube.objects[resource].get((namespace, name))
        if current is not None and current["metadata"]["uid"] == found["metadata"]["uid"]:
            left = [other for other in current["metadata"]["finalizers"] if other != finalizer]
            self._kube.release(resource, current, finalizers=left or None)

    def _empty_namespaces(self) -> None:
        for (_, name), namespace in [*self._kube.objects.get(NAMESPACES, {}).items()]:
            if "deletionTimestamp" not in namespace["metadata"]:
                continue
            inside = [(resource, found) for resource, found in self._all() if found["metadata"].get("namespace") == name]
            for resource, found in inside:
                if "deletionTimestamp" not in found["metadata"]:
                    self._kube.end(resource, found)
            if not inside:
                self._kube.remove(NAMESPACES, namespace)
