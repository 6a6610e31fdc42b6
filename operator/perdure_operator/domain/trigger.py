"""What a trigger decides, apart from any clock, store or cluster: which missed firings still count, what makes a firing unique, how its
run is called, when a delivery that failed is tried again.

A *firing* is an instant of a calendar, a request at a webhook, or somebody's wish. Stored under its dedup key it is a *delivery*, and a
delivery makes at most one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from uuid import UUID

from perdure_operator.domain.schedule import Calendar, latest

ON_TIME = timedelta(seconds=60)
"""With the policy ``None``, a firing that is later than this was missed: longer than a change of leader or a restart takes."""
OVERDUE = timedelta(seconds=60)
"""From this lateness on a run is told that it is late."""
DEFAULT_LIMIT = 5
MAX_BACKOFF_SECONDS = 3600.0


class Source(StrEnum):
    SCHEDULE = "schedule"
    INTERVAL = "interval"
    AT = "at"
    WEBHOOK = "webhook"
    MANUAL = "manual"


class CatchUp(StrEnum):
    """What becomes of firings that were missed."""

    NONE = "None"
    LATEST = "Latest"
    ALL = "All"


class DeliveryState(StrEnum):
    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    DONE = "DONE"  # decided: a run was made, or the policy said that none shall be
    FAILED = "FAILED"  # closed without a run, and no retry would help: too late, or its trigger is gone
    DEAD = "DEAD"  # given up after its last attempt; a person may redrive it


@dataclass(frozen=True)
class Firing:
    """What every producer emits. ``at``: the scheduled instant, or None for "now". ``payload``: JSON that becomes the run's input.
    ``by``: who asked for it. ``skipped_since``: firings from this instant on were missed before it and are not made up for."""

    trigger: str
    source: Source
    dedup_key: str
    at: datetime | None = None
    payload: bytes | None = None
    by: str = ""
    skipped_since: datetime | None = None


@dataclass(frozen=True)
class Policy:
    """``deadline``: a firing that is later than this is missed. ``limit``: how many missed ones are made up for at most."""

    catch_up: CatchUp = CatchUp.LATEST
    limit: int = DEFAULT_LIMIT
    deadline: timedelta | None = None


@dataclass(frozen=True)
class Due:
    """``firings``: instants that fire now. ``skipped``: there were earlier ones that do not. ``next_at``: when to look again."""

    firings: tuple[datetime, ...]
    skipped: bool
    next_at: datetime | None


def due(calendar: Calendar, next_at: datetime, now: datetime, policy: Policy) -> Due:
    """What fires at ``now`` of a calendar that has been served until ``next_at``, which is one of its instants."""
    since, limit = next_at, policy.limit if policy.catch_up == CatchUp.ALL else 1
    if policy.deadline is not None:
        since = max(since, now - policy.deadline)
    if policy.catch_up == CatchUp.NONE:
        since = max(since, now - ON_TIME)
    found = tuple(latest(calendar, since, now, limit))
    return Due(found, not found or found[0] > next_at, calendar.after(now))


def scheduled_key(source: Source, trigger: str, at: datetime) -> str:
    """Of a firing by the calendar (T2): the same instant of the same trigger is the same firing, whoever finds it due."""
    prefix = "scheduled-once" if source == Source.AT else "scheduled"
    return f"{prefix}:{trigger}:{_instant(at)}"


def event_key(source: Source, trigger: str, id: str) -> str:
    """Of a firing that has a name from outside, or, without one, its delivery's id."""
    return f"{source}:{trigger}:{id}"


def run_name(trigger: str, source: Source, at: datetime, delivery: UUID) -> str:
    """``trigger``: its name without the namespace. By the calendar: that and the instant, else that and the delivery."""
    if source in (Source.WEBHOOK, Source.MANUAL):
        return f"{trigger}-{delivery.hex[-12:]}"
    return f"{trigger}-{at.astimezone(UTC):%Y%m%dt%H%M%S}{f'.{at.microsecond:06}' if at.microsecond else ''}z"


def idempotency_key(delivery: UUID) -> str:
    return f"delivery:{delivery}"


def backoff_seconds(base: float, attempts: int) -> float:
    """Before the try after so many: doubled each time, an hour at most."""
    return min(MAX_BACKOFF_SECONDS, base * 2.0 ** min(attempts - 1, 30))


def lateness(at: datetime, now: datetime) -> str:
    """What a person reads about a run that starts late; empty when it does not."""
    late = now - at
    if late < OVERDUE:
        return ""
    seconds = int(late.total_seconds())
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"due {seconds // size} {unit} ago: judge whether it still makes sense"
    raise AssertionError("OVERDUE is at least a minute")


def _instant(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
