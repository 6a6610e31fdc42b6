"""A permission to call that was slept over: the lease may have gone to another meanwhile, so the function is not called (E5)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, Run, agent, tool
from perdure.sdk import activities
from perdure.testing import Simulation

ASKED, HEARD, BEGUN = 1, 2, 5
"""Looks at the clock in one call: when the permission is asked for; when it is there; and, the last one, in the thread of the function."""


class Clock:
    """Jumps at one look, as after a time in which the process stood still."""

    def __init__(self, look: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._looks, self._look, self._meanwhile, self._ahead = itertools.count(1), look, meanwhile, 0.0

    def __call__(self) -> float:
        if next(self._looks) == self._look:
            self._ahead += 60
            self._meanwhile()
        return self._ahead


def paying(how: str) -> tuple[Agent[..., Any], list[str]]:
    """An agent with one call, and the executions of its function."""
    executed: list[str] = []

    @tool(effect="external")
    async def in_the_loop(key: str = "") -> str:
        executed.append(key)
        return "paid"

    @tool(effect="external")
    def in_a_thread(key: str = "") -> str:
        executed.append(key)
        return "paid"

    @agent
    async def main(run: Run) -> str:
        return await (in_a_thread.aio() if how == "thread" else in_the_loop())

    return main, executed


def test_a_process_that_stood_still_before_its_thread_began_does_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    main, executed = paying("thread")
    monkeypatch.setattr(activities, "_clock", Clock(BEGUN))
    sim = Simulation(main).run()
    assert (sim.result, len(executed)) == ("paid", 1)
    assert [kind for kind in sim.kinds() if kind.startswith("activity.")] == [
        "activity.begin", "activity.failed", "activity.begin", "activity.succeeded",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["loop", "thread"])
def test_a_permission_that_came_late_is_good_while_the_lease_is(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    main, executed = paying(how)
    monkeypatch.setattr(activities, "_clock", Clock(HEARD))
    sim = Simulation(main).run()
    assert (sim.result, len(executed)) == ("paid", 1)
    assert sim.kinds().count("activity.begin") == 1
    assert "agent.GrantHeardLate" in sim.kinds()


@pytest.mark.parametrize("how", ["loop", "thread"])
def test_a_permission_that_came_late_is_over_with_the_lease(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    main, executed = paying(how)
    sim = Simulation(main)
    monkeypatch.setattr(activities, "_clock", Clock(HEARD, lambda: sim.record.lost(gone=False)))
    sim.run()
    assert (sim.result, len(executed)) == ("paid", 1), "by the attempt that has the lease"
    [failed] = [event for event in sim.record.log if event.kind == "activity.failed"]
    assert failed.data["evidence"], "that nothing was done answers the question: no person is asked"
    assert not sim.record.waits.decided
