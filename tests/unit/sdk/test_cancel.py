"""Cancel: cooperative, and nothing that an agent swallows can turn it into something else (L7)."""

from __future__ import annotations

import asyncio

import pytest

from perdure import Run, RunCancelled, SyncRun, agent, gather, step, tool
from perdure.testing import Simulation


def test_a_cancel_ends_a_suspended_run_without_its_code() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.wait_signal("never")

    sim = Simulation(main).run()
    assert sim.cancel().run().state == "Cancelled"
    assert sim.record.epoch == 1


def test_a_wait_that_holds_the_pod_is_ended() -> None:
    seen: list[str] = []

    @agent
    async def main(run: Run) -> None:
        try:
            await run.wait_signal("never", hold=100)
        except RunCancelled:
            seen.append("told")
            raise

    sim = Simulation(main).cancel(after=10).run()
    assert (sim.state, seen, sim.clock.now) == ("Cancelled", ["told"], 10)


def test_a_running_step_is_let_finish_and_the_next_operation_is_refused() -> None:
    done: list[int] = []

    @step
    async def work(n: int) -> None:
        await asyncio.sleep(10)
        done.append(n)

    @agent
    async def main(run: Run) -> None:
        for n in range(5):
            await work(n)

    sim = Simulation(main).cancel(after=15).run()
    assert (sim.state, done, sim.clock.now) == ("Cancelled", [0, 1], 20)
    assert list(sim.record.journal) == ["step:work#0", "step:work#1"]


def test_check_for_long_computations() -> None:
    @agent
    async def main(run: Run) -> int:
        for _ in range(100):
            await asyncio.sleep(1)
            assert not run.cancel_requested
            run.check()
        return 1

    sim = Simulation(main).cancel(after=10.5).run()
    assert (sim.state, sim.clock.now) == ("Cancelled", 11)


@pytest.mark.parametrize("swallowing", ["around the tool", "around the task", "around all"])
def test_a_swallowed_cancel_still_cancels(swallowing: str) -> None:
    """What a framework does: text for the model instead of an exception, a failed task ignored, a result in any case."""

    @tool(effect="local")
    async def search() -> str:
        return "found"

    @agent
    async def main(run: Run) -> str:
        await run.wait_signal("go", hold=100)
        return await search()

    async def framework(run: Run) -> str:
        async def guarded() -> str:
            try:
                await run.wait_signal("go", hold=100)
                return await search()
            except Exception:  # noqa: BLE001
                return "the tool failed"

        if swallowing == "around the tool":
            return await guarded()
        task = asyncio.create_task(guarded())
        try:
            return await task
        except BaseException:
            if swallowing == "around the task":
                raise
            return "whatever happened"

    sim = Simulation(agent(framework)).cancel(after=5).run()
    assert sim.state == "Cancelled"
    assert sim.clock.now == 5


def test_a_cancel_that_the_process_has_not_heard_of_refuses_the_success() -> None:
    @agent
    async def main(run: Run) -> int:
        return 1

    sim = Simulation(main)
    sim.record.cancel_requested = True
    heard = sim.record.lease

    def lease() -> bytes:
        return heard().replace(b'"cancelRequested":true,', b"")

    sim.record.lease = lease  # type: ignore[method-assign]
    assert sim.run().state == "Cancelled"


def test_backoff_of_a_step_ends_at_once() -> None:
    @step(retries=10, backoff=1000, max_backoff=1000)
    async def flaky() -> None:
        raise ConnectionError

    @agent
    async def main(run: Run) -> None:
        await flaky()

    sim = Simulation(main).cancel(after=7).run()
    assert (sim.state, sim.clock.now) == ("Cancelled", 7)


def test_every_branch_of_a_gather_is_told() -> None:
    told: list[int] = []

    @agent
    async def main(run: Run) -> None:
        async def branch(n: int) -> None:
            try:
                await run.wait_signal(f"never{n}", hold=100)
            except RunCancelled:
                told.append(n)
                raise

        await gather(branch(1), branch(2))

    sim = Simulation(main).cancel(after=5).run()
    assert (sim.state, told) == ("Cancelled", [1, 2])


def test_a_task_group_wraps_it_and_it_is_a_cancel_all_the_same() -> None:
    @agent
    async def main(run: Run) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(run.wait_signal("a", hold=100))
            group.create_task(run.wait_signal("b", hold=100))

    assert Simulation(main).cancel(after=5).run().state == "Cancelled"


def test_a_synchronous_agent_is_told() -> None:
    told: list[str] = []

    @agent
    def main(run: SyncRun) -> None:
        try:
            run.wait_signal("never", hold=100)
        except RunCancelled:
            told.append("told")
            raise

    sim = Simulation(main).cancel(after=5).run()
    assert (sim.state, told) == ("Cancelled", ["told"])


def test_the_receipt_of_a_tool_that_runs_gets_out() -> None:
    @tool(effect="external")
    async def send() -> str:
        await asyncio.sleep(10)
        return "sent"

    @agent
    async def main(run: Run) -> None:
        await send()
        await run.sleep(1)

    sim = Simulation(main).cancel(after=5).run()
    assert sim.state == "Cancelled"
    assert [entry.state for entry in sim.record.ledger.entries.values()] == ["SUCCEEDED"]
