"""AgentRun: a resource is made a run of the store, its spec is told to that run, its deletion cancels it with all below it.

The resource is held by our finalizer until its end is *committed*, no longer: descendants end by themselves, and no namespace hangs.
What the run does meanwhile is written back by the projector, not here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import structlog
from pydantic import ValidationError

from perdure_operator.controllers.implicit_pools import ImplicitPools
from perdure_operator.domain.errors import CancelRequested, RunFinished, from_code
from perdure_operator.domain.ids import uuid7
from perdure_operator.domain.run import TERMINAL, State
from perdure_operator.kube.api.problems import in_words
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec, AgentRun, AgentRunSpec, implicit_pool
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, CONFIGMAPS, KubeApi
from perdure_operator.kube.errors import KubeConflict, KubeNotFound
from perdure_operator.kube.names import CANCEL_FINALIZER, RUN_ID_LABEL
from perdure_operator.services.conditions import STALLED, Verdict, condition, condition_of, rfc3339
from perdure_operator.services.events import Event, Events, about
from perdure_operator.services.projector import Cache
from perdure_operator.services.submission import new_run, pool_name
from perdure_operator.services.why import POOL_NOT_FOUND
from perdure_operator.store.operations import Control
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import NewRun, Store

log = structlog.get_logger(__name__)

Json = dict[str, Any]

AGAIN_SECONDS = 0.5
BLOCKED_SECONDS = 5.0
TAKEN_SECONDS = 1.0
ORPHAN_FINALIZER = "orphan"
PREDECESSOR_ACTIVE = "PredecessorActive"
RECORD_MISSING = "the database has no run {run}, so nobody knows what it has done; restore it, or delete this AgentRun and create it anew"


class Blocked(Exception):
    """The resource cannot become a run now; its status says why. ``reason`` as in conditions."""

    def __init__(self, reason: str, message: str, *, again: float = BLOCKED_SECONDS) -> None:
        super().__init__(message)
        self.reason, self.again = reason, again


class AgentRuns:
    """``inline``: in which namespaces a run may bring its own pod template. ``wrote``: a run was made or changed; its status is due."""

    def __init__(
        self, store: Store, resources: Resources, kube: KubeApi, cache: Cache, implicit: ImplicitPools, *,
        inline: Callable[[str], bool], wrote: Callable[[], None],
    ) -> None:  # fmt: skip
        self._implicit = implicit
        self._store, self._resources, self._kube, self._cache = store, resources, kube, cache
        self._inline, self._wrote = inline, wrote
        self._events = Events(kube)

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Gives the seconds after which to look again. Raises PerdureError: try again."""
        resource = self._cache.get(AGENTRUNS, namespace, name)
        if resource is None:
            return None  # a deletion that was seen is told by `deleted`, one that was not is found by the resync
        if resource["metadata"].get("deletionTimestamp"):
            return await self._deleting(resource)
        try:
            return await self._living(resource)
        except Blocked as blocked:
            if resource["spec"].get("desiredState") == State.CANCELLED:
                await self._say_cancelled(resource, blocked)
                return None
            await self._say_blocked(resource, blocked)
            return blocked.again

    async def deleted(self, last: Json) -> None:
        """The object is gone; ``last`` is its last state. With our finalizer it cannot go unnoticed; somebody may have removed that."""
        await self._end(last, "the resource was deleted")

    # ------------------------------------------------------------------------------------------------------------- living

    async def _living(self, resource: Json) -> float | None:
        meta = resource["metadata"]
        uid, generation = UUID(meta["uid"]), int(meta["generation"])
        known = await self._resources.find(uid)
        if known is None:
            status = resource.get("status") or {}
            if status.get("phase") in TERMINAL:
                return await self._finished(resource)
            if (run := status.get("runID")) is not None:
                # It was a run, and the database knows nothing of it any more: what it did must not be done again.
                raise Blocked("RecordMissing", RECORD_MISSING.format(run=run))
            return await self._new(resource, uid, generation)
        if known.ended:
            return await self._finished(resource)
        if not await self._hold(resource):  # an uninstall has taken our finalizer off, and this is the next installation
            return None
        if known.generation < generation:
            await self._tell_spec(known.run, _spec(resource), generation)
        return None

    async def _new(self, resource: Json, uid: UUID, generation: int) -> float | None:
        spec = _spec(resource)
        run = await self._run_of(resource["metadata"], spec)
        if not await self._hold(resource):
            return None
        admitted = await self._resources.admit(uid, generation, run, bound=_bound(resource["metadata"]))
        self._wrote()
        if spec.agent.template is not None and admitted.run is not None:
            # Until now nobody could know that its pool is needed.
            await self._implicit.ensure(resource["metadata"]["namespace"], *implicit_pool(spec.agent.template))
        if admitted.decision == "wait":
            if admitted.run is None:
                return AGAIN_SECONDS
            await self._cancel(admitted.run, "its resource was replaced by another of the same name")
            words = f"run {admitted.run}, which had this name or idempotencyKey, is being cancelled; this one begins when it has ended"
            raise Blocked(PREDECESSOR_ACTIVE, words, again=AGAIN_SECONDS)
        if admitted.decision == "name-taken":
            words = f"run {admitted.run}, which has no resource, has this name and has not ended; choose another name"
            raise Blocked("NameTaken", words, again=TAKEN_SECONDS)
        if admitted.decision == "key-taken":
            words = f"another AgentRun, of run {admitted.run}, has this idempotencyKey; choose another key"
            raise Blocked("IdempotencyKeyTaken", words, again=TAKEN_SECONDS)
        if admitted.decision == "adopted" and admitted.run is not None and admitted.state not in TERMINAL:
            await self._tell_spec(admitted.run, spec, generation)
        if admitted.decision == "created" and admitted.run is not None and spec.desired_state == "Cancelled":
            await self._cancel(admitted.run, "spec.desiredState is Cancelled")
        return None

    async def _tell_spec(self, run: UUID, spec: AgentRunSpec, generation: int) -> None:
        """What may change after the start (B1); the CRD refuses the rest."""
        body = {
            "generation": generation,
            "desiredState": spec.desired_state or "Running",
            "priority": spec.priority or 0,
            "activeLimitMs": spec.active_deadline_seconds * 1000 if spec.active_deadline_seconds is not None else None,
            "deadlineSeconds": spec.deadline_seconds,
            # Of the budgets the one that is in force.
            "maxToolRetries": spec.budgets.max_retries_per_tool_call if spec.budgets else None,
        }
        await self._apply(Control(run, "spec", body))

    async def _run_of(self, meta: Json, spec: AgentRunSpec) -> NewRun:
        """The row that this resource asks for. Raises Blocked."""
        namespace = meta["namespace"]
        pool = await self._pool(namespace, spec)
        input_json = await self._input(namespace, spec)
        labels = {key: value for key, value in (meta.get("labels") or {}).items() if key != RUN_ID_LABEL}
        return new_run(uuid7(), namespace, meta["name"], spec, pool, input_json=input_json, labels=labels)

    async def _pool(self, namespace: str, spec: AgentRunSpec) -> AgentPoolSpec:
        if spec.agent.template is not None:
            if not self._inline(namespace):
                raise Blocked("InlineTemplateForbidden", f"runs in namespace {namespace} name a pool (spec.agent.poolRef)")
            name, pool = implicit_pool(spec.agent.template)
            await self._implicit.ensure(namespace, name, pool)
            return pool
        name = pool_name(spec)
        found = self._cache.get(AGENTPOOLS, namespace, name)
        if found is None:
            raise Blocked(POOL_NOT_FOUND, f"there is no AgentPool {name} in namespace {namespace}")
        try:
            return AgentPoolSpec.model_validate(found["spec"], by_alias=True, by_name=False)
        except ValidationError as error:
            raise Blocked("PoolInvalid", f"AgentPool {name}: {in_words(error, AgentPoolSpec)}") from None

    async def _input(self, namespace: str, spec: AgentRunSpec) -> bytes:
        source = spec.input_from
        if source is None:
            return json.dumps(spec.input, separators=(",", ":"), ensure_ascii=False).encode()
        reference = source.config_map_key_ref
        if reference is None:
            raise Blocked("InputNotFound", "inputFrom.blob is not supported by this version; use input or configMapKeyRef")
        found = await self._kube.get(CONFIGMAPS, namespace, reference.name)
        text = ((found or {}).get("data") or {}).get(reference.key)
        if text is None:
            raise Blocked("InputNotFound", f"there is no key {reference.key} in ConfigMap {namespace}/{reference.name}")
        try:
            return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False).encode()
        except ValueError as error:
            raise Blocked("InputInvalid", f"key {reference.key} of ConfigMap {reference.name} is not JSON: {error}") from None

    async def _hold(self, resource: Json) -> bool:
        """Our finalizer, before there is anything that a deletion would have to end. False: the resource is gone already."""
        meta = resource["metadata"]
        finalizers = meta.get("finalizers") or []
        return CANCEL_FINALIZER in finalizers or await self._set_finalizers(meta, [*finalizers, CANCEL_FINALIZER])

    async def _finished(self, resource: Json) -> float | None:
        """A run that has ended needs no finalizer; the resource goes when its time is over."""
        meta, status = resource["metadata"], resource.get("status") or {}
        if status.get("phase") not in TERMINAL:
            return None  # the projector's write comes first, and brings us here again
        if CANCEL_FINALIZER in (meta.get("finalizers") or []):
            await self._set_finalizers(meta, [f for f in meta["finalizers"] if f != CANCEL_FINALIZER])
            return None
        ttl = resource["spec"].get("ttlSecondsAfterFinished")
        if ttl is None or not status.get("completionTime"):
            return None
        left: float = ttl - (datetime.now(UTC) - datetime.fromisoformat(status["completionTime"])).total_seconds()
        if left > 0:
            return left
        await self._kube.delete(AGENTRUNS, meta["namespace"], meta["name"], uid=meta["uid"], propagation="Background")
        return None

    # ------------------------------------------------------------------------------------------------------------- ending

    async def _deleting(self, resource: Json) -> float | None:
        meta = resource["metadata"]
        finalizers = meta.get("finalizers") or []
        if CANCEL_FINALIZER not in finalizers or ORPHAN_FINALIZER in finalizers:
            return None  # with orphan on it the children's owner references are still being taken away
        await self._end(resource, "the resource was deleted")
        await self._set_finalizers(meta, [f for f in finalizers if f != CANCEL_FINALIZER])
        return None

    async def _end(self, resource: Json, reason: str) -> None:
        uid = UUID(resource["metadata"]["uid"])
        known = await self._resources.find(uid)
        if known is None:
            return
        if not known.ended:
            await self._detach_orphans(known.run, resource["metadata"])
            await self._cancel(known.run, reason)
        await self._resources.gone(uid)

    async def _detach_orphans(self, run: UUID, meta: Json) -> None:
        """Children whose resource does not name this one as its owner any more are to outlive it (V4)."""
        children = {str(child.uid): child.run for child in await self._resources.children(run)}
        if not children:
            return
        found, _ = await self._kube.list(AGENTRUNS, meta["namespace"], labels=RUN_ID_LABEL)
        for child in found:
            owners = {owner["uid"] for owner in child["metadata"].get("ownerReferences") or []}
            if child["metadata"]["uid"] in children and meta["uid"] not in owners:
                with contextlib.suppress(CancelRequested):  # of its own, or before it lost its owner: it ends
                    await self._apply(Control(children[child["metadata"]["uid"]], "detach", {"by": "orphan"}))

    async def _cancel(self, run: UUID, reason: str) -> None:
        with contextlib.suppress(RunFinished):
            await self._apply(Control(run, "cancel", {"by": "operator", "reason": reason}))

    async def _apply(self, operation: Control) -> None:
        """Raises the typed error of a refusal."""
        [outcome] = await self._store.control([operation], wait=True)
        if outcome.code != "ok":
            raise from_code(outcome.code, outcome.detail)
        self._wrote()

    # ------------------------------------------------------------------------------------------------------------ writing

    async def _set_finalizers(self, meta: Json, finalizers: list[str]) -> bool:
        """False: the object is gone, or being deleted when ours was to be added. Raises KubeConflict when others write all the time."""
        body = {"metadata": {"finalizers": finalizers, "resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}}
        try:
            await self._kube.merge_patch(AGENTRUNS, meta["namespace"], meta["name"], body)
        except KubeNotFound:
            return False
        except KubeConflict:
            fresh = await self._kube.get(AGENTRUNS, meta["namespace"], meta["name"])
            adds = CANCEL_FINALIZER in finalizers
            if fresh is None or fresh["metadata"]["uid"] != meta["uid"] or (adds and fresh["metadata"].get("deletionTimestamp")):
                return False
            others = [f for f in fresh["metadata"].get("finalizers") or [] if f != CANCEL_FINALIZER]
            wanted = [*others, CANCEL_FINALIZER] if CANCEL_FINALIZER in finalizers else others
            body["metadata"] |= {"finalizers": wanted, "resourceVersion": fresh["metadata"]["resourceVersion"]}
            await self._kube.merge_patch(AGENTRUNS, meta["namespace"], meta["name"], body)
        return True

    async def _say_blocked(self, resource: Json, blocked: Blocked) -> None:
        meta, before = resource["metadata"], condition_of(resource, STALLED)
        if (before.get("reason"), before.get("message")) == (blocked.reason, str(blocked)):
            return
        log.warning(
            "an AgentRun cannot become a run", name=f"{meta['namespace']}/{meta['name']}", reason=blocked.reason, detail=str(blocked)
        )
        status = {"phase": "Pending", "waitReason": blocked.reason}
        stalled = "False" if blocked.reason == PREDECESSOR_ACTIVE else "True"
        truths = {"Succeeded": "Unknown", "Suspended": "False", "PodScheduled": "False", "Finished": "False", STALLED: stalled}
        await self._say(resource, status, truths, Event("Warning", blocked.reason, str(blocked)))

    async def _say_cancelled(self, resource: Json, blocked: Blocked) -> None:
        """It has not become a run, and will not."""
        status = {"phase": State.CANCELLED, "waitReason": None, "completionTime": rfc3339(datetime.now(UTC))}
        truths = {"Succeeded": "False", "Suspended": "False", "PodScheduled": "False", "Finished": "True", STALLED: "False"}
        words = f"cancelled by spec.desiredState before it began; until then: {blocked.reason}: {blocked}"
        await self._say(resource, status, truths, Event("Warning", State.CANCELLED, words))

    async def _say(self, resource: Json, status: Json, truths: dict[str, str], event: Event) -> None:
        """Status and event of an AgentRun that is no run; all its conditions have the event's reason."""
        meta, verdicts = resource["metadata"], {kind: Verdict(truth, event.reason, event.message) for kind, truth in truths.items()}
        status |= {
            "observedGeneration": meta["generation"],
            "conditions": [condition(kind, verdict, resource) for kind, verdict in verdicts.items()],
        }
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": status}
        try:
            await self._kube.merge_patch(AGENTRUNS, meta["namespace"], meta["name"], body, subresource="status")
        except (KubeConflict, KubeNotFound) as error:
            log.info("the status of an AgentRun that is no run could not be written", name=meta["name"], error=str(error))
            return
        await self._events.tell(about("AgentRun", resource), str(meta["generation"]), event)


def _spec(resource: Json) -> AgentRunSpec:
    """Raises Blocked."""
    try:
        return AgentRun.model_validate({**resource, "status": None}, by_alias=True, by_name=False).spec
    except ValidationError as error:
        raise Blocked("InvalidSpec", in_words(error, AgentRun)) from None


def _bound(meta: Json) -> UUID | None:
    """The run that the projector made this resource for. Anybody can write a label: the store believes it of a run without resource."""
    try:
        return UUID((meta.get("labels") or {})[RUN_ID_LABEL])
    except (KeyError, ValueError):
        return None
