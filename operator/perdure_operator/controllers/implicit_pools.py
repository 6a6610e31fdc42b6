"""The pools of inline templates: an AgentPool of its own for each template, labelled as ours, that goes when nothing needs it any more.

The store's row is what a run is admitted by, and comes first; the resource owns the pods. Whichever of the two is missing while a run that
has not ended needs it is made again, so it does not matter in which order a run is created and its pool found to be unused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from perdure_operator.domain.errors import InvalidInput
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec, implicit_pool, is_implicit
from perdure_operator.kube.client import AGENTPOOLS, TRIGGERS, KubeApi
from perdure_operator.kube.errors import KubeConflict, KubeForbidden, KubeInvalid, KubeNotFound
from perdure_operator.kube.names import IMPLICIT_LABEL
from perdure_operator.services.projector import Cache
from perdure_operator.services.trigger_plan import parse_spec
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)

Json = dict[str, Any]

UNUSED_SECONDS = 300.0
"""After so long without a run a pool of ours goes: the same template may well come again."""


class ImplicitPools:
    def __init__(
        self, store: Store, resources: Resources, kube: KubeApi, cache: Cache, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._resources, self._kube, self._cache, self._now = store, resources, kube, cache, now
        self._unused_since: dict[str, float] = {}
        self._made: dict[tuple[str, str], str] = {}

    async def ensure(self, namespace: str, name: str, pool: AgentPoolSpec) -> None:
        """Both are there. Where the cluster lets us make none, pods go without an owner, and runs all the same."""
        spec = pool.to_json()
        if await self._store.upsert_pool(namespace, name, spec, None):
            await self._resources.pool_changed(namespace, name)
        found = self._cache.get(AGENTPOOLS, namespace, name)
        if found is None:
            await self._make(namespace, name, spec)

    async def restore(self, namespace: str, name: str, *, gone: bool) -> bool:
        """Its resource is ``gone``, or about to be. True: runs need it, so it stays in the store, and is there again once it is gone."""
        self._made.pop((namespace, name), None)
        pool = f"{namespace}/{name}"
        if not is_implicit(name) or not await self._needed(namespace, name):
            self._unused_since.pop(pool, None)
            return False
        row = next(iter(await self._store.pool_demand(pool)), None)
        if row is not None and gone:
            await self._make(namespace, name, row.spec)
        return row is not None

    async def remove_unused(self, resource: Json) -> bool:
        """Whether it was one of ours that nothing has needed for long, and goes."""
        meta = resource["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        pool = f"{namespace}/{name}"
        if not is_implicit(name) or IMPLICIT_LABEL not in (meta.get("labels") or {}):
            return False
        if await self._needed(namespace, name):
            self._unused_since.pop(pool, None)
            return False
        if self._now() - self._unused_since.setdefault(pool, self._now()) < UNUSED_SECONDS:
            return False
        log.info("a pool of an inline template is not needed any more", pool=pool)
        return await self._kube.delete(AGENTPOOLS, namespace, name, uid=meta["uid"], propagation="Background")

    def uid(self, namespace: str, name: str) -> str | None:
        """Of one that was just made, and that the watch has not shown yet."""
        return self._made.get((namespace, name))

    async def _make(self, namespace: str, name: str, spec: Json) -> None:
        body = {"metadata": {"name": name, "namespace": namespace, "labels": {IMPLICIT_LABEL: "true"}}, "spec": spec}
        try:
            made = await self._kube.create(AGENTPOOLS, namespace, body)
        except KubeConflict:
            return  # the watch will show it
        except (KubeForbidden, KubeInvalid, KubeNotFound) as error:
            log.warning("an inline template gets no AgentPool", pool=f"{namespace}/{name}", error=str(error))
            return
        self._made[namespace, name] = made["metadata"]["uid"]

    async def _needed(self, namespace: str, name: str) -> bool:
        return await self._resources.pool_is_used(namespace, name) or any(
            _template_pool(trigger) == name for trigger in self._cache.items(TRIGGERS, namespace)
        )


def _template_pool(trigger: Json) -> str | None:
    """Of the runs that it will make, if they bring a template of their own."""
    try:
        template = parse_spec(trigger["spec"]).run_template.spec.agent.template
    except InvalidInput:
        return None
    return implicit_pool(template)[0] if template is not None else None
