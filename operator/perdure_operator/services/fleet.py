"""Worker pods on a cluster: as many as the queues ask for, and a few warm ones (K1).

A pod has a place in the store before it exists: a row with our own id, which its name is made of. So a crash at any point leaves either a
place without a pod, which is given up after a while, or a pod with a place, which connects and is used. What pods are doing is told by
the watch (controllers/pods.py); here they are only created, and deleted when their row says ``retiring``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn
from uuid import UUID, uuid4

import structlog

from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec, is_implicit
from perdure_operator.kube.client import PODS, KubeApi
from perdure_operator.kube.errors import KubeForbidden, KubeInvalid, KubeNotFound, KubeUnavailable
from perdure_operator.kube.names import pod_name
from perdure_operator.kube.specs.pod import PodSettings, ReservedName, worker_pod
from perdure_operator.observability import metrics
from perdure_operator.services.capacity import decide, spare
from perdure_operator.services.polling import Poll
from perdure_operator.services.trouble import UNSCHEDULABLE, Trouble, is_disrupted, quota_in_words, tell, without_node
from perdure_operator.store.resources import PodRow, Resources
from perdure_operator.store.store import PoolDemand, Store

log = structlog.get_logger(__name__)

TICK_SECONDS = 0.1
OUTAGE_SECONDS = 1.0
PARALLEL_STARTS = 30
SLOW_START_SECONDS = 15.0
"""A pod that has been starting for so long waits for something, and costs the nodes nothing."""
START_SECONDS = 600.0
"""A pod whose agent has not asked for a run by then will not do it."""
NOT_READY = "AgentNotReady"
LOST_SECONDS = 2.0
"""A place without a pod after so long is looked after: the operator crashed, or the answer was lost."""
DELETE_AGAIN_SECONDS = 30.0


class Fleet:
    """``failed``, ``unplaced`` and ``placed`` are told by the watch. ``owner``: the uid of a pool's resource (namespace, name), None where
    there is none or it is being deleted; ``changed``: a pool has come into trouble, or out of it."""

    def __init__(
        self, store: Store, resources: Resources, kube: KubeApi, settings: PodSettings, *,
        owner: Callable[[str, str], str | None], changed: Callable[[str, str], None], limit: int = 10_000,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._store, self._resources, self._kube = store, resources, kube
        self._settings, self._limit, self._now = settings, limit, now
        self._owner, self._changed = owner, changed
        self._made_by = _digest(asdict(settings))
        self._poll = Poll("the fleet could not be looked after", seconds=TICK_SECONDS, outage=OUTAGE_SECONDS)
        self.kick = self._poll.kick
        self._deleted: dict[UUID, float] = {}
        self._starting: set[UUID] = set()
        self._unproven: set[UUID] = set()
        self._revisions: dict[str, str] = {}
        self._digests: dict[str, tuple[dict[str, Any], str]] = {}
        self._failing: dict[str, Trouble] = {}
        self._unplaced: dict[UUID, tuple[str, str]] = {}
        self._silent: dict[UUID, tuple[str, str]] = {}
        self._up: set[str] = set()
        self._placed: dict[UUID, float] = {}

    @property
    def troubles(self) -> dict[str, Trouble]:
        """Pools that cannot start pods, by ``namespace/name``. That there is no node now comes before what an earlier pod failed of."""
        # The pod that has waited longest speaks for its pool: not another one at each look.
        waiting = {pool: Trouble(reason=UNSCHEDULABLE, message=message) for pool, message in reversed(self._unplaced.values())}
        # One pod that is slow says nothing of a pool whose others work.
        silent = {pool: Trouble(reason=NOT_READY, message=message) for pool, message in self._silent.values() if pool not in self._up}
        return silent | self._failing | waiting

    async def run(self, term: int) -> NoReturn:
        await self._poll.run(lambda: self.tick(term))

    async def tick(self, term: int) -> None:
        demand = await self._store.pool_demand(most=self._limit)
        revisions = {pool.pool: self._revision(pool) for pool in demand}
        rows = await self._resources.pods(revisions, besides=self._unproven)
        before = self.troubles.keys()
        self._up = {pool.pool for pool in demand if pool.idle or pool.leased}
        self._prove(rows)
        self._forgive(revisions)
        self._forget(rows)
        for pool in before - self.troubles.keys():
            self._tell(pool)
        await tell(self._store, demand, self.troubles)
        await self._retire_outdated(revisions, rows, demand)
        await self._give_up(rows)
        await self._delete([row for row in rows if row.state == "retiring"])
        # Pods that cannot start must not keep those of others from it.
        stuck = [row for row in rows if row.state == "starting" and row.age_seconds > SLOW_START_SECONDS]
        await self._give_up_on_starts(stuck, demand)
        live = {pool.pool: pool.idle + pool.starting + pool.leased + len(pool.retiring) for pool in demand}
        parallel = PARALLEL_STARTS + len(stuck)
        needs = decide(demand, live, self._caps(demand), limit=self._limit, parallel=parallel)
        by_name = {pool.pool: pool for pool in demand}
        for name, need in needs.items():
            if need.retire:
                await self._store.retire_idle(name, need.retire)
                self.kick()
        starts = [by_name[name] for name, need in needs.items() for _ in range(need.start)]
        await asyncio.gather(*(self._start(pool, term) for pool in starts))

    def _revision(self, pool: PoolDemand) -> str:
        """Of its pods: what the pool says of them, then what the installation does. A version that makes other pods has another sidecar."""
        spec, revision = self._digests.get(pool.pool, (None, ""))
        if spec is not pool.spec:  # the store gives the same object until the spec has changed
            revision = f"{template_revision(pool.spec)}-{self._made_by}"
            self._digests[pool.pool] = pool.spec, revision
        return revision

    # ----------------------------------------------------------------------------------------------------------- starting

    def _caps(self, demand: list[PoolDemand]) -> dict[str, int]:
        """A pool in trouble gets one pod at a time, and none until its pause is over."""
        starting = {pool.pool: pool.starting for pool in demand}
        now = self._now()
        return {name: 0 if now < trouble.until or starting.get(name) else 1 for name, trouble in self._failing.items()}

    async def _start(self, pool: PoolDemand, term: int) -> None:
        namespace, name = pool.pool.split("/", 1)
        if (owner := self._owner(namespace, name)) is None and not is_implicit(name):
            return  # a pod of a pool that is gone would be nobody's; the store is being told
        pod_id = uuid4()
        spec = AgentPoolSpec.model_validate(pool.spec, by_alias=True, by_name=False)
        try:
            body = worker_pod(name, namespace, spec, pod_id, self._settings, owner)
        except ReservedName as error:
            self.failed(pool.pool, "PodRefused", str(error))
            return
        if not await self._resources.register_pod(pod_id, pool.pool, self._revision(pool), term=term):
            log.warning("another operator leads: no pod is created", pool=pool.pool)
            return
        self._starting.add(pod_id)
        try:
            await self._create(pool.pool, namespace, pod_id, body)
        finally:
            self._starting.discard(pod_id)

    async def _create(self, pool: str, namespace: str, pod_id: UUID, body: dict[str, Any]) -> None:
        try:
            made = await self._kube.create(PODS, namespace, body)
        except KubeForbidden as error:
            reason, message = quota_in_words(str(error)) if error.quota else ("Forbidden", str(error))
            await self._refused(pool, pod_id, reason, message)
        except (KubeInvalid, KubeNotFound) as error:
            await self._refused(pool, pod_id, "PodRefused", str(error))
        except KubeUnavailable as error:
            # It may have been done: the place stays, and is looked after.
            log.warning("a pod may not have been created", pool=pool, error=str(error))
        else:
            self._unproven.add(pod_id)
            metrics.PODS_CREATED.labels(namespace).inc()
            await self._resources.bind_pod(pod_id, UUID(made["metadata"]["uid"]))

    async def _refused(self, pool: str, pod_id: UUID, reason: str, message: str) -> None:
        await self._store.pod_gone(pod_id, "NotStarted", proven=False)
        self.failed(pool, reason, message)

    def failed(self, pool: str, reason: str, message: str, last_words: Sequence[str] = ()) -> None:
        """A pod of this pool could not be started, or broke before it did anything: the next try comes later each time."""
        trouble = self._failing.setdefault(pool, Trouble())
        trouble.failed(reason, message, last_words, now=self._now())
        self._tell(pool)
        log.warning("a pool cannot start pods", pool=pool, reason=reason, detail=message, failures=trouble.failures)

    def unplaced(self, pod_id: UUID, pool: str, message: str) -> None:
        """The scheduler finds no node for this pod. That is no failure, since one may come: the pod stays, and others are started."""
        if pod_id not in self._unplaced:
            log.warning("a pod has no node", pool=pool, pod=str(pod_id), detail=message)
        self._unplaced[pod_id] = (pool, message)
        self._tell(pool)

    def silent(self, pod_id: UUID, pool: str, message: str) -> None:
        """Its agent runs and asks for nothing. That is no failure yet, since it may be slow: the pod has its time to start."""
        log.warning("an agent does not ask for a run", pool=pool, pod=str(pod_id))
        self._silent[pod_id] = (pool, message)
        self._tell(pool)

    def _tell(self, pool: str) -> None:
        self._changed(*pool.split("/", 1))

    def placed(self, pod_id: UUID) -> None:
        """Its time to start begins now, if it had to wait for a node."""
        if self._unplaced.pop(pod_id, None) is not None:
            self._placed[pod_id] = self._now()

    def _prove(self, rows: list[PodRow]) -> None:
        """A pool works again when a pod of its has asked for a run. A container that was seen running may crash a moment later."""
        known = {row.pod_id: row for row in rows}
        for pod_id in list(self._unproven):
            row = known.get(pod_id)
            if row is not None and row.state in ("idle", "leased"):
                self._failing.pop(row.pool, None)
            if row is None or row.state != "starting":
                self._unproven.discard(pod_id)

    def _forgive(self, revisions: dict[str, str]) -> None:
        """What was wrong with a template, or a sidecar, says nothing of the one that somebody has put in its place."""
        for pool, revision in revisions.items():
            if self._revisions.get(pool) != revision:
                self._failing.pop(pool, None)
        self._revisions = revisions
        self._digests = {pool: self._digests[pool] for pool in revisions}

    def _forget(self, rows: list[PodRow]) -> None:
        """What has come up, or is on its way out, waits for nothing."""
        starting = {row.pod_id for row in rows if row.state == "starting"}
        for pod_id in (self._unplaced.keys() | self._placed.keys()) - starting:
            self._unplaced.pop(pod_id, None)
            self._placed.pop(pod_id, None)
        self._silent = {pod_id: told for pod_id, told in self._silent.items() if pod_id in starting}

    # ------------------------------------------------------------------------------------------------------------- ending

    async def _retire_outdated(self, revisions: dict[str, str], rows: list[PodRow], demand: list[PoolDemand]) -> None:
        """Pods of an earlier template, or of a pool that is gone, take no new runs (L10: Latest).

        Those that an earlier version or setting of the installation has made run the same agent, and are as good as ever until they are
        replaced: idle ones go a few at a time, since after an upgrade that is each warm pod of each pool.
        """
        old: list[UUID] = []
        replaceable: dict[str, list[UUID]] = defaultdict(list)
        for row in rows:
            revision = revisions.get(row.pool, "")
            if row.state in ("starting", "idle") and row.revision != revision:
                same_agent = _of_the_pool(row.revision) == _of_the_pool(revision)
                (replaceable[row.pool] if row.state == "idle" and same_agent else old).append(row.pod_id)
        unplaced = Counter(pool for pool, _ in self._unplaced.values())
        for pool in demand:
            old += replaceable[pool.pool][: spare(pool, unplaced[pool.pool])]
        if old:
            await self._resources.retire(old)
            self.kick()

    async def _give_up(self, rows: list[PodRow]) -> None:
        for row in rows:
            if row.kube_uid is None and row.age_seconds > LOST_SECONDS and row.pod_id not in self._starting:
                namespace, name = row.pool.split("/", 1)
                pod = await self._kube.get(PODS, namespace, pod_name(name, row.pod_id))
                if pod is None:
                    await self._store.pod_gone(row.pod_id, "NotStarted", proven=False)
                else:
                    await self._resources.bind_pod(row.pod_id, UUID(pod["metadata"]["uid"]))

    async def _give_up_on_starts(self, stuck: list[PodRow], demand: list[PoolDemand]) -> None:
        since = self._now() - START_SECONDS
        late = [row for row in stuck if row.age_seconds > START_SECONDS and self._placed.get(row.pod_id, since) <= since]
        # As known now: a pod that gets its node during what follows has its time to start yet.
        waiting = set(self._unplaced)
        silent = [row for row in late if row.pod_id not in waiting and not await self._has_no_node(row)]
        for row in silent:
            self.failed(row.pool, NOT_READY, f"its agent has not asked for a run within {START_SECONDS:.0f} s")
        # One without a node stays as long as somebody wants it: an autoscaler may be at it.
        wanted = {pool.pool for pool in demand if pool.runnable or (pool.spec.get("capacity") or {}).get("minIdle")}
        retired = silent + [row for row in late if row.pod_id in self._unplaced and row.pool not in wanted]
        if retired:
            await self._resources.retire([row.pod_id for row in retired])
            self.kick()

    async def _has_no_node(self, row: PodRow) -> bool:
        """Asked of the cluster: the watch of one that leads since a moment may not have told yet."""
        namespace, name = row.pool.split("/", 1)
        pod = await self._kube.get(PODS, namespace, pod_name(name, row.pod_id))
        if pod is None or (waits := without_node(pod)) is None:
            return False
        self.unplaced(row.pod_id, row.pool, waits[1])
        return True

    async def _delete(self, rows: list[PodRow]) -> None:
        """The row goes when the pod was seen gone; until then the deletion is asked for again, now and then."""
        now = self._now()
        there = {row.pod_id for row in rows}
        self._deleted = {pod: at for pod, at in self._deleted.items() if pod in there}
        due = [row for row in rows if now - self._deleted.get(row.pod_id, -DELETE_AGAIN_SECONDS) >= DELETE_AGAIN_SECONDS]
        await asyncio.gather(*(self._delete_one(row, now) for row in due))

    async def _delete_one(self, row: PodRow, now: float) -> None:
        if row.kube_uid is None:
            return  # _give_up finds out whether there is a pod
        namespace, name = row.pool.split("/", 1)
        self._deleted[row.pod_id] = now
        if row.charged and await self._is_left_alone(namespace, pod_name(name, row.pod_id)):
            await self._resources.confirm_loss(row.pod_id)
        if not await self._kube.delete(PODS, namespace, pod_name(name, row.pod_id), uid=str(row.kube_uid)):
            # Nobody can say how it ended: not proof that what it began is over.
            await self._store.pod_gone(row.pod_id, "PodDeleted", proven=False)

    async def _is_left_alone(self, namespace: str, name: str) -> bool:
        """Before we delete it ourselves: afterwards nobody can tell whose deletion its agent was told of."""
        pod = await self._kube.get(PODS, namespace, name)
        return pod is not None and not pod["metadata"].get("deletionTimestamp") and not is_disrupted(pod)


def template_revision(spec: dict[str, Any]) -> str:
    """Of a pool, by all that its pods are made of."""
    made_of = {"template": spec.get("template"), "podReuse": (spec.get("podReuse") or {}).get("mode"), "spool": spec.get("spool")}
    # Pools that say nothing of it keep the revision that they had before it could be said.
    return _digest(made_of | ({"sidecar": spec["sidecar"]} if spec.get("sidecar") else {}))


def _of_the_pool(revision: str) -> str:
    return revision.partition("-")[0]


def _digest(made_of: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:10]
