"""Agents that keep much: their runs wake, every value comes back, and no gateway grows with what it does not send."""

from __future__ import annotations

import pytest
from tests.chaos.stack import Stack
from tests.integration.test_large_runs import MB, Peak

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.xdist_group(__name__)]


def peaks(chaos: Stack) -> list[Peak]:
    return [Peak(gateway.pid) for gateway in chaos.gateways.values()]


@pytest.mark.parametrize(
    ("kind", "steps", "size", "fork"),
    [("noise", 38, 1_900_000, False), ("noise", 38, 1_900_000, True), ("zeros", 80, 1_990_000, False)],
    ids=["more than a frame", "more than a frame, forked", "a bomb"],
)
async def test_a_run_with_a_large_journal_wakes_and_redoes_nothing(chaos: Stack, kind: str, steps: int, size: int, fork: bool) -> None:
    pool = f"hoarder-{fork}".lower()
    await chaos.pool("hoarder", name=pool, fork=fork)
    input = {"kind": kind, "steps": steps, "size": size}
    run = await chaos.create(f"{pool}-{kind}", pool, input)
    await chaos.until(run, "Suspended")
    watched = peaks(chaos)
    await chaos.call("POST", f"/runs/{run}/signals/go", "x" * 500_000, key="go")
    view = await chaos.until(run)
    assert (view.state, view.message) == ("Succeeded", "")
    assert view.result == {"intact": steps, "trail": steps, "go": 500_000}
    kinds = await chaos.kinds(run)
    assert (kinds.count("run.leased"), kinds.count("run.lost"), kinds.count("step.succeeded")) == (2, 0, steps)
    assert max(peak.grown() for peak in watched) < 150 * MB


async def test_a_child_that_returns_much_is_joined_over_a_wake(chaos: Stack) -> None:
    await chaos.pool("hoarder", name="parents")
    run = await chaos.create("parents", "parents", {"kind": "noise", "steps": 0, "size": 1_900_000, "children": 5})
    view = await chaos.until(run)
    assert (view.state, view.result) == ("Succeeded", {"joined": 5})


async def test_an_agent_that_writes_more_than_a_run_may_fails_with_the_figures(chaos: Stack) -> None:
    await chaos.pool("hoarder", name="limited")
    for gateway in chaos.gateways.values():
        gateway.env["PERDURE_RUN_BYTES"] = "7000000"
        await chaos.restart_gateway(gateway)
    try:
        run = await chaos.create("limited", "limited", {"kind": "noise", "steps": 10, "size": 1_900_000})
        view = await chaos.until(run)
    finally:
        for gateway in chaos.gateways.values():
            del gateway.env["PERDURE_RUN_BYTES"]
            await chaos.restart_gateway(gateway)
    assert (view.state, view.attempt) == ("Failed", 1)
    assert "the run has written 6000" in view.message
    assert "it may write 7000000" in view.message
    assert "receipts are taken as well" in view.message
    kinds = await chaos.kinds(run)
    assert (kinds.count("step.succeeded"), kinds.count("run.nearly_full")) == (3, 1)
