"""Writes what the store knows of a run into the status of its resource, and makes the resources of runs that began in the store.

Transitions at once, progress at most every half minute, nothing per step; of a run that is woken and runs in time only that it runs.
A status never goes back: each write names the resource version it builds on, and is made anew when somebody else was faster.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from time import monotonic
from typing import Any, NoReturn, Protocol
from uuid import UUID

import structlog
from msgspec.json import decode

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.api.v1alpha1 import MAX_INPUT_BYTES
from perdure_operator.kube.client import AGENTRUNS, KubeApi, Resource
from perdure_operator.kube.errors import KubeConflict, KubeForbidden, KubeInvalid, KubeNotFound
from perdure_operator.kube.names import API_VERSION, CANCEL_FINALIZER, RUN_ID_LABEL
from perdure_operator.services.events import Event, Events, about
from perdure_operator.services.polling import Poll
from perdure_operator.services.status import events_of, status_of
from perdure_operator.store.resources import Due, Resources, Unmade

log = structlog.get_logger(__name__)

Json = dict[str, Any]

POLL_SECONDS = 0.1
OUTAGE_SECONDS = 1.0
PROGRESS_SECONDS = 30.0
QUOTA_SECONDS = 60.0
"""Between two tries to make a resource in a namespace whose quota has no room for it."""
WAKE_SECONDS = 3.0
"""Within this a run that was woken has a pod, even if one must be started."""
BATCH = 128
PARALLEL = 16
REMEMBERED = 256
"""Own writes that the watch may not have brought yet; of an older one the store's next word brings a conflict, and a fresh read."""


class Cache(Protocol):
    def get(self, resource: Resource, namespace: str, name: str) -> Json | None: ...
    def items(self, resource: Resource, namespace: str | None = None) -> Iterable[Json]: ...


class Projector:
    def __init__(self, resources: Resources, kube: KubeApi, cache: Cache) -> None:
        self._resources = resources
        self._kube = kube
        self._events = Events(kube)
        self._cache = cache
        self._poll = Poll("statuses could not be written", seconds=POLL_SECONDS, outage=OUTAGE_SECONDS)
        self.kick = self._poll.kick
        self._slots = asyncio.Semaphore(PARALLEL)
        self._written: OrderedDict[str, Json] = OrderedDict()
        self._full: dict[str, float] = {}
        """Namespaces whose quota has no room, and when each is tried again."""

    async def run(self) -> NoReturn:
        await self._poll.run(self._look)

    async def _look(self) -> bool:
        for unmade in await self._resources.unmade(BATCH, besides=[namespace for namespace in self._full if self._is_full(namespace)]):
            if not self._is_full(unmade.namespace):
                await self._make(unmade)
        due = await self._resources.due(BATCH, progress_seconds=PROGRESS_SECONDS, wake_seconds=WAKE_SECONDS)
        done = await asyncio.gather(*(self._project(one) for one in due))
        written = [one for one, ok in zip(due, done, strict=True) if ok]
        if written:
            await self._resources.projected(written)
        return bool(written)

    # --------------------------------------------------------------------------------------------------------- statuses

    async def _project(self, due: Due) -> bool:
        """Whether the resource says now what the store said."""
        async with self._slots:
            try:
                return await self._write(due, self._newest(due))
            except KubeConflict:
                try:
                    return await self._write(due, await self._kube.get(AGENTRUNS, due.row["namespace"], due.name))
                except PerdureError as error:
                    log.info("a status could not be written", run=str(due.run), error=str(error))
                    return False
            except KubeInvalid as error:
                log.error("the cluster refuses a status", run=str(due.run), error=str(error))
                return True  # it would refuse it again: the next change has another chance
            except PerdureError as error:
                log.warning("a status could not be written", run=str(due.run), error=str(error))
                return False

    def _newest(self, due: Due) -> Json | None:
        """Our own last write may be newer than what the watch has brought so far."""
        seen, ours = self._cache.get(AGENTRUNS, due.row["namespace"], due.name), self._written.get(str(due.uid))
        if seen is None or ours is None:
            return seen
        if _sequence(ours) <= _sequence(seen):
            del self._written[str(due.uid)]
            return seen
        return ours

    async def _write(self, due: Due, resource: Json | None) -> bool:
        namespace, name = due.row["namespace"], due.name
        if resource is None:
            resource = await self._kube.get(AGENTRUNS, namespace, name)
        if resource is None or resource["metadata"]["uid"] != str(due.uid):
            return True  # it is gone; what that means for the run is for the controller to find out
        old = resource.get("status") or {}
        if old.get("runID") == str(due.row["run_id"]) and _sequence(resource) > due.row["last_seq"]:
            return True
        status = status_of(due.row, due.generation, resource)
        body = {"metadata": {"resourceVersion": resource["metadata"]["resourceVersion"]}, "status": status}
        try:
            written = await self._kube.merge_patch(AGENTRUNS, namespace, name, body, subresource="status")
        except KubeNotFound:
            return True
        written["metadata"].pop("managedFields", None)
        self._written[str(due.uid)] = written
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        # Under a name that the transition always gets.
        for event in events_of(due.row, status, old):
            await self._events.tell(about("AgentRun", resource), str(status["lastSequence"]), event)
        return True

    # -------------------------------------------------------------------------------------------------------- resources

    async def _make(self, run: Unmade) -> None:
        """The resource of a run that was there first: a child, a trigger's run. Crashing anywhere in here and beginning again is safe."""
        body = _resource(run)
        try:
            made = await self._kube.create(AGENTRUNS, run.namespace, body)
        except KubeConflict:
            there = await self._kube.get(AGENTRUNS, run.namespace, run.name)
            if there is None:
                return
            if (there["metadata"].get("labels") or {}).get(RUN_ID_LABEL) != str(run.run):
                log.error("a run gets no resource: its name is taken", run=str(run.run), name=f"{run.namespace}/{run.name}")
                await self._resources.not_made(run.run)
                return
            made = there
        except (KubeInvalid, KubeNotFound, KubeForbidden) as error:
            if isinstance(error, KubeForbidden) and error.quota:
                await self._no_room(run, error)
                return
            log.error("a run gets no resource", run=str(run.run), error=str(error))
            await self._tell_owner(run, "NoResource", f"run {run.name} gets no resource: {error}")
            await self._resources.not_made(run.run)
            return
        self._full.pop(run.namespace, None)
        await self._resources.made(run.run, UUID(made["metadata"]["uid"]))

    def _is_full(self, namespace: str) -> bool:
        return self._full.get(namespace, 0.0) > monotonic()

    async def _no_room(self, run: Unmade, error: KubeForbidden) -> None:
        """The run goes on without; its resource is made when there is room. Said once, not at each try."""
        known = run.namespace in self._full
        self._full[run.namespace] = monotonic() + QUOTA_SECONDS
        if not known:
            log.warning("a quota has no room for the resources of runs", namespace=run.namespace, run=str(run.run), error=str(error))
            await self._tell_owner(run, "QuotaExceeded", f"run {run.name} gets its resource when there is room for it: {error}")

    async def _tell_owner(self, run: Unmade, reason: str, message: str) -> None:
        """A person looks at what has begun the run; the run itself has nothing in the cluster that could be looked at."""
        if run.owner is not None:
            owner = {"kind": run.owner.kind, "namespace": run.namespace, "name": run.owner.name, "uid": str(run.owner.uid)}
            await self._events.tell(owner, str(run.run), Event("Warning", reason, message))


def _sequence(resource: Json) -> int:
    return int((resource.get("status") or {}).get("lastSequence") or 0)


def _resource(run: Unmade) -> Json:
    metadata: Json = {
        "name": run.name,
        "namespace": run.namespace,
        "labels": {**run.labels, RUN_ID_LABEL: str(run.run)},
        "finalizers": [CANCEL_FINALIZER],
    }
    if run.annotations:
        metadata["annotations"] = run.annotations
    if run.owner is not None:
        metadata["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": run.owner.kind,
                "name": run.owner.name,
                "uid": str(run.owner.uid),
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    spec = dict(run.spec)
    # A larger one, such as a webhook may bring, is in the store alone.
    if len(run.input) <= MAX_INPUT_BYTES and (value := decode(run.input)) is not None:
        spec["input"] = value
    return {"apiVersion": API_VERSION, "kind": "AgentRun", "metadata": metadata, "spec": spec}
