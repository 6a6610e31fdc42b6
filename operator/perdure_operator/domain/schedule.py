"""When a calendar fires: cron expressions in a time zone, intervals from an anchor, single instants.

Everything is asked as "the first instant after this one", in UTC, and depends on nothing else: whoever asks, and however often, gets the
same instants. cronsim reads the expression and knows the calendar; the clock of the zone is put to it here, as Debian's cron does: a job
at fixed times runs once a day whatever the clock does (in the hour that is skipped: when it ends; in the hour that comes twice: the first
time), a job with a star for minute or hour follows the clock as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim

_SECOND, _MINUTE, _HOUR, _DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


class Calendar(Protocol):
    def after(self, instant: datetime) -> datetime | None:
        """The first firing strictly later than ``instant``, in UTC; None when there is none any more."""
        ...


@dataclass(frozen=True)
class Once:
    at: datetime

    def after(self, instant: datetime) -> datetime | None:
        return self.at.astimezone(UTC) if self.at > instant else None


@dataclass(frozen=True)
class Every:
    """``anchor`` + 1, 2, 3 … times ``seconds``."""

    seconds: int
    anchor: datetime

    def after(self, instant: datetime) -> datetime | None:
        passed = max(0, (instant - self.anchor) // timedelta(seconds=self.seconds))
        return self.anchor.astimezone(UTC) + (passed + 1) * timedelta(seconds=self.seconds)


@dataclass(frozen=True)
class Cron:
    """``expression``: five fields that cronsim accepts; ``zone``: a name of the IANA database."""

    expression: str
    zone: str = "UTC"

    def after(self, instant: datetime) -> datetime | None:
        minute, hour, *_ = self.expression.split()
        follows_the_clock = minute.startswith("*") or hour.startswith("*")
        return (self._by_the_clock if follows_the_clock else self._at_fixed_times)(instant, ZoneInfo(self.zone))

    def _at_fixed_times(self, instant: datetime, zone: ZoneInfo) -> datetime | None:
        for wall in self._walls(instant.astimezone(zone)):
            shown = wall
            while (at := shown.replace(tzinfo=zone).astimezone(UTC)).astimezone(zone).replace(tzinfo=None) != shown:
                shown += _MINUTE
            if at > instant:  # asked while an hour passes for the second time, the wall clock's next time may lie in the first
                return at
        return None

    def _by_the_clock(self, instant: datetime, zone: ZoneInfo) -> datetime | None:
        """As long as the zone's offset stands still, its clock is a calendar without gaps; behind each change it is asked anew."""
        while (wall := next(self._walls(instant.astimezone(zone)), None)) is not None:
            at = wall.replace(tzinfo=UTC) - _offset(instant, zone)
            change = _change(instant, at, zone)
            if change is None:
                return at
            first = change.astimezone(zone)
            if next(self._walls(first - _SECOND), None) == first.replace(tzinfo=None):
                return change
            instant = change
        return None

    def _walls(self, wall: datetime) -> Iterator[datetime]:
        """Times on the wall that match, later than ``wall``."""
        return iter(CronSim(self.expression, wall.replace(tzinfo=None, fold=0)))


def _offset(instant: datetime, zone: ZoneInfo) -> timedelta:
    offset = instant.astimezone(zone).utcoffset()
    assert offset is not None, "a zone of the IANA database knows its offset"
    return offset


def _change(start: datetime, end: datetime, zone: ZoneInfo) -> datetime | None:
    """The first instant in (start, end] at which the zone's offset is another one than at ``start``. No zone changes twice within a day."""
    offset, low = _offset(start, zone), start
    while _offset(high := min(low + _DAY, end), zone) == offset:
        if high == end:
            return None
        low = high
    low, high = low.replace(microsecond=0), high.replace(microsecond=0)
    while high - low > _SECOND:
        middle = low + (high - low) // 2 // _SECOND * _SECOND
        low, high = (middle, high) if _offset(middle, zone) == offset else (low, middle)
    return high


def latest(calendar: Calendar, since: datetime, until: datetime, limit: int) -> list[datetime]:
    """The last ``limit`` firings with ``since`` <= firing <= ``until``, in order. Looks back only as far as it must."""
    window = _HOUR
    while True:
        start = max(since - _SECOND, until - window)
        kept: deque[datetime] = deque(maxlen=limit)
        at = calendar.after(start)
        while at is not None and at <= until:
            if at >= since:
                kept.append(at)
            at = calendar.after(at)
        if len(kept) == limit or start == since - _SECOND:
            return list(kept)
        window *= 4
