"""``gather``: branches that a restart can tell apart, and what a failure does to the others."""

from __future__ import annotations

import asyncio

import pytest

from perdure import ConcurrentUnnamed, Run, StepFailed, agent, gather, step
from perdure.testing import Simulation


async def test_outside_a_run_it_is_asyncio_gather() -> None:
    async def one(n: int) -> int:
        return n

    assert await gather(one(1), one(2)) == (1, 2)


def test_branches_may_not_share_an_unnamed_operation_even_one_after_the_other() -> None:
    @step
    async def save(n: int) -> int:
        return n

    @agent
    async def main(run: Run) -> None:
        async def branch(n: int) -> None:
            await asyncio.sleep(n * 10)
            await save(n)

        await gather(branch(0), branch(1))

    sim = Simulation(main, max_retries=0).run()
    assert sim.error is not None
    assert sim.error.type == ConcurrentUnnamed.code


def test_one_gather_after_the_other_is_fine() -> None:
    @step
    async def save(n: int) -> int:
        return n

    @agent
    async def main(run: Run) -> int:
        async def branch(n: int) -> int:
            return await save(n) + await save(n)

        return sum([*await gather(branch(1)), *await gather(branch(10))])

    assert Simulation(main).run().result == 22


def test_a_failure_lets_running_ones_finish_and_ends_waits() -> None:
    ended: list[str] = []

    @step
    async def work(n: int) -> int:
        await asyncio.sleep(30)
        ended.append("work")
        return n

    @step
    async def broken() -> None:
        await asyncio.sleep(10)
        raise ValueError("bad")

    @agent
    async def main(run: Run) -> str:
        async def waits() -> None:
            try:
                await run.wait_signal("never")
            finally:
                ended.append("wait")

        async def works() -> None:
            await work(1)
            await work.options(name="not begun")(2)

        try:
            await gather(works(), broken(), waits())
        except StepFailed as error:
            return f"{error.error.type} {ended}"
        return "?"

    sim = Simulation(main).run()
    assert sim.result == "ValueError ['wait', 'work']"
    assert "step:work#0" in sim.record.journal
    assert not [key for key in sim.record.journal if "not begun" in key]


def test_failures_as_results() -> None:
    @step
    async def broken() -> None:
        raise ValueError("bad")

    @step
    async def fine() -> int:
        await asyncio.sleep(5)
        return 1

    @agent
    async def main(run: Run) -> list[str]:
        return [type(outcome).__name__ for outcome in await gather(broken(), fine(), return_exceptions=True)]

    assert Simulation(main).run().result == ["StepFailed", "int"]


def test_the_first_failure_by_position_is_raised() -> None:
    @agent
    async def main(run: Run) -> str:
        async def fail(after: float, name: str) -> None:
            await asyncio.sleep(after)
            raise KeyError(name)

        try:
            await gather(fail(5, "slow"), fail(1, "quick"))
        except KeyError as error:
            return str(error)
        return "?"

    assert Simulation(main).run().result == "'slow'"


@pytest.mark.parametrize("swallow", [True, False])
def test_cancelling_a_gather_cancels_its_branches(swallow: bool) -> None:
    ended: list[int] = []

    @agent
    async def main(run: Run) -> str:
        async def branch(n: int) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                ended.append(n)

        try:
            async with asyncio.timeout(5):
                await gather(branch(1), branch(2))
        except TimeoutError:
            return f"timeout {ended}"
        return "?"

    assert Simulation(main).run().result == "timeout [1, 2]"


def test_nested() -> None:
    @step
    async def leaf(n: int) -> int:
        return n

    @agent
    async def main(run: Run) -> int:
        async def inner(base: int) -> int:
            return sum(await gather(*(leaf.options(key=str(base + n))(base + n) for n in range(3))))

        return sum(await gather(inner(0), inner(10)))

    assert Simulation(main).run().result == 3 + 33


def test_nothing_to_gather() -> None:
    @agent
    async def main(run: Run) -> int:
        return len(await gather())

    assert Simulation(main).run().result == 0
