"""Trigger: what makes runs. One source says when; the template says what; the policies say what happens to runs that overlap or come late.

The shape is the final one. Sources, routes and policies that are still to come add a field or a value; none that is here will move.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from perdure_operator.kube.api.agentrun import AgentRunSpec
from perdure_operator.kube.api.base import Key, Model, ObjectName, PositiveSeconds, Rule, Seconds, exactly_one
from perdure_operator.kube.api.cron import CRON, ZONE, five_fields
from perdure_operator.kube.api.meta import ObjectMeta
from perdure_operator.kube.api.podtemplate import TemplateMetadata
from perdure_operator.kube.api.status import TriggerStatus

MAX_NAME = 200
_ZONE_NAME = r"^[A-Za-z][-+_A-Za-z0-9/]*$"
_HEADER = r"^[A-Za-z0-9][-A-Za-z0-9]*$"
_INSTANT = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$"


def _fires(cron: str) -> str:
    five_fields(cron)
    return cron


def _exists(instant: str) -> str:
    try:
        datetime.fromisoformat(instant)
    except ValueError as error:
        raise ValueError(f"{instant!r} is no point in time: {error}") from None
    return instant


Header = Annotated[str, Field(min_length=1, max_length=100, pattern=_HEADER)]
Instant = Annotated[str, Field(max_length=40, pattern=_INSTANT, json_schema_extra={"format": "date-time"}), AfterValidator(_exists)]


class Schedule(Model):
    cron: Annotated[str, Field(min_length=1, max_length=200), CRON, AfterValidator(_fires)]
    """Minute, hour, day of month, month, day of week, as Debian's cron reads them; or @hourly, @daily, @weekly, @monthly, @yearly."""
    time_zone: Annotated[str, Field(max_length=64, pattern=_ZONE_NAME), ZONE] | None = None
    """Name in the IANA database, such as Europe/Berlin. Default UTC."""


class Interval(Model):
    seconds: Annotated[int, Field(ge=1, le=31_536_000)]
    """From one firing to the next."""


class SecretKey(Model):
    name: ObjectName
    """Name of a Secret in the same namespace."""
    key: Key
    """The key in it."""


class Hmac(Model):
    """The sender signs the body: HMAC-SHA256 in hexadecimal, with or without `sha256=` before it."""

    secret_ref: SecretKey
    """Where the shared secret is."""
    header: Header | None = None
    """Header with the signature. Default X-Hub-Signature-256."""


class Bearer(Model):
    """The sender shows a token in the header Authorization."""

    secret_ref: SecretKey
    """Where the token is."""


class WebhookAuth(Model):
    """How a sender proves who it is. Exactly one."""

    hmac: Hmac | None = None
    """By a signature of the body."""
    bearer: Bearer | None = None
    """By a token."""

    rules = (exactly_one("hmac", "bearer"),)


class Webhook(Model):
    auth: WebhookAuth
    id_header: Header | None = None
    """Header that names a delivery: sent again under the same name, it makes no second run. Default Idempotency-Key."""


class Manual(Model):
    pass


class Source(Model):
    """When the trigger fires. Exactly one."""

    schedule: Schedule | None = None
    """At times of the calendar."""
    interval: Interval | None = None
    """Again and again, so many seconds apart."""
    at: Instant | None = None
    """Once, at this point in time, such as 2026-12-24T18:00:00Z."""
    webhook: Webhook | None = None
    """When a request comes to the address in status.url."""
    manual: Manual | None = None
    """When somebody asks for it: {}."""

    rules = (exactly_one("schedule", "interval", "at", "webhook", "manual"),)


class CatchUp(Model):
    policy: Literal["None", "Latest", "All"]
    """Of the firings that were missed: none, the latest one, or all up to the limit."""
    limit: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How many of them at most, the latest ones. Default 5."""


class NewRun(Model):
    pass


class Route(Model):
    """Where a firing goes."""

    new_run: NewRun
    """A run of its own, made from runTemplate: {}."""


class DeliveryRetry(Model):
    max_attempts: Annotated[int, Field(ge=1, le=100)] | None = None
    """How often making the run is tried before the delivery is dead. Default 5."""
    backoff_seconds: Seconds | None = None
    """Wait before the second try, doubled for each further one; up to half of it is left out at random. Default 2."""


class RunTemplate(Model):
    """What each run is made from."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the runs."""
    spec: AgentRunSpec
    """The runs' spec. What the source brought, such as a webhook's body, becomes the input, else what is given here."""

    rules = (
        Rule(
            "!has(self.spec.idempotencyKey)",
            "runs of a trigger get their idempotencyKey from what fired it; leave it out",
            lambda template: template.spec.idempotency_key is None,
        ),
    )


class TriggerSpec(Model):
    source: Source
    concurrency_policy: Literal["Allow", "Forbid"] | None = None
    """Forbid: no new run while one of this trigger is not finished, even if that one waits. Default Allow."""
    starting_deadline_seconds: PositiveSeconds | None = None
    """A firing that is later than this is missed; left out, none is."""
    catch_up: CatchUp | None = None
    """What becomes of firings that were missed while nobody watched the clock. Default: policy Latest."""
    route: Route | None = None
    """Where a firing goes. Default: newRun."""
    retry: DeliveryRetry | None = None
    """What happens when a run cannot be made."""
    suspend: bool | None = None
    """Nothing fires while this is true. Default false."""
    successful_runs_history_limit: Annotated[int, Field(ge=0, le=1000)] | None = None
    """How many resources of succeeded runs are kept. Default 3."""
    failed_runs_history_limit: Annotated[int, Field(ge=0, le=1000)] | None = None
    """How many resources of failed and cancelled runs are kept. Default 5."""
    recording: Literal["Resource", "StoreOnly"] | None = None
    """Resource: each run is an AgentRun. StoreOnly: it is in the store alone, whose retention it follows. Default Resource."""
    run_template: RunTemplate


class Trigger(Model):
    """Makes runs from a template: by the clock, for a webhook, or when somebody asks."""

    api_version: Literal["perdure.dev/v1alpha1"]
    kind: Literal["Trigger"]
    metadata: ObjectMeta
    spec: TriggerSpec
    """When runs are made, and which."""
    status: TriggerStatus | None = None
    """What the trigger did last and does next."""
