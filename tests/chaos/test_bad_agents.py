"""Agents that swallow what they are told, hang, or do not care: the run ends as it should all the same."""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests.chaos.stack import PATIENCE, Stack
from tests.chaos.test_frozen_worker import BOTH, at_the_sink, frozen

from perdure_operator.local.processes import LEASE_LOST

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.xdist_group(__name__)]


async def test_swallowing_stops_no_suspend(chaos: Stack) -> None:
    await chaos.pool("swallower")
    run = await chaos.create("suspends", "swallower", {"what": "suspends"})
    pod = await at_the_sink(chaos, "suspends")
    await chaos.until(run, "Suspended")
    assert (await pod.wait()).agent == 0
    await chaos.call("POST", f"/runs/{run}/signals/go", "west", key="go")
    view = await chaos.until(run)
    assert (view.state, view.result) == ("Succeeded", {"lingered": True, "go": "west"})
    assert (await chaos.kinds(run)).count("run.leased") == 2


async def test_swallowing_stops_no_cancel(chaos: Stack) -> None:
    """The agent takes the cancel for an error, tries again, and returns as if it had succeeded."""
    await chaos.pool("swallower")
    with chaos.sink.held("cancels") as gate:
        run = await chaos.create("cancels", "swallower", {"what": "cancels"}, terminationGracePeriodSeconds=20)
        pod = await at_the_sink(chaos, "cancels")
        await chaos.call("POST", f"/runs/{run}/cancel")
        gate.set()
        view = await chaos.until(run)
    assert (view.state, view.result) == ("Cancelled", None)
    assert (await pod.wait()).agent == 0


async def test_swallowing_keeps_no_lost_lease(chaos: Stack) -> None:
    await chaos.pool("swallower")
    with chaos.sink.held("loses") as gate:
        run = await chaos.create("loses", "swallower", {"what": "loses"})
        pod = await at_the_sink(chaos, "loses")
        with frozen(pod, BOTH):
            await chaos.event(run, "run.lost")
        assert (await pod.wait()).agent == LEASE_LOST
        chaos.sink.open("loses")
        await chaos.until(run, "Suspended")
        gate.set()
    await chaos.call("POST", f"/runs/{run}/signals/go", "west", key="go")
    assert (await chaos.until(run)).result == {"lingered": True, "go": "west"}


async def test_a_hanging_agent_is_stalled_and_retried_until_it_is_enough(chaos: Stack) -> None:
    await chaos.pool("hangs", grace=0)
    run = await chaos.create("hangs", "hangs", None, stallTimeoutSeconds=1, retry={"maxRetries": 1, "backoffSeconds": 0})
    view = await chaos.until(run)
    assert (view.state, view.reason, view.attempt) == ("Failed", "RetriesExhausted", 2)
    assert "Stalled" in view.message
    assert (await chaos.kinds(run)).count("step.succeeded") == 1


@pytest.mark.parametrize(("agent", "code"), [("deaf", LEASE_LOST), ("hangs", -signal.SIGKILL)])
async def test_who_ignores_a_cancel_is_cancelled_after_the_grace(chaos: Stack, agent: str, code: int) -> None:
    """What has an event loop is ended through it, the rest with its pod."""
    await chaos.pool(agent, grace=0)
    name = f"ignores-{agent}"
    run = await chaos.create(name, agent, {"what": name} if agent == "deaf" else None, terminationGracePeriodSeconds=1)
    await chaos.event(run, "step.succeeded")
    pod = await chaos.holder(name)
    await chaos.call("POST", f"/runs/{run}/cancel")
    assert (await chaos.until(run)).state == "Cancelled"
    async with asyncio.timeout(PATIENCE):
        assert (await pod.wait()).agent == code
