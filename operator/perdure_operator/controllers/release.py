"""``perdure-operator release-finalizers``: lets go of resources and ends worker pods that nobody would end any more.

Their runs stay as they are in the store: an installation that comes back goes on with them. Safe to repeat; the chart runs it after an
uninstall, when no operator can make a pod or set a finalizer any more (docs/adr/0007), and a person may when the operator is gone for good.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from perdure_operator.kube.client import AGENTRUNS, PODS, KubeApi
from perdure_operator.kube.errors import KubeConflict, KubeNotFound
from perdure_operator.kube.names import CANCEL_FINALIZER, workers

log = structlog.get_logger(__name__)

TRIES = 5


async def release_finalizers(kube: KubeApi, namespaces: Sequence[str]) -> int:
    """Gives the number of resources that were released. Raises PerdureError."""
    released = 0
    for namespace in namespaces or (None,):
        for resource in (await kube.list(AGENTRUNS, namespace))[0]:
            released += await _release(kube, resource["metadata"]["namespace"], resource["metadata"]["name"])
    log.info("finalizers released", resources=released)
    return released


async def end_workers(kube: KubeApi, namespaces: Sequence[str], installation: str) -> int:
    """Those of other installations work on. Gives the number of pods that were told to end. Raises PerdureError."""
    ended = 0
    for namespace in namespaces or (None,):
        for pod in (await kube.list(PODS, namespace, labels=workers(installation)))[0]:
            meta = pod["metadata"]
            ended += await kube.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"])
    log.info("worker pods ended", pods=ended)
    return ended


async def _release(kube: KubeApi, namespace: str, name: str) -> bool:
    for _ in range(TRIES):
        resource = await kube.get(AGENTRUNS, namespace, name)
        meta = resource["metadata"] if resource else {}
        finalizers = meta.get("finalizers") or []
        if CANCEL_FINALIZER not in finalizers:
            return False
        left = [finalizer for finalizer in finalizers if finalizer != CANCEL_FINALIZER]
        body = {"metadata": {"finalizers": left, "resourceVersion": meta["resourceVersion"]}}
        try:
            await kube.merge_patch(AGENTRUNS, namespace, name, body)
        except KubeConflict:
            continue
        except KubeNotFound:
            return False
        return True
    raise KubeConflict(f"AgentRun {namespace}/{name} is written by others all the time")
