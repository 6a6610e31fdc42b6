"""Children: V1, V2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from perdure import ChildFailed, InputChanged, Run, SyncRun, WaitTimedOut, agent, gather
from perdure.testing import Simulation


@dataclass
class Facts:
    n: int


@agent
async def facts(run: Run, input: Facts) -> Facts:
    await run.sleep(10 * input.n)
    if input.n == 3:
        raise ValueError("three")
    return Facts(input.n * 2)


def test_a_child_and_its_typed_result() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        child = await run.spawn(pool="facts", input=Facts(1), result=Facts, objective="count")
        done = await child.join()
        assert isinstance(done.result, Facts)
        return [done.result.n, done.status, done.output_ref, done.succeeded, child.id]

    sim = Simulation(main, agents={"facts": facts}).run()
    assert sim.result == [2, "Succeeded", "run:run.1", True, "run.1"]
    assert sim.runs["run.1"].objective == "count"
    assert sim.record.suspensions == 1


def test_spawn_and_join_in_one_go_beside_others() -> None:
    @agent
    async def main(run: Run) -> list[int]:
        one, two = await gather(
            run.spawn(pool="facts", input=Facts(1), result=Facts, key="1").join(),
            run.spawn(pool="facts", input=Facts(2), result=Facts, key="2").join(),
        )
        return [one.result.n, two.result.n]

    sim = Simulation(main, agents={"facts": facts}).run()
    assert (sim.result, sim.clock.now) == ([2, 4], 20)


@pytest.mark.parametrize(
    ("mode", "ended", "at"),
    [("all", ["Succeeded", "Succeeded", "Failed"], 30), ("any", ["Succeeded"], 10), ("first_failure", ["Failed"], 30)],
)
def test_join_modes(mode: Any, ended: list[str], at: float) -> None:
    @agent
    async def main(run: Run) -> list[str]:
        children = [await run.spawn(pool="facts", input=Facts(n)) for n in (1, 2, 3)]
        return [done.status for done in await run.join(children, mode=mode)]

    sim = Simulation(main, agents={"facts": facts}, max_retries=0).run()
    assert sim.result == ended
    assert sim.clock.now == at


def test_the_result_of_a_failed_child_is_an_error() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        done = await run.spawn(pool="facts", input=Facts(3)).join()
        try:
            return [done.result]
        except ChildFailed as error:
            return [error.status, error.error.type if error.error else None, done.output_ref]

    assert Simulation(main, agents={"facts": facts}, max_retries=0).run().result == ["Failed", "ValueError", None]


def test_join_with_a_timeout() -> None:
    @agent
    async def main(run: Run) -> str:
        child = await run.spawn(pool="facts", input=Facts(5))
        try:
            await child.join(timeout=20)
        except WaitTimedOut:
            return (await child.join(key="again")).status
        return "?"

    sim = Simulation(main, agents={"facts": facts}).run()
    assert (sim.result, sim.clock.now) == ("Succeeded", 50)


def test_a_child_is_started_once() -> None:
    @agent
    async def main(run: Run) -> int:
        child = await run.spawn(pool="facts", input=Facts(1), result=Facts)
        await run.wait_signal("go")
        return (await child.join()).result.n

    sim = Simulation(main, agents={"facts": facts}).signal("go", after=60).kill_at(1, "after").run()
    assert sim.result == 2
    assert len(sim.runs) == 2


def test_another_input_under_the_same_identity_is_refused() -> None:
    inputs = iter([1, 2])

    @agent
    async def main(run: Run) -> None:
        await run.spawn(pool="facts", input=Facts(next(inputs)))
        await run.wait_signal("go")

    sim = Simulation(main, agents={"facts": facts}, max_retries=0).signal("go", after=1).run()
    assert sim.error is not None
    assert sim.error.type == InputChanged.code


def test_an_unknown_pool_is_said() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.spawn(pool="nobody")

    sim = Simulation(main, max_retries=0).run()
    assert sim.error is not None
    assert "nobody" in sim.error.message


def test_the_end_of_the_parent_cancels_children_that_are_not_detached() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.spawn(pool="facts", input=Facts(50), key="a")
        await run.spawn(pool="facts", input=Facts(60), policy="detach", key="b")

    sim = Simulation(main, agents={"facts": facts}).run()
    assert sim.runs["run.1"].state == "Cancelled"
    assert sim.runs["run.2"].state != "Cancelled"


def test_a_synchronous_parent() -> None:
    @agent
    def main(run: SyncRun) -> list[int]:
        children = [run.spawn(pool="facts", input=Facts(n), result=Facts) for n in (1, 2)]
        return [done.result.n for done in run.join(children)]

    assert Simulation(main, agents={"facts": facts}).run().result == [2, 4]


def test_children_by_the_hundred() -> None:
    @agent
    async def main(run: Run) -> int:
        children = [await run.spawn(pool="facts", input=Facts(1), result=Facts, key=str(n)) for n in range(100)]
        return sum(done.result.n for done in await run.join(children))

    assert Simulation(main, agents={"facts": facts}).run().result == 200
