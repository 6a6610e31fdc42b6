"""Turns deliveries into runs, in every gateway at once.

A delivery is claimed with an epoch and for a time; whoever comes later with an older epoch changes nothing. The decision and the run
are one commit, so a crash before it leaves the delivery to the next claim, and one after it leaves a run that exists once.

An attempt is a try that came to an end. An outage of ours is none: what was claimed and not decided is given back, and claimed anew as
soon as the store answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, timedelta
from typing import NoReturn
from uuid import UUID

import msgspec
import structlog

from perdure_operator.domain.errors import Busy, InvalidInput, NameTaken, PerdureError, Unavailable
from perdure_operator.domain.ids import uuid7
from perdure_operator.domain.trigger import Source, backoff_seconds, idempotency_key, lateness, run_name
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec, TriggerSpec
from perdure_operator.kube.names import SCHEDULED_AT_ANNOTATION, TRIGGER_LABEL, label_value
from perdure_operator.observability import metrics
from perdure_operator.services.polling import Poll
from perdure_operator.services.submission import new_run, pool_name, require_pool
from perdure_operator.services.trigger_plan import parse_spec
from perdure_operator.store.store import NewRun
from perdure_operator.store.triggers import Claimed, Rules, Triggers

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.2
OUTAGE_SECONDS = 0.5
BATCH = 64
CLAIM_SECONDS = 30.0
STOP_SECONDS = 2.0
DEFAULT_ATTEMPTS = 5
DEFAULT_BACKOFF_SECONDS = 2.0
Pools = Callable[[], dict[str, AgentPoolSpec]]


class DeliveryRouter:
    """``pools``: as this process knows them now; ``refresh``: reads them again. ``made``: there are new runs."""

    def __init__(
        self, triggers: Triggers, name: str, pools: Pools, refresh: Callable[[], Awaitable[None]], made: Callable[[], None]
    ) -> None:
        self._triggers, self._name = triggers, name
        self._pools, self._refresh, self._made = pools, refresh, made
        self._poll = Poll("deliveries could not be routed", seconds=POLL_SECONDS, outage=OUTAGE_SECONDS)
        self.kick = self._poll.kick
        self._claims = False  # there may be claims of ours that nobody works on
        self._tried: UUID | None = None  # the one of them that was being decided

    async def run(self) -> NoReturn:
        try:
            await self._poll.run(self._look)
        finally:
            await self._let_go()

    async def _look(self) -> bool:
        return await self.route_due() >= BATCH

    async def route_due(self) -> int:
        """Gives how many deliveries were claimed. Raises PerdureError when the store does not answer: what was claimed and not decided
        is claimed again by the next call that the store answers, or by another gateway."""
        if self._claims:
            await self._triggers.release(self._name, self._tried)
        self._claims, self._tried = True, None
        claimed = await self._triggers.claim(self._name, BATCH, CLAIM_SECONDS)  # if the answer is lost, there may be claims all the same
        outcomes = set()
        try:
            for delivery in claimed:
                self._tried = delivery.delivery
                outcomes.add(await self._route(delivery))
            self._claims = False
        finally:
            if "made" in outcomes:
                self._made()
        return len(claimed)

    async def _let_go(self) -> None:
        """This process ends: others need not wait until its claims are over."""
        if self._claims:
            with contextlib.suppress(PerdureError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._triggers.release(self._name, self._tried)

    async def _route(self, claimed: Claimed) -> str:
        try:
            outcome = await self._decide(claimed)
        except (Unavailable, Busy):
            raise  # whether it was committed is not known: what was is not given back, and the rest is claimed anew
        except PerdureError as error:
            outcome = await self._failed(claimed, error)
        metrics.DELIVERIES.labels(claimed.source, outcome).inc()
        if outcome == "made":
            metrics.FIRING_LATENESS.labels(claimed.source).observe(max(0.0, (claimed.now - claimed.fire_at).total_seconds()))
        log.info("delivery", trigger=claimed.trigger, delivery=str(claimed.delivery), outcome=outcome)
        return outcome

    async def _decide(self, claimed: Claimed) -> str:
        """Raises PerdureError."""
        spec = parse_spec(claimed.spec)
        namespace, _, trigger = claimed.trigger.partition("/")
        wanted = pool_name(spec.run_template.spec)
        if f"{namespace}/{wanted}" not in self._pools():
            await self._refresh()
        run = self._new_run(claimed, spec, namespace, trigger, require_pool(self._pools(), namespace, wanted))
        deadline = spec.starting_deadline_seconds
        rules = Rules(
            forbid=spec.concurrency_policy == "Forbid",
            resource=spec.recording != "StoreOnly",
            deadline=timedelta(seconds=deadline) if deadline is not None else None,
            decision={"annotations": _annotations(claimed, spec)},
        )
        outcome = await self._triggers.route(claimed, rules, run)
        if outcome == "name-taken":
            raise NameTaken(f"another run has the name {run.columns['name']}")
        return outcome

    def _new_run(self, claimed: Claimed, spec: TriggerSpec, namespace: str, trigger: str, pool: AgentPoolSpec) -> NewRun:
        template, late = spec.run_template, max(0.0, (claimed.now - claimed.fire_at).total_seconds())
        labels = (template.metadata.labels if template.metadata else None) or {}
        run = new_run(
            uuid7(),
            namespace,
            run_name(trigger, claimed.source, claimed.fire_at, claimed.delivery),
            template.spec,
            pool,
            input_json=claimed.payload if claimed.payload is not None else msgspec.json.encode(template.spec.input),
            labels={**labels, TRIGGER_LABEL: label_value(trigger)},
            idempotency_key=idempotency_key(claimed.delivery),
        )
        start = {"name": trigger, "id": str(claimed.delivery), "at": claimed.fire_at, "lateSeconds": late} | claimed.detail
        if note := lateness(claimed.fire_at, claimed.now):
            start["note"] = note
        return NewRun({**run.columns, "start": start}, run.input)

    async def _failed(self, claimed: Claimed, error: PerdureError) -> str:
        try:
            spec = parse_spec(claimed.spec)
        except InvalidInput:
            attempts, base = DEFAULT_ATTEMPTS, DEFAULT_BACKOFF_SECONDS
        else:
            attempts, base = _attempts(spec), _backoff(spec)
        again = backoff_seconds(base, claimed.attempts) if claimed.attempts < attempts else None
        log.warning("a delivery failed", trigger=claimed.trigger, delivery=str(claimed.delivery), error=str(error), again_seconds=again)
        await self._triggers.failed(claimed, str(error), again)
        return "retry" if again is not None else "dead"


def _attempts(spec: TriggerSpec) -> int:
    return (spec.retry.max_attempts if spec.retry else None) or DEFAULT_ATTEMPTS


def _backoff(spec: TriggerSpec) -> float:
    found = spec.retry.backoff_seconds if spec.retry else None
    return DEFAULT_BACKOFF_SECONDS if found is None else float(found)


def _annotations(claimed: Claimed, spec: TriggerSpec) -> dict[str, str]:
    """Of the run's resource."""
    found = (spec.run_template.metadata.annotations if spec.run_template.metadata else None) or {}
    if claimed.source in (Source.SCHEDULE, Source.INTERVAL, Source.AT):
        found = {**found, SCHEDULED_AT_ANNOTATION: claimed.fire_at.astimezone(UTC).isoformat().replace("+00:00", "Z")}
    return found
