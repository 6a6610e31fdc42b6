"""The arithmetic of calendars against an oracle that looks at every minute there is, around the changes of many zones' clocks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from hypothesis import example, given, settings
from hypothesis import strategies as st

from perdure_operator.domain.schedule import Calendar, Cron, Every, Once, latest

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)

# Changes of an hour, of half an hour, of two, at midnight, forward and back; whole days skipped; odd offsets; none at all.
ZONES = (
    "UTC Europe/Berlin Europe/London Europe/Dublin America/New_York America/Havana America/Santiago America/Sao_Paulo America/St_Johns "
    "Atlantic/Azores Australia/Lord_Howe Australia/Adelaide Africa/Cairo Africa/Casablanca Asia/Beirut Asia/Gaza Asia/Kathmandu "
    "Asia/Tehran Asia/Tokyo Antarctica/Troll Pacific/Apia Pacific/Chatham Pacific/Norfolk"
).split()


@dataclass(frozen=True)
class Field:
    """One field of an expression: how it is written, and what it means."""

    text: str
    values: frozenset[int]

    @property
    def star(self) -> bool:
        return self.text.startswith("*")


def field(low: int, high: int) -> st.SearchStrategy[Field]:
    value = st.integers(low, high)
    every = st.integers(2, max(2, (high - low) // 2)).map(lambda n: Field(f"*/{n}", frozenset(range(low, high + 1, n))))
    several = st.sets(value, min_size=1, max_size=3).map(lambda vs: Field(",".join(map(str, sorted(vs))), frozenset(vs)))
    span = st.tuples(value, value).map(lambda p: Field(f"{min(p)}-{max(p)}", frozenset(range(min(p), max(p) + 1))))
    return st.one_of(st.just(Field("*", frozenset(range(low, high + 1)))), every, several, span)


@dataclass(frozen=True)
class Job:
    minute: Field
    hour: Field
    day: Field
    month: Field
    weekday: Field

    def __str__(self) -> str:
        return f"{self.minute.text} {self.hour.text} {self.day.text} {self.month.text} {self.weekday.text}"

    def on(self, wall: datetime) -> bool:
        """Whether it matches what the clock on the wall shows."""
        day, weekday = wall.day in self.day.values, wall.isoweekday() % 7 in self.weekday.values
        days = day and weekday if self.day.star or self.weekday.star else day or weekday
        return wall.minute in self.minute.values and wall.hour in self.hour.values and wall.month in self.month.values and days


jobs = st.builds(
    Job,
    field(0, 59),
    st.one_of(field(0, 23), st.sets(st.integers(0, 4), min_size=1).map(lambda vs: Field(",".join(map(str, sorted(vs))), frozenset(vs)))),
    st.one_of(st.just(Field("*", frozenset(range(1, 32)))), field(1, 31)),
    st.one_of(st.just(Field("*", frozenset(range(1, 13)))), field(1, 12)),
    st.one_of(st.just(Field("*", frozenset(range(7)))), field(0, 6)),
)


def oracle(job: Job, zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """Debian's cron, woken every minute. A job with a star follows the clock; another one runs at the first pass of its minute, or, when
    the clock jumps over it, right after the jump."""
    found, at = [], start
    before = (start - MINUTE).astimezone(zone).replace(tzinfo=None)
    while at <= end:
        local = at.astimezone(zone)
        wall = local.replace(tzinfo=None)
        if job.minute.star or job.hour.star:
            due = job.on(wall)
        else:
            skipped = before + MINUTE
            jumped = False
            while skipped < wall:
                jumped = jumped or job.on(skipped)
                skipped += MINUTE
            due = jumped or (job.on(wall) and local.fold == 0)
        if due:
            found.append(at)
        before, at = wall, at + MINUTE
    return found


def firings(calendar: Calendar, start: datetime, end: datetime) -> list[datetime]:
    found = []
    at = calendar.after(start - timedelta(seconds=1))
    while at is not None and at <= end:
        found.append(at)
        at = calendar.after(at)
    return found


@cache
def changes(zone: str) -> list[datetime]:
    """When the zone's clock changes, from 2011 to 2037."""
    info, at, found = ZoneInfo(zone), datetime(2011, 1, 1, tzinfo=UTC), []
    while at.year < 2038:
        if at.astimezone(info).utcoffset() != (at + DAY).astimezone(info).utcoffset():
            found.append(at)
        at += DAY
    return found


@st.composite
def windows(draw: st.DrawFn) -> tuple[str, datetime]:
    """A zone and the begin of some days: around a change of its clock, the end of February, of a year, or anywhere."""
    zone = draw(st.sampled_from(ZONES))
    year = draw(st.integers(2011, 2037))
    anywhere = st.integers(0, 27 * 365).map(lambda n: datetime(2011, 1, 1, tzinfo=UTC) + n * DAY)
    edges = st.sampled_from([datetime(year, 12, 31, tzinfo=UTC), datetime(year, 2, 28, tzinfo=UTC)])
    near = st.sampled_from(changes(zone)) if changes(zone) else anywhere
    return zone, draw(st.one_of(near, near, edges, anywhere)) - draw(st.integers(0, 1)) * DAY


def star(low: int, high: int) -> Field:
    return Field("*", frozenset(range(low, high + 1)))


def at_times(minute: str, hour: str) -> Job:
    def one(text: str) -> Field:
        return Field(text, frozenset(map(int, text.split(","))))

    return Job(one(minute), one(hour), star(1, 31), star(1, 12), star(0, 6))


@settings(max_examples=150)
@given(jobs, windows())
@example(at_times("30", "2"), ("Europe/Berlin", datetime(2026, 3, 28, tzinfo=UTC)))
@example(at_times("0,30", "2,3"), ("Europe/Berlin", datetime(2026, 3, 28, tzinfo=UTC)))
@example(at_times("30", "2"), ("Europe/Berlin", datetime(2026, 10, 24, tzinfo=UTC)))
@example(at_times("0", "0"), ("Asia/Beirut", datetime(2025, 3, 29, tzinfo=UTC)))
@example(at_times("15", "2"), ("Australia/Lord_Howe", datetime(2026, 10, 3, tzinfo=UTC)))
@example(at_times("0", "12"), ("Pacific/Apia", datetime(2011, 12, 28, tzinfo=UTC)))
def test_cron_fires_when_debian_would(job: Job, window: tuple[str, datetime]) -> None:
    zone, start = window
    end = start + 2 * DAY
    assert firings(Cron(str(job), zone), start, end) == oracle(job, ZoneInfo(zone), start, end)


@settings(max_examples=50)
@given(jobs, windows(), st.integers(0, 2 * 86_400), st.integers(0, 999_999))
def test_whoever_asks_and_when_gets_the_same_instants(job: Job, window: tuple[str, datetime], seconds: int, micros: int) -> None:
    zone, start = window
    calendar, end = Cron(str(job), zone), start + 3 * DAY
    asked = start + timedelta(seconds=seconds, microseconds=micros)
    assert firings(calendar, asked + timedelta(seconds=1), end) == [at for at in firings(calendar, start, end) if at > asked]


@settings(max_examples=50)
@given(jobs, windows(), st.integers(1, 12))
def test_the_latest_are_the_last_of_all(job: Job, window: tuple[str, datetime], limit: int) -> None:
    zone, start = window
    calendar, end = Cron(str(job), zone), start + 3 * DAY
    assert latest(calendar, start, end, limit) == firings(calendar, start, end)[-limit:]


@given(st.integers(1, 31_536_000), st.datetimes(timezones=st.just(UTC)), st.integers(0, 10**10))
def test_an_interval_keeps_to_its_anchor(seconds: int, anchor: datetime, later: int) -> None:
    anchor = anchor.replace(year=2000 + anchor.year % 37)
    asked = anchor + timedelta(microseconds=later * 1000)
    found = Every(seconds, anchor).after(asked)
    assert found is not None
    assert (found - anchor) % timedelta(seconds=seconds) == timedelta(0)
    assert timedelta(0) < found - asked <= timedelta(seconds=seconds)


def test_an_interval_begins_after_its_anchor() -> None:
    anchor = datetime(2026, 1, 1, tzinfo=UTC)
    assert Every(60, anchor).after(anchor - DAY) == anchor + MINUTE
    assert Every(60, anchor).after(anchor) == anchor + MINUTE


def test_once_is_once() -> None:
    at = datetime(2026, 12, 24, 18, tzinfo=UTC)
    assert Once(at).after(at - MINUTE) == at
    assert Once(at).after(at) is None


def test_a_leap_day_is_waited_for() -> None:
    calendar, at = Cron("0 7 29 2 *", "Europe/Berlin"), datetime(2026, 1, 1, tzinfo=UTC)
    found = []
    for _ in range(3):
        at = calendar.after(at) or at
        found.append((at.year, at.month, at.day, at.hour))
    assert found == [(2028, 2, 29, 6), (2032, 2, 29, 6), (2036, 2, 29, 6)]
