"""A cluster's API in memory: a :class:`KubeApi` that behaves as an apiserver does, and, where asked, as the garbage collector does.

``tests/conformance`` runs one suite on this and on a real apiserver. Beyond the port it has what tests need: a log of the calls, faults,
subscribers, and pods whose kubelet is the test. Everything happens within the call: no tasks, no time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import jsonpatch
from tests.harness.fake_garbage import Garbage
from tests.harness.selectors import selects

from perdure_operator.kube.client import (
    AGENTPOOLS,
    AGENTRUNS,
    NAMESPACES,
    PODS,
    TRIGGERS,
    AccessStatus,
    Object,
    Propagation,
    Resource,
    TokenStatus,
)
from perdure_operator.kube.errors import KubeConflict, KubeForbidden, KubeInvalid, KubeNotFound
from perdure_operator.kube.resources import ACCESS_REVIEWS, TOKEN_REVIEWS

Place = tuple[str, str]
"""Namespace and name."""
Watcher = Callable[[str, Resource, Object], None]
"""Is told ADDED, MODIFIED or DELETED, and the object."""

_SERVER_SET = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "name", "namespace")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_HOLDS = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}


@dataclass(frozen=True)
class Call:
    verb: str
    resource: Resource
    namespace: str | None
    name: str
    subresource: str = ""

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list")


@dataclass
class Fault:
    """The next ``times`` calls that fit raise ``error``; ``after``: having done what they were asked for."""

    error: Exception
    verb: str = ""
    resource: Resource | None = None
    name: str = ""
    after: bool = False
    times: int = 1

    def fits(self, call: Call) -> bool:
        return self.times > 0 and self.verb in ("", call.verb) and self.resource in (None, call.resource) and self.name in ("", call.name)


@dataclass(eq=False)
class FakeKube:
    """``statuses``: kinds whose status is a subresource. ``garbage_collector``: off, owners' ends have no effect until ``collect``."""

    statuses: set[Resource] = field(default_factory=lambda: {AGENTRUNS, AGENTPOOLS, TRIGGERS, PODS, NAMESPACES})
    garbage_collector: bool = True
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    tokens: dict[str, TokenStatus] = field(default_factory=dict)
    """Valid tokens; ``audiences`` are all that the token is for, none: the apiserver's."""
    grants: set[tuple[str, ...]] = field(default_factory=set)
    """(user, verb, "resource" or "resource/subresource", namespace); "" as the namespace grants all of them."""

    def __post_init__(self) -> None:
        self.objects: dict[Resource, dict[Place, Object]] = {}
        self.version = 0
        self._watchers: list[Watcher] = []
        self._garbage = Garbage(self)
        self._store("ADDED", NAMESPACES, self._stamped(NAMESPACES, ("", "default"), {}))

    # ----------------------------------------------------------------------------------------------------- what tests do

    def subscribe(self, watcher: Watcher) -> Callable[[], None]:
        """Returns what ends it. Each is told of what happens from now on."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def fail(
        self, error: Exception, verb: str = "", resource: Resource | None = None, *, name: str = "", after: bool = False, times: int = 1
    ) -> None:
        self.faults.append(Fault(error, verb, resource, name, after, times))

    def writes(self, resource: Resource | None = None) -> list[Call]:
        return [call for call in self.calls if call.writes and resource in (None, call.resource)]

    def collect(self) -> None:
        """What the garbage collector and the namespace controller would have done by now."""
        self._garbage.collect()

    def remove_pod(self, namespace: str, name: str) -> None:
        """The kubelet has ended the containers of a pod that is being deleted, or the pod is deleted by force."""
        self.end(PODS, self.objects[PODS][namespace, name], grace_seconds=0)

    # ----------------------------------------------------------------------------------------------------------- the port

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        with _Called(self, Call("get", resource, namespace, name)):
            return deepcopy(self._of(resource).get(_place(resource, namespace, name)))

    async def list(self, resource: Resource, namespace: str | None, *, labels: str = "") -> tuple[list[Object], str]:
        with _Called(self, Call("list", resource, namespace, "")):
            found = [
                deepcopy(found)
                for (where, _), found in sorted(self._of(resource).items())
                if namespace in (None, where) and selects(labels, found["metadata"].get("labels", {}))
            ]
            return found, str(self.version)

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        metadata = body.get("metadata", {})
        name = metadata.get("name") or (f"{metadata['generateName']}{uuid4().hex[:5]}" if metadata.get("generateName") else "")
        with _Called(self, Call("create", resource, namespace, name)):
            if not name:
                raise KubeInvalid("metadata.name: Required value: name or generateName is required")
            if not _NAME.fullmatch(name):
                raise KubeInvalid(f'metadata.name: Invalid value: "{name}"')
            if resource.namespaced:
                home = self._of(NAMESPACES).get(("", namespace or ""))
                if home is None:
                    raise KubeNotFound(f'namespaces "{namespace}" not found')
                if "deletionTimestamp" in home["metadata"]:
                    raise KubeForbidden(f"unable to create new content in namespace {namespace} because it is being terminated")
            place = _place(resource, namespace, name)
            if place in self._of(resource):
                raise KubeConflict(f'{resource.plural} "{name}" already exists', exists=True)
            return self._store("ADDED", resource, self._stamped(resource, place, body))

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, *,
        uid: str, grace_seconds: int | None = None, propagation: Propagation | None = None,
    ) -> bool:  # fmt: skip
        with _Called(self, Call("delete", resource, namespace, name)):
            found = self._of(resource).get(_place(resource, namespace, name))
            if found is None or found["metadata"]["uid"] != uid:
                return False
            self.end(resource, found, grace_seconds=grace_seconds, propagation=propagation or "Background")
            return True

    async def merge_patch(self, resource: Resource, namespace: str | None, name: str, body: Object, *, subresource: str = "") -> Object:
        with _Called(self, Call("patch", resource, namespace, name, subresource)):
            found = self._found(resource, namespace, name)
            return self._update(resource, found, merged(found, body), subresource)

    async def json_patch(
        self, resource: Resource, namespace: str | None, name: str, operations: Sequence[Object], *, subresource: str = ""
    ) -> Object:
        with _Called(self, Call("patch", resource, namespace, name, subresource)):
            found = self._found(resource, namespace, name)
            try:
                wanted = jsonpatch.JsonPatch(list(operations)).apply(found)
            except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
                if any(operation["op"] == "test" for operation in operations):
                    raise KubeConflict(f"a test failed, or a path is not there: {error}") from error
                raise KubeInvalid(str(error)) from error
            return self._update(resource, found, wanted, subresource)

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenStatus:
        with _Called(self, Call("create", TOKEN_REVIEWS, None, "")):
            known = self.tokens.get(token)
            if known is None:
                return TokenStatus(False, error="invalid bearer token")
            fitting = tuple(audience for audience in audiences if audience in known.audiences)
            if (audiences and not fitting) or (not audiences and known.audiences):
                return TokenStatus(False, error=f"token audiences {known.audiences} is invalid for the target audiences {audiences}")
            return TokenStatus(True, known.username, known.uid, known.groups, known.extra, fitting)

    async def review_access(
        self, user: str, groups: Sequence[str], extra: Mapping[str, Sequence[str]], *,
        verb: str, group: str, resource: str, subresource: str = "", namespace: str = "", name: str = "",
    ) -> AccessStatus:  # fmt: skip
        with _Called(self, Call("create", ACCESS_REVIEWS, None, "")):
            what = f"{resource}/{subresource}" if subresource else resource
            everywhere, here = (user, verb, what, ""), (user, verb, what, namespace)
            return AccessStatus("system:masters" in groups or bool({everywhere, here} & self.grants))

    # ------------------------------------------------------------------------------------- the inside, for the collector too

    def end(self, resource: Resource, found: Object, *, grace_seconds: int | None = None, propagation: Propagation = "Background") -> None:
        """What a DELETE does: marks the object, and removes it where nothing holds it."""
        metadata = found["metadata"]
        held = list(metadata.get("finalizers", ()))
        hold = _HOLDS.get(propagation)
        if hold and hold not in held:
            held.append(hold)
        runs = resource == PODS and "nodeName" in found["spec"] and found["status"]["phase"] in ("Pending", "Running")
        grace = 0 if not runs else found["spec"].get("terminationGracePeriodSeconds", 30) if grace_seconds is None else grace_seconds
        if not held and not grace and resource != NAMESPACES:
            self.remove(resource, found)
            return
        marked = deepcopy(found)
        if "deletionTimestamp" not in metadata:
            marked["metadata"] |= {"deletionTimestamp": self._time(), "deletionGracePeriodSeconds": grace}
            if "generation" in metadata:
                marked["metadata"]["generation"] += 1
        elif grace_seconds is not None:
            marked["metadata"]["deletionGracePeriodSeconds"] = min(grace_seconds, metadata["deletionGracePeriodSeconds"])
        if held:
            marked["metadata"]["finalizers"] = held
        if marked != found:
            self._store("MODIFIED", resource, marked)

    def remove(self, resource: Resource, found: Object) -> None:
        self._store("DELETED", resource, found)

    def release(self, resource: Resource, found: Object, **metadata: Any) -> None:
        """The collector's own write to an object's metadata."""
        self._update(resource, found, merged(found, {"metadata": metadata}), "")

    def _of(self, resource: Resource) -> dict[Place, Object]:
        return self.objects.setdefault(resource, {})

    def _found(self, resource: Resource, namespace: str | None, name: str) -> Object:
        found = self._of(resource).get(_place(resource, namespace, name))
        if found is None:
            raise KubeNotFound(f'{resource.plural} "{name}" not found')
        return found

    def _time(self) -> str:
        return self.now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _stamped(self, resource: Resource, place: Place, body: Object) -> Object:
        namespace, name = place
        made: Object = {"apiVersion": resource.api_version, "kind": resource.kind, **deepcopy(body)}
        made["metadata"] = {**made.get("metadata", {}), "name": name, "uid": str(uuid4()), "creationTimestamp": self._time()}
        if namespace:
            made["metadata"]["namespace"] = namespace
        if resource in self.statuses:
            made.pop("status", None)
            if resource != NAMESPACES:
                made["metadata"]["generation"] = 1
        if resource in (PODS, NAMESPACES):
            made["status"] = {"phase": "Pending" if resource == PODS else "Active"}
        return made

    def _update(self, resource: Resource, found: Object, wanted: Object, subresource: str) -> Object:
        old, new = found["metadata"], wanted["metadata"]
        if new.get("name", old["name"]) != old["name"]:
            raise KubeInvalid(f"the name of the object ({new['name']}) does not match the name on the URL ({old['name']})")
        if new.get("uid") != old["uid"] or new.get("resourceVersion") != old["resourceVersion"]:
            raise KubeConflict(f"{resource.plural} {old['name']}: the object has been modified, or is another one")
        made = deepcopy(found) if subresource else deepcopy(wanted)
        if subresource:
            made["status"] = deepcopy(wanted.get("status", {}))
        elif resource in self.statuses:
            made.pop("status", None)
            if "status" in found:
                made["status"] = deepcopy(found["status"])
        made["metadata"] |= {key: old[key] for key in _SERVER_SET if key in old}
        if "deletionTimestamp" in old and (added := set(made["metadata"].get("finalizers", ())) - set(old.get("finalizers", ()))):
            raise KubeInvalid(f"metadata.finalizers: no new finalizers can be added if the object is being deleted: {added}")
        if "generation" in old and any(made.get(key) != found.get(key) for key in (made | found).keys() - {"metadata", "status"}):
            made["metadata"]["generation"] += 1
        if made != found:
            ending = "deletionTimestamp" in old and not made["metadata"].get("finalizers") and not old["deletionGracePeriodSeconds"]
            return self._store("DELETED" if ending and resource != NAMESPACES else "MODIFIED", resource, made)
        return made

    def _store(self, what: str, resource: Resource, made: Object) -> Object:
        self.version += 1
        made = deepcopy(made)
        made["metadata"]["resourceVersion"] = str(self.version)
        place = made["metadata"].get("namespace", ""), made["metadata"]["name"]
        if what == "DELETED":
            del self._of(resource)[place]
        else:
            self._of(resource)[place] = made
        for watcher in [*self._watchers]:
            watcher(what, resource, deepcopy(made))
        if self.garbage_collector:
            self.collect()
        return deepcopy(made)


class _Called:
    """Writes a call down, and raises the fault that waits for it, before or after."""

    def __init__(self, kube: FakeKube, call: Call) -> None:
        self._kube = kube
        self._call = call

    def _strike(self, *, after: bool) -> None:
        for fault in self._kube.faults:
            if fault.after == after and fault.fits(self._call):
                fault.times -= 1
                raise fault.error

    def __enter__(self) -> None:
        self._kube.calls.append(self._call)
        self._strike(after=False)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._strike(after=True)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    result = deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _place(resource: Resource, namespace: str | None, name: str) -> Place:
    return (namespace or "") if resource.namespaced else "", name
