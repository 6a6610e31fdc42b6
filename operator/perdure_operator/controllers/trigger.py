"""Trigger: the store follows the resource, so that every gateway fires it; its status follows the store; old runs' resources go.

Nothing is fired here. The trigger's row outlives the resource: one that comes again goes on where the earlier one was. Runs that have a
resource are owned by the trigger's, and go with it as jobs go with their cron job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn
from uuid import UUID

import structlog

from perdure_operator.controllers.implicit_pools import ImplicitPools
from perdure_operator.domain.errors import Busy, InvalidInput
from perdure_operator.kube.api.v1alpha1 import TriggerSpec, implicit_pool
from perdure_operator.kube.client import AGENTRUNS, TRIGGERS, KubeApi
from perdure_operator.kube.errors import KubeConflict, KubeNotFound
from perdure_operator.services.conditions import READY, Verdict, condition, condition_of, rfc3339
from perdure_operator.services.events import Event, Events, about
from perdure_operator.services.polling import Poll
from perdure_operator.services.projector import Cache
from perdure_operator.services.resync import unusual
from perdure_operator.services.trigger_plan import parse_spec, plan
from perdure_operator.store.store import Store
from perdure_operator.store.triggers import Summary, TriggerRow, Triggers

log = structlog.get_logger(__name__)

Json = dict[str, Any]

STATUS_SECONDS = 10.0
"""Between two looks at a trigger when nothing says that there is news."""
SETTLE_SECONDS = 1.0
"""From a firing to the look at what became of it."""
KEPT_SUCCEEDED, KEPT_FAILED = 3, 5
MAX_REASON = 300
"""Characters of what went wrong that a condition's message has room for, beside what to do (names are long)."""


class TriggerController:
    """``namespaces``: those that are watched, empty for all. ``inline``: in which of them a run may bring its own pod template.
    ``hooks_url``: where the gateway is from outside, or at least from inside the cluster."""

    def __init__(
        self, store: Store, triggers: Triggers, kube: KubeApi, cache: Cache, implicit: ImplicitPools, namespaces: Sequence[str], *,
        inline: Callable[[str], bool], hooks_url: str,
    ) -> None:  # fmt: skip
        self._store, self._triggers, self._kube, self._cache, self._namespaces = store, triggers, kube, cache, namespaces
        self._events = Events(kube)
        self._implicit = implicit
        self._inline, self._hooks_url = inline, hooks_url.rstrip("/")

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Gives the seconds after which to look again. Raises PerdureError: try again."""
        resource = self._cache.get(TRIGGERS, namespace, name)
        if resource is None:
            return None  # a deletion that was seen is told by `deleted`, one that was not is found by `look`
        if resource["metadata"].get("deletionTimestamp"):
            await self.deleted(resource)
            return None
        key = f"{namespace}/{name}"
        row = await self._triggers.get(key)
        try:
            spec = parse_spec(resource["spec"])
            await self._allow(namespace, spec)
        except InvalidInput as error:
            await self._hold(row)
            await self._say(resource, None, None, Verdict("False", "InvalidSpec", str(error)))
            return None
        await self._follow(resource, spec, row)
        summary = await self._triggers.summary(key)
        await self._forget_old_runs(key, spec)
        await self._say(resource, spec, summary, _ready(name, spec, summary))
        return await self._next_look(summary)

    async def deleted(self, last: Json) -> None:
        """The object is gone, or going; ``last`` is its last state."""
        meta = last["metadata"]
        if await self._triggers.delete(f"{meta['namespace']}/{meta['name']}", UUID(meta["uid"])):
            log.info("a trigger was deleted", trigger=f"{meta['namespace']}/{meta['name']}")

    async def run(self, seconds: float) -> NoReturn:
        """Until cancelled: finds triggers that were deleted while nobody watched."""
        await Poll("triggers could not be compared with the cluster", seconds=seconds, outage=seconds).run(self.look)

    async def look(self) -> None:
        missing: dict[str, list[Json]] = defaultdict(list)
        living: dict[str, int] = defaultdict(int)
        for key, uid in await self._triggers.living():
            namespace, _, name = key.partition("/")
            if uid is None or (self._namespaces and namespace not in self._namespaces):
                continue
            living[namespace] += 1
            if not _is(self._cache.get(TRIGGERS, namespace, name), uid) and not _is(await self._kube.get(TRIGGERS, namespace, name), uid):
                missing[namespace].append({"metadata": {"namespace": namespace, "name": name, "uid": str(uid)}})
        for namespace, gone in missing.items():
            if unusual(len(gone), living[namespace]):
                log.error("unusually many triggers are missing: they go on firing", namespace=namespace, missing=len(gone))
                continue
            for last in gone:
                await self.deleted(last)

    # ------------------------------------------------------------------------------------------------------------ store

    async def _allow(self, namespace: str, spec: TriggerSpec) -> None:
        """Raises InvalidInput. An inline template becomes the pool that its runs are queued in."""
        template = spec.run_template.spec.agent.template
        if template is None:
            return
        if not self._inline(namespace):
            raise InvalidInput(f"runs in namespace {namespace} name a pool (spec.runTemplate.spec.agent.poolRef)")
        await self._implicit.ensure(namespace, *implicit_pool(template))

    async def _follow(self, resource: Json, spec: TriggerSpec, row: TriggerRow | None) -> None:
        """Raises Busy when the row has changed meanwhile."""
        meta = resource["metadata"]
        uid, generation = UUID(meta["uid"]), int(meta["generation"])
        if row is not None and (row.uid, row.generation, row.deleted) == (uid, generation, False):
            return
        now = row.now if row is not None else await self._triggers.now()
        planned = plan(
            f"{meta['namespace']}/{meta['name']}", spec, row, now,
            uid=uid, generation=generation, created=datetime.fromisoformat(meta["creationTimestamp"]), told=_last_fired(resource),
        )  # fmt: skip
        if not await self._triggers.put(planned):
            raise Busy(f"trigger {planned.key} has changed meanwhile")

    async def _hold(self, row: TriggerRow | None) -> None:
        """A spec that cannot be honoured fires nothing, and neither does the one before it."""
        if row is not None and not row.deleted and not row.suspended and not await self._triggers.hold(row):
            raise Busy(f"trigger {row.key} has changed meanwhile")

    async def _forget_old_runs(self, key: str, spec: TriggerSpec) -> None:
        succeeded, failed = spec.successful_runs_history_limit, spec.failed_runs_history_limit
        for run in await self._triggers.outdated(
            key, KEPT_SUCCEEDED if succeeded is None else succeeded, KEPT_FAILED if failed is None else failed
        ):
            await self._kube.delete(AGENTRUNS, run.namespace, run.name, uid=str(run.uid), propagation="Background")

    async def _next_look(self, summary: Summary | None) -> float:
        if summary is None or summary.next_at is None:
            return STATUS_SECONDS
        until: float = (summary.next_at - await self._triggers.now()).total_seconds() + SETTLE_SECONDS
        return min(STATUS_SECONDS, max(SETTLE_SECONDS, until))

    # ----------------------------------------------------------------------------------------------------------- status

    async def _say(self, resource: Json, spec: TriggerSpec | None, summary: Summary | None, ready: Verdict) -> None:
        """Writes only what is different: a trigger that stands still costs nothing."""
        meta, old = resource["metadata"], resource.get("status") or {}
        known = _known(summary)
        if spec is not None:
            known["url"] = f"{self._hooks_url}/v1/hooks/{meta['namespace']}/{meta['name']}" if spec.source.webhook is not None else None
        status: Json = {"observedGeneration": meta["generation"], "conditions": [condition("Ready", ready, resource)], **known}
        # A merge patch keeps what it does not name: what is over must be said to be over.
        status = {key: value for key, value in status.items() if value is not None or key in old}
        if all(_told(old.get(key), value) for key, value in status.items()):
            return
        try:
            await self._kube.merge_patch(TRIGGERS, meta["namespace"], meta["name"], {"status": status}, subresource="status")
        except (KubeNotFound, KubeConflict) as error:
            log.info("a trigger's status could not be written", trigger=meta["name"], error=str(error))
            return
        if ready.status == "False" and condition_of(resource, "Ready").get("reason") != ready.reason:
            mark = summary.gave_up["delivery"] if summary is not None and summary.gave_up is not None else str(meta["generation"])
            await self._events.tell(about("Trigger", resource), mark, Event("Warning", ready.reason, ready.message))


def _ready(name: str, spec: TriggerSpec, summary: Summary | None) -> Verdict:
    if spec.suspend:
        return Verdict("True", "Suspended", "nothing fires while spec.suspend is true")
    dead = summary.gave_up if summary is not None else None
    if dead is None:
        return READY
    what_to_do = (
        f"`kubectl agentrun deliveries {name}` shows what was given up, `kubectl agentrun redrive {name} {dead['delivery']}` tries it again"
    )
    return Verdict("False", "DeliveryDead", f"the last firing made no run: {dead['message'][:MAX_REASON]}; {what_to_do}")


def _last_fired(resource: Json) -> datetime | None:
    last = (resource.get("status") or {}).get("lastScheduleTime")
    return datetime.fromisoformat(last) if last is not None else None


def _known(summary: Summary | None) -> Json:
    if summary is None:
        return {}
    return {
        "lastScheduleTime": rfc3339(summary.fired_at),
        "nextScheduleTime": rfc3339(summary.next_at),
        "lastDelivery": _delivery(summary.last),
        "active": summary.active,
        "pending": summary.pending,
        "dead": summary.dead,
    }


def _told(old: Any, new: Any) -> bool:
    return bool(old == ({key: value for key, value in new.items() if value is not None} if isinstance(new, dict) else new))


def _delivery(last: Json | None) -> Json | None:
    """A merge patch keeps the fields of an object that it does not name: those of another delivery must not stay."""
    if last is None:
        return None
    return {
        "id": last["id"][:512],
        "state": last["state"].capitalize(),
        "at": rfc3339(datetime.fromisoformat(last["at"])),
        "run": last["run"],
        "message": last["message"][:1000] or None,
    }


def _is(resource: Json | None, uid: UUID) -> bool:
    return resource is not None and resource["metadata"]["uid"] == str(uid)
