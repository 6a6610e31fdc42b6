"""Worker pods as the watch shows them: bound to their place in the store, retired when they are on their way out, given up when they end.

How a pod ended decides what that means for its run (domain/lease.py). That it is *proven* to have ended, so that nothing it began can
still happen, is said only of containers that were seen terminated: an object can be deleted by force while its processes live on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import structlog

from perdure_operator.kube.client import PODS, KubeApi
from perdure_operator.kube.names import AGENT_CONTAINER, POD_ID_LABEL, POOL_ANNOTATION, SIDECAR_CONTAINER
from perdure_operator.observability import metrics
from perdure_operator.services.conditions import rfc3339
from perdure_operator.services.fleet import SLOW_START_SECONDS, Fleet
from perdure_operator.services.projector import Cache
from perdure_operator.services.trouble import is_disrupted, without_node
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)

Json = dict[str, Any]

LAST_WORDS = 20
"""Lines of what a container has said before it ended that are kept."""
SILENT_SECONDS = 30.0
"""An agent that runs for so long and has not asked for a run may never do it: its pool and the runs that wait say so."""
NOTHING_SERVED = "the agent's container ended with code 0 before it had asked for a run: does its program call serve()?"
NOTHING_ASKED = "its agent runs and has not asked for a run: does its program call serve(), and does its sidecar reach the gateway?"
IMAGE_TROUBLES = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
                            "CreateContainerError", "RunContainerError", "CreatePodSandboxError"})  # fmt: skip
"""Reasons of a waiting container that will not start by itself soon."""


@dataclass(frozen=True)
class Ending:
    """``reason`` as in ``domain.lease.weight``; ``clean``: its work was done, or it was told to go."""

    reason: str
    message: str
    proven: bool
    clean: bool
    last_words: tuple[str, ...] = ()


class WorkerPods:
    """``wrote``: a run lost its worker, or a place is free."""

    def __init__(self, store: Store, resources: Resources, kube: KubeApi, cache: Cache, fleet: Fleet, *, wrote: Callable[[], None]) -> None:
        self._store, self._resources, self._kube, self._cache, self._fleet = store, resources, kube, cache, fleet
        self._wrote = wrote

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Gives the seconds after which a pod that is not at work yet is looked at again. Raises PerdureError: try again."""
        pod = self._cache.get(PODS, namespace, name)
        pod_id = _pod_id(pod)
        if pod is None or pod_id is None:
            return None
        meta = pod["metadata"]
        ending = ending_of(pod)
        if ending is not None:
            await self._ended(pod, pod_id, ending)
            if not meta.get("deletionTimestamp"):
                await self._kube.delete(PODS, namespace, name, uid=meta["uid"], grace_seconds=0)
            return None
        if not await self._resources.bind_pod(pod_id, UUID(meta["uid"])):
            # Its place was given up, or never was: nobody counts it, nobody may lease to it.
            await self._kube.delete(PODS, namespace, name, uid=meta["uid"])
            return None
        if meta.get("deletionTimestamp"):
            await self._store.take_away([pod_id])
        elif (trouble := trouble_of(pod)) is not None:
            self._fleet.failed(meta["annotations"][POOL_ANNOTATION], *trouble)
            await self._resources.retire([pod_id])
            self._wrote()
        else:
            return await self._placement(pod, pod_id)
        return None

    async def _placement(self, pod: Json, pod_id: UUID) -> float | None:
        if (waits := without_node(pod)) is None:
            self._fleet.placed(pod_id)
            return await self._silence(pod, pod_id)
        since, message = waits
        if (left := SLOW_START_SECONDS - (datetime.now(UTC) - since).total_seconds()) > 0:
            return left
        self._fleet.unplaced(pod_id, pod["metadata"]["annotations"][POOL_ANNOTATION], message)
        return None

    async def _silence(self, pod: Json, pod_id: UUID) -> float | None:
        if (since := _running_since(pod)) is None:
            return None
        silent = (datetime.now(UTC) - since).total_seconds()
        if silent < SILENT_SECONDS:
            return SILENT_SECONDS - silent
        if await self._resources.never_asked(pod_id):
            self._fleet.silent(pod_id, pod["metadata"]["annotations"][POOL_ANNOTATION], f"since {rfc3339(since)} {NOTHING_ASKED}")
        return None

    async def deleted(self, last: Json) -> None:
        """The object is gone; ``last`` is its last state."""
        pod_id = _pod_id(last)
        if pod_id is None:
            return
        evicted = Ending("Evicted", "the pod was evicted", proven=False, clean=True)
        deleted = Ending("PodDeleted", "the pod was deleted", proven=False, clean=True)
        ending = ending_of(last) or (evicted if is_disrupted(last) else deleted)
        await self._ended(last, pod_id, ending)

    async def _ended(self, pod: Json, pod_id: UUID, ending: Ending) -> None:
        if ending.reason == "PodEnded" and not pod["metadata"].get("deletionTimestamp") and await self._resources.never_asked(pod_id):
            # It would be replaced for ever, and its pool looked as well as any.
            ending = replace(ending, reason="AgentExited", message=NOTHING_SERVED, clean=False, last_words=())
        metrics.POD_ENDINGS.labels(ending.reason).inc()
        # That its agent ended in good order as well says nothing against a run that it held still.
        taken = ending.reason == "PodEnded" and pod["metadata"].get("deletionTimestamp")
        lost = await self._store.pod_gone(pod_id, "PodDeleted" if taken else ending.reason, proven=ending.proven)
        if lost:
            log.warning("a run lost its worker", pod=pod["metadata"]["name"], reason=ending.reason, runs=[str(run) for run in lost])
        if not ending.clean and not lost:
            self._fleet.failed(pod["metadata"]["annotations"][POOL_ANNOTATION], ending.reason, ending.message, ending.last_words)
        self._wrote()


def _pod_id(pod: Json | None) -> UUID | None:
    try:
        return UUID(((pod or {})["metadata"].get("labels") or {})[POD_ID_LABEL])
    except (KeyError, ValueError):
        return None


def _running_since(pod: Json) -> datetime | None:
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        if container["name"] == AGENT_CONTAINER and (started := ((container.get("state") or {}).get("running") or {}).get("startedAt")):
            return datetime.fromisoformat(started)
    return None


def ending_of(pod: Json) -> Ending | None:
    """How the pod ended, if the kubelet or the cluster says that it has."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    containers = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
    proven = bool(containers) and all(map(_seen_to_end, containers))
    agent: Json = next((c for c in containers if c["name"] == AGENT_CONTAINER), {})
    terminated = (agent.get("state") or {}).get("terminated") or {}
    code = terminated.get("exitCode")
    words = tuple((terminated.get("message") or "").strip().splitlines()[-LAST_WORDS:])
    message = status.get("message") or _broken(containers, code)
    if is_disrupted(pod) or status.get("reason") in ("Evicted", "NodeShutdown", "Preempting"):
        return Ending("Evicted", status.get("message") or "the pod was evicted", proven, clean=True)
    if terminated.get("reason") == "OOMKilled":
        return Ending("OOMKilled", "the agent used more memory than its limit", proven, clean=False, last_words=words)
    if code == 0 or pod["metadata"].get("deletionTimestamp"):
        return Ending("PodDeleted" if code != 0 else "PodEnded", message, proven, clean=True)
    return Ending("AgentKilled" if (code or 0) > 128 else "AgentExited", message, proven, clean=False, last_words=words)


def _seen_to_end(container: Json) -> bool:
    """Not if the kubelet only could not find it any more, as after a restart of its runtime."""
    terminated = (container.get("state") or {}).get("terminated")
    return terminated is not None and terminated.get("reason") != "ContainerStatusUnknown"


def _broken(containers: list[Json], code: int | None) -> str:
    """``code``: the agent's, which has none when a container before it has failed."""
    if code is None:
        for container in containers:
            ended = (container.get("state") or {}).get("terminated") or {}
            # The sidecar is made to end where another fails.
            if ended.get("exitCode") and container["name"] != SIDECAR_CONTAINER:
                said = f": {ended['message'].strip()}" if ended.get("message") else ""
                return f"the container {container['name']} ended with code {ended['exitCode']}{said}"
    return f"the agent's container ended with code {code}"


def trouble_of(pod: Json) -> tuple[str, str] | None:
    """Reason and message when a container cannot start; waiting for a node is none, that ends by itself."""
    status = pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in IMAGE_TROUBLES:
            return waiting["reason"], waiting.get("message") or f"container {container['name']} cannot start"
    return None
