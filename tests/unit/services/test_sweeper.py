"""What the sweep did not finish it does the next time: nobody sleeps for ever because many were missed, or because the store was away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure_operator.domain.errors import Unavailable
from perdure_operator.services.sweeper import FIRST_WITHIN_SECONDS, INTERVAL_SECONDS, LIMIT, MARGIN_SECONDS, Sweeper


class World:
    """A store in which runs sleep over their wakes, and a clock that moves by hand."""

    def __init__(self) -> None:
        self.time = 10_000.0
        self.missed: dict[UUID, float] = {}
        self.stuck: set[UUID] = set()
        self.away = False
        self.looks: list[float] = []
        store: Any = self  # has the one method that is called
        self.sweeper = Sweeper(store, self.settle, now=lambda: self.time)

    def miss(self, count: int) -> list[UUID]:
        runs = [uuid4() for _ in range(count)]
        self.missed |= dict.fromkeys(runs, self.time)
        return runs

    async def missed_wakes(
        self, older_seconds: float, within_seconds: float, *, besides: Sequence[UUID] = (), limit: int = 100
    ) -> list[UUID]:
        self.looks.append(within_seconds)
        first, last = self.time - within_seconds, self.time - older_seconds
        return [run for run, at in self.missed.items() if first <= at <= last and run not in besides][:limit]

    async def settle(self, runs: Sequence[UUID]) -> None:
        if self.away:
            raise Unavailable("the store is away")
        for run in set(runs) - self.stuck:
            del self.missed[run]
        self.time += 20.0

    async def sweep_after(self, seconds: float = INTERVAL_SECONDS) -> None:
        self.time += seconds
        await self.sweeper.sweep()


async def test_a_sweep_wakes_all_that_were_missed() -> None:
    world = World()
    await world.sweep_after()
    world.miss(5 * LIMIT)
    await world.sweep_after()
    assert world.missed == {}


async def test_what_fell_asleep_before_an_outage_is_woken_after_it() -> None:
    world = World()
    await world.sweep_after()
    world.miss(LIMIT + 1)
    world.away = True
    for _ in range(20):
        with pytest.raises(Unavailable):
            await world.sweep_after()
    world.away = False
    await world.sweep_after()
    assert world.missed == {}


async def test_a_first_sweep_that_fails_is_still_the_first() -> None:
    world = World()
    world.time -= FIRST_WITHIN_SECONDS
    world.miss(1)
    world.time += FIRST_WITHIN_SECONDS
    world.away = True
    with pytest.raises(Unavailable):
        await world.sweep_after(0)
    world.away = False
    await world.sweep_after()
    assert world.missed == {}


async def test_runs_that_cannot_be_settled_do_not_stop_the_others_nor_the_sweep() -> None:
    world = World()
    world.stuck = set(world.miss(LIMIT))
    world.miss(LIMIT)
    await world.sweep_after()
    assert world.missed.keys() == world.stuck


async def test_a_sweep_reads_what_is_new_and_not_all_that_sleeps() -> None:
    world = World()
    for _ in range(3):
        await world.sweep_after()
    assert world.looks[1:] == [INTERVAL_SECONDS + MARGIN_SECONDS] * 2
