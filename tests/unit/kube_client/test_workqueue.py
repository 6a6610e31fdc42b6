"""The work queue, under any order of additions, rounds and failures, on a clock that only moves when nothing else happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.testing.clock import Clock
from perdure.testing.loop import VirtualLoop
from perdure_operator.kube.errors import KubeInvalid, KubeUnavailable
from perdure_operator.kube.workqueue import Backoff, WorkQueue


def simulate(main: Coroutine[Any, Any, None]) -> None:
    """Runs ``main`` on virtual time."""
    clock = Clock()
    loop = VirtualLoop(clock, lambda: 0)
    asyncio.set_event_loop(loop)
    try:
        task = loop.create_task(main)
        while not task.done():
            loop.turn()
            assert task.done() or loop.idle_until is not None, "everybody waits for nothing"
            if loop.idle_until is not None:
                clock.move_to(loop.idle_until)
        task.result()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class Bench:
    """A queue whose rounds take as long and fail as often as told, and a record of what they did."""

    def __init__(
        self, *, workers: int = 2, takes: float = 1.0, fails: int = 0, error: Exception | None = None, backoff: Backoff | None = None
    ) -> None:
        self.rounds: list[tuple[str, float, float]] = []
        self.at_work: Counter[str] = Counter()
        self.takes, self.fails, self.error = takes, fails, error or KubeUnavailable("down")
        self.again: float | None = None
        self.queue: WorkQueue[str] = WorkQueue("test", self.work, workers=workers, backoff=backoff or Backoff(), dice=random.Random(1))

    async def work(self, key: str) -> float | None:
        assert not self.at_work[key], "two workers on one key"
        self.at_work[key] += 1
        begun = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(self.takes)
        finally:
            self.at_work[key] -= 1
            self.rounds.append((key, begun, asyncio.get_running_loop().time()))
        if self.fails > 0:
            self.fails -= 1
            raise self.error
        return self.again

    def begun(self, key: str) -> list[float]:
        return [begun for name, begun, _ in self.rounds if name == key]


STEPS = st.lists(st.tuples(st.sampled_from(["add", "later"]), st.sampled_from("abc"), st.floats(0, 3, allow_nan=False)), max_size=30)


@given(STEPS, st.integers(1, 3), st.integers(0, 5))
def test_every_addition_is_seen_by_a_round_that_begins_after_it(steps: list[tuple[str, str, float]], workers: int, fails: int) -> None:
    bench = Bench(workers=workers, fails=fails)
    wishes: list[tuple[str, float]] = []

    async def main() -> None:
        running = asyncio.create_task(bench.queue.run())
        now = asyncio.get_running_loop().time
        for what, key, seconds in steps:
            if what == "add":
                wishes.append((key, now()))
                bench.queue.add(key)
                await asyncio.sleep(seconds / 2)
            else:
                wishes.append((key, now()))
                bench.queue.requeue_after(key, seconds)
        await asyncio.sleep(1000)
        await bench.queue.settled()
        bench.queue.stop()
        await running

    simulate(main())
    for key, when in wishes:
        assert any(begun >= when for begun in bench.begun(key)), f"{key} was added at {when}, rounds: {bench.rounds}"
    assert len(bench.rounds) <= len(wishes) + fails, "a round that nobody asked for"


def test_a_key_added_many_times_while_worked_on_gets_one_more_round() -> None:
    bench = Bench()

    async def main() -> None:
        running = asyncio.create_task(bench.queue.run())
        bench.queue.add("a")
        await asyncio.sleep(0.5)
        for _ in range(5):
            bench.queue.add("a")
        await bench.queue.settled()
        bench.queue.stop()
        await running

    simulate(main())
    assert bench.begun("a") == [0.0, 1.0]


def test_of_two_later_wishes_the_earliest_holds() -> None:
    bench = Bench()

    async def main() -> None:
        running = asyncio.create_task(bench.queue.run())
        for seconds in (30, 10, 20):
            bench.queue.requeue_after("a", seconds)
        await asyncio.sleep(100)
        bench.queue.stop()
        await running

    simulate(main())
    assert bench.begun("a") == [10.0]


def test_a_round_says_when_it_wants_the_key_again() -> None:
    bench = Bench(takes=0)
    bench.again = 60.0

    async def main() -> None:
        running = asyncio.create_task(bench.queue.run())
        bench.queue.add("a")
        await asyncio.sleep(150)
        bench.queue.stop()
        await running

    simulate(main())
    assert bench.begun("a") == [0.0, 60.0, 120.0]


def gaps(error: Exception, fails: int = 6) -> list[float]:
    """Seconds between the rounds of a key that fails ``fails`` times."""
    bench = Bench(takes=0, fails=fails, error=error, backoff=Backoff(first=1.0, longest=8.0))

    async def main() -> None:
        running = asyncio.create_task(bench.queue.run())
        bench.queue.add("a")
        await asyncio.sleep(1000)
        assert bench.queue.failures("a") == 0
        bench.queue.stop()
        await running

    simulate(main())
    begun = bench.begun("a")
    return [after - before for before, after in pairwise(begun)]


def test_errors_back_off_with_jitter_up_to_a_limit() -> None:
    for error in (KubeUnavailable("down"), RuntimeError("a bug")):
        found = gaps(error)
        assert len(found) == 6
        for gap, whole in zip(found, (1, 2, 4, 8, 8, 8), strict=True):
            assert whole / 2 <= gap <= whole
        assert len(set(found)) == 6


def test_an_error_that_no_retry_helps_waits_longest() -> None:
    assert all(4 <= gap <= 8 for gap in gaps(KubeInvalid("spec.x: unknown")))


def test_what_the_server_asked_for_is_waited() -> None:
    assert all(gap >= 20 for gap in gaps(KubeUnavailable("slow down", retry_after=20.0)))


def test_stop_lets_rounds_finish_and_begins_none() -> None:
    bench = Bench(workers=1)

    async def main() -> None:
        running = asyncio.create_task(bench.queue.run())
        for key in "abc":
            bench.queue.add(key)
        bench.queue.requeue_after("d", 0.7)
        await asyncio.sleep(0.5)
        bench.queue.stop()
        bench.queue.add("e")
        await running
        await asyncio.sleep(10)

    simulate(main())
    assert bench.rounds == [("a", 0.0, 1.0)]


def test_cancelling_the_run_cancels_the_rounds() -> None:
    bench = Bench(takes=100)

    async def main() -> None:
        running = asyncio.create_task(bench.queue.run())
        bench.queue.add("a")
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    simulate(main())
    assert bench.rounds == [("a", 0.0, 1.0)]
