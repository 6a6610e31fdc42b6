"""Durations as the SDK takes them: seconds, or a timedelta."""

from __future__ import annotations

from datetime import timedelta

Duration = float | timedelta


def in_seconds(duration: Duration) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def hours(count: float) -> timedelta:
    return timedelta(hours=count)


def days(count: float) -> timedelta:
    return timedelta(days=count)
