"""From a Trigger's spec to what the domain and the store ask: its calendar, its policies, and the row that its object makes.

The row outlives the object, so a plan builds on what is there: the anchor never moves, an instant that has fired never comes again, and
a spec whose source says the same as before keeps its place in the calendar. Without a row, the object may have fired all the same: a
database that was emptied or restored knows nothing of it, and what its status says of it holds.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from perdure_operator.domain.errors import InvalidInput
from perdure_operator.domain.schedule import Calendar, Cron, Every, Once
from perdure_operator.domain.trigger import DEFAULT_LIMIT, CatchUp, Policy, Source
from perdure_operator.kube.api.cron import five_fields
from perdure_operator.kube.api.problems import in_words
from perdure_operator.kube.api.v1alpha1 import TriggerSpec
from perdure_operator.store.triggers import Planned, TriggerRow


def parse_spec(stored: dict[str, Any]) -> TriggerSpec:
    """Raises InvalidInput: a version that knows more has written it, or nobody should have."""
    try:
        spec = TriggerSpec.model_validate(stored, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidInput(in_words(error, TriggerSpec, under=("spec",))) from None
    if spec.run_template.spec.input_from is not None:
        raise InvalidInput("spec.runTemplate.spec.inputFrom is not supported: give input, or let the source bring it")
    return spec


def source_of(spec: TriggerSpec) -> Source:
    return next(source for source in Source if getattr(spec.source, source.value) is not None)


def calendar_of(spec: TriggerSpec, anchor: datetime) -> Calendar | None:
    """None: it fires when somebody comes."""
    source = spec.source
    if source.schedule is not None:
        return Cron(five_fields(source.schedule.cron), source.schedule.time_zone or "UTC")
    if source.interval is not None:
        return Every(source.interval.seconds, anchor)
    if source.at is not None:
        return Once(datetime.fromisoformat(source.at))
    return None


def policy_of(spec: TriggerSpec) -> Policy:
    chosen, deadline = spec.catch_up, spec.starting_deadline_seconds
    return Policy(
        CatchUp(chosen.policy) if chosen else CatchUp.LATEST,
        (chosen.limit if chosen else None) or DEFAULT_LIMIT,
        timedelta(seconds=deadline) if deadline is not None else None,
    )


def plan(
    key: str, spec: TriggerSpec, row: TriggerRow | None, now: datetime, *,
    uid: UUID | None, generation: int, created: datetime, told: datetime | None,
) -> Planned:  # fmt: skip
    """What the row shall be. ``created``: when the object came to be; ``now``: the store's clock; ``told``: what fired last, as its status
    tells it. A new object fires from its creation on, a changed source from now on."""
    stored, created = spec.to_json(), min(created, now)
    anchor = row.anchor_at if row else created.replace(microsecond=0)
    same_object = row is not None and not row.deleted and row.uid == uid
    replan = row is None or row.deleted or row.spec["source"] != stored["source"]
    calendar = calendar_of(spec, anchor)
    since = now if same_object else created
    fired = row.fired_at if row is not None else _remembered(calendar, told)
    if fired is not None:
        since = max(since, fired)
    return Planned(
        key,
        uid,
        generation,
        stored,
        source_of(spec),
        bool(spec.suspend),
        anchor,
        replan,
        _first(calendar, since, fired),
        row.revision if row else 0,
        fired,
    )


def _remembered(calendar: Calendar | None, told: datetime | None) -> datetime | None:
    # A status tells whole seconds: of an instant within that one, it tells that it has fired. One before it must not fire again either.
    if isinstance(calendar, Once) and told is not None and calendar.at.replace(microsecond=0) <= told:
        return calendar.at
    return told


def _first(calendar: Calendar | None, since: datetime, fired: datetime | None) -> datetime | None:
    if isinstance(calendar, Once):
        # It may have passed before we heard of it, and is late then; what has fired is known by its key.
        return calendar.at if fired != calendar.at else None
    return calendar.after(since) if calendar is not None else None
