"""The time of a simulation: it passes only when the simulation says so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """``now``: seconds since the simulation began, which is always the start of 2026."""

    def __init__(self) -> None:
        self.now = 0.0

    def move_to(self, time: float) -> None:
        self.now = max(self.now, time)

    def rfc3339(self, time: float | None = None) -> str:
        moment = START + timedelta(seconds=self.now if time is None else time)
        return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def seconds_of(moment: str) -> float:
    return (datetime.fromisoformat(moment) - START).total_seconds()
