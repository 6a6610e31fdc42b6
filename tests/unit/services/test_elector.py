"""Never do two lead at once, whatever becomes of their questions and the answers; and soon after all is well one does."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from perdure_operator.domain.errors import Unavailable
from perdure_operator.services.elector import RENEW_SECONDS, STEP_DOWN_SECONDS, TERM_SECONDS, Elector

pytestmark = pytest.mark.looptime

SOON = TERM_SECONDS + 2 * RENEW_SECONDS


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Row:
    """``perdure.lead`` and ``resign`` (80_resources.sql) by the loop's clock, and what lies between it and each replica."""

    holder: str = ""
    term: int = 0
    renewed_at: float = -math.inf
    asking: dict[str, float] = field(default_factory=dict)
    answering: dict[str, float] = field(default_factory=dict)
    """Seconds that a question of this replica, and an answer to it, is on its way."""
    down: set[str] = field(default_factory=set)
    questions: int = 0

    async def lead(self, role: str, holder: str, seconds: float) -> int | None:
        self.questions += 1
        await asyncio.sleep(self.asking.get(holder, 0.0))
        if holder in self.down:
            raise Unavailable("the database is away")
        granted = None
        if holder == self.holder or self.renewed_at < now() - seconds:
            self.term += holder != self.holder
            self.holder, self.renewed_at, granted = holder, now(), self.term
        await asyncio.sleep(self.answering.get(holder, 0.0))
        return granted

    async def resign(self, role: str, holder: str) -> None:
        if holder in self.down:
            raise Unavailable("the database is away")
        if holder == self.holder:
            self.renewed_at = -math.inf


@dataclass
class Replicas:
    row: Row = field(default_factory=Row)
    leading: dict[str, int] = field(default_factory=dict)
    terms: list[int] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        async def lead(term: int) -> None:
            assert not self.leading, f"{name} begins while {self.leading} lead"
            assert term > max(self.terms, default=0) or self.terms[-1] == term, "a term came again"
            self.leading[name] = term
            self.terms.append(term)
            try:
                await asyncio.Event().wait()
            finally:
                del self.leading[name]

        self.tasks[name] = asyncio.create_task(Elector(self.row, name, lead).run())

    async def stop(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def leader(self) -> str | None:
        return next(iter(self.leading), None)

    def check(self) -> None:
        for task in self.tasks.values():
            if task.done():
                task.result()


@asynccontextmanager
async def replicas(*names: str) -> AsyncIterator[Replicas]:
    these = Replicas()
    for name in names:
        these.start(name)
    await asyncio.sleep(0.01)
    try:
        yield these
        these.check()
    finally:
        for name in list(these.tasks):
            await these.stop(name)


async def test_one_leads_and_goes_on() -> None:
    async with replicas("a", "b", "c") as these:
        leader = these.leader()
        await asyncio.sleep(1000)
        assert (these.leader(), these.terms) == (leader, [1])
        assert these.row.questions == pytest.approx(3 * 1000 / RENEW_SECONDS, rel=0.01)


async def test_one_that_stops_hands_over_within_a_second() -> None:
    async with replicas("a", "b") as these:
        await these.stop("a")
        await asyncio.sleep(RENEW_SECONDS)
        assert these.leader() == "b"


async def test_one_that_died_is_succeeded() -> None:
    async with replicas("a", "b") as these:
        these.row.down.add("a")  # so that it cannot resign
        await these.stop("a")
        await asyncio.sleep(SOON)
        assert these.leader() == "b"


@pytest.mark.parametrize("silence", ["refused", "unanswered"])
async def test_a_leader_that_hears_nothing_stops_in_time(silence: str) -> None:
    async with replicas("a", "b") as these:
        if silence == "refused":
            these.row.down.add("a")
        else:
            these.row.asking["a"] = 1e6
        await asyncio.sleep(STEP_DOWN_SECONDS - RENEW_SECONDS)
        assert these.leader() == "a", "a short outage is none of its business"
        await asyncio.sleep(RENEW_SECONDS + 0.1)
        assert these.leader() is None
        await asyncio.sleep(SOON - STEP_DOWN_SECONDS)
        assert these.leader() == "b"


async def test_an_outage_for_all_ends_with_the_same_leader() -> None:
    async with replicas("a", "b") as these:
        these.row.down |= {"a", "b"}
        await asyncio.sleep(STEP_DOWN_SECONDS - 1.5 * RENEW_SECONDS)
        these.row.down.clear()
        await asyncio.sleep(10)
        assert (these.leader(), these.terms) == ("a", [1])


async def test_slow_answers_cost_no_lead() -> None:
    async with replicas("a", "b") as these:
        these.row.asking["a"] = these.row.answering["a"] = 1.2
        await asyncio.sleep(100)
        assert (these.leader(), these.terms) == ("a", [1])


async def test_an_answer_that_comes_late_counts_from_the_question() -> None:
    """The row is granted at once and the answer takes almost as long as a leader may do without one, twice."""
    async with replicas("a", "b") as these:
        these.row.answering["a"] = STEP_DOWN_SECONDS - 0.1
        await asyncio.sleep(RENEW_SECONDS)
        these.row.asking["a"] = 1e6
        await asyncio.sleep(3 * SOON)
        assert these.leader() == "b"


async def test_one_whose_row_was_taken_stops_at_once() -> None:
    async with replicas("a") as these:
        these.row.holder, these.row.term, these.row.renewed_at = "another", 2, now()
        await asyncio.sleep(RENEW_SECONDS)
        assert these.leader() is None


async def test_an_error_of_the_work_ends_it() -> None:
    async def break_down(term: int) -> None:
        raise RuntimeError("a bug")

    row = Row()
    with pytest.raises(RuntimeError, match="a bug"):
        await Elector(row, "a", break_down).run()
    assert row.renewed_at == -math.inf, "somebody else may try at once"


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens(seed: int) -> None:
    dice = random.Random(seed)
    names = ("a", "b", "c")
    async with replicas(*names) as these:
        for _ in range(60):
            name = dice.choice(names)
            match dice.randrange(5):
                case 0:
                    these.row.down ^= {name}
                case 1:
                    these.row.asking[name] = dice.choice((0.0, 0.5, 2.0, 4.9, 6.0, 30.0))
                case 2:
                    these.row.answering[name] = dice.choice((0.0, 0.5, 2.0, 4.9, 6.0, 30.0))
                case 3:
                    await these.stop(name)
                    these.start(name)
                case 4:
                    pass
            await asyncio.sleep(dice.uniform(0, 6))
            assert len(these.leading) <= 1
            these.check()
        these.row.down.clear()
        these.row.asking.clear()
        these.row.answering.clear()
        await asyncio.sleep(30 + STEP_DOWN_SECONDS + SOON)
        assert these.leader() is not None, f"seed {seed}: nobody leads"
