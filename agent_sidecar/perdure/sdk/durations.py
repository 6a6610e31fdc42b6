"""Durations as the SDK takes them: seconds, or a timedelta."""

from __future__ import annotations

import math
from datetime import timedelta

from perdure.sdk.errors import InvalidDeclaration

Duration = float | timedelta


def in_seconds(duration: Duration) -> float:
    """Raises InvalidDeclaration."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    given: object = duration
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise InvalidDeclaration(f"a duration is a number of seconds or a timedelta, not {given!r}")
    return float(given)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def hours(count: float) -> timedelta:
    return timedelta(hours=count)


def days(count: float) -> timedelta:
    return timedelta(days=count)
