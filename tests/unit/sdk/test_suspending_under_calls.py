"""A run does not suspend while one of its calls is under way (W3): the rule of the simulation, and that the SDK never comes against it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from perdure import NotExecuted, Run, agent, gather, tool
from perdure.protocol import ActivityBegin, ActivityDecision, ActivityEnd, Condition, Suspend, WaitBegin
from perdure.sdk.errors import Refused
from perdure.testing import Simulation

WAIT = WaitBegin(key="wait:go#0", on=[Condition(kind="signal", name="go")])


def test_who_suspends_under_a_call_is_refused() -> None:
    @agent
    async def main(run: Run) -> None: ...

    record = Simulation(main).record
    record.lease()
    decision = msgspec.json.decode(record.perform(1, "r1", ActivityBegin(tool="pay", effect="external")), type=ActivityDecision)
    record.perform(1, "r2", WAIT)
    with pytest.raises(Refused, match="pay") as refused:
        record.perform(1, "r3", Suspend(waits=[WAIT.key]))
    assert (refused.value.problem_code, record.state) == ("effect-running", "Running")
    record.perform(1, "r4", ActivityEnd(key=decision.key, token=decision.token or "", state="succeeded"))
    assert record.perform(1, "r3", Suspend(waits=[WAIT.key])) == b'{"status":"suspended"}'


def agent_with(call: Any, how: str) -> Any:
    """Waits for a signal while a call is under way."""

    async def waits(run: Run) -> str:
        return str((await run.wait_signal("go", str)).payload)

    @agent
    async def main(run: Run) -> list[str]:
        if how == "gather":
            return list(await gather(call("a"), waits(run)))
        task = asyncio.create_task(call("a"))
        await asyncio.sleep(0)
        return [await waits(run), await task]

    return main


@pytest.mark.parametrize("how", ["gather", "task"])
def test_a_call_beside_a_wait_ends_before_the_run_suspends(how: str) -> None:
    @tool(effect="external")
    async def slow(x: str) -> str:
        await asyncio.sleep(30)
        return x

    sim = Simulation(agent_with(slow, how)).run()
    assert (sim.suspended, sim.kinds().count("activity.succeeded")) == (True, 1)
    assert sorted(sim.signal("go", "b").run().result) == ["a", "b"]


@pytest.mark.parametrize("how", ["gather", "task"])
def test_a_call_that_is_tried_again_ends_before_the_run_suspends(how: str) -> None:
    tries: list[str] = []

    @tool(effect="external")
    async def stubborn(x: str) -> str:
        tries.append(x)
        if len(tries) < 3:
            raise NotExecuted("no connection")
        return x

    sim = Simulation(agent_with(stubborn, how)).run()
    assert (sim.suspended, len(tries)) == (True, 3)
    assert sorted(sim.signal("go", "b").run().result) == ["a", "b"]


def test_a_thread_that_was_given_up_is_no_call_any_more() -> None:
    """It is known to go on, and nobody knows what comes of it: that must not keep a run from waiting."""
    release = threading.Event()
    begun: list[asyncio.Event] = []

    @tool(effect="external", ignore=("loop",))
    def stuck(x: str, loop: asyncio.AbstractEventLoop) -> str:
        loop.call_soon_threadsafe(begun[0].set)
        release.wait(60)
        return x

    @agent
    async def main(run: Run) -> str:
        begun.append(asyncio.Event())
        task = asyncio.create_task(stuck.aio("a", asyncio.get_running_loop()))
        await begun[0].wait()
        task.cancel()
        return str((await run.wait_signal("go", str)).payload)

    try:
        sim = Simulation(main).run()
        assert sim.suspended
        assert "activity.unknown" in sim.kinds()
    finally:
        release.set()
