"""A warm pod that serves one run after the other, each in a fresh process, whatever the last one did."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import psutil
import pytest
from tests.chaos.matrix import PARTS, ended, kill_part, voyage
from tests.chaos.stack import Stack, seen
from tests.chaos.test_frozen_worker import at_the_sink

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.xdist_group(__name__)]


async def pods_of(chaos: Stack, *runs: str) -> list[str]:
    """The pods of all leases, in order."""
    rows = await chaos.sql(
        "select data ->> 'pod' as pod from perdure.events where run_id = any ($1) and kind = 'run.leased' order by at",
        [UUID(run) for run in runs],
    )
    return [row["pod"] for row in rows]


async def idle_again(chaos: Stack, pod: str) -> None:
    await seen(lambda: chaos.sql("select 1 from perdure.pods where pod_id = $1 and state = 'idle'", UUID(pod)))


async def test_suspended_and_woken_on_the_same_warm_pod(chaos: Stack) -> None:
    """The child takes the pod meanwhile, for there is no other."""
    await chaos.pool("voyage", name="one", warm=1, most=1, fork=True)
    runs = [await voyage(chaos, f"warm-{n}", "one") for n in range(2)]
    rows = await chaos.sql("select run_id from perdure.runs where parent_id = any ($1)", [UUID(run) for run in runs])
    children = [str(row["run_id"]) for row in rows]
    pods = await pods_of(chaos, *runs, *children)
    assert len(pods) == 8
    assert len(set(pods)) == 1
    assert [chaos.sink.parts(f"warm-{n}") for n in range(2)] == [PARTS] * 2


async def test_what_a_run_leaves_behind_is_ended_before_the_next(chaos: Stack) -> None:
    await chaos.pool("litterer", warm=1, most=1, fork=True)
    views = []
    for n in range(3):
        run = await chaos.create(f"litter-{n}", "litterer", {"what": "litter"})
        views.append(await chaos.until(run))
        [pod] = await pods_of(chaos, run)
        await idle_again(chaos, pod)
        left = views[-1].result["left"]
        assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
        assert not Path(views[-1].result["tmp"]).exists()  # noqa: ASYNC240
    assert len({view.result["parent"] for view in views}) == 1
    assert len({view.result["pid"] for view in views}) == 3


async def test_a_killed_child_costs_an_attempt_and_not_the_pod(chaos: Stack) -> None:
    await chaos.pool("lingerer", name="alone", warm=1, most=1, fork=True)
    with chaos.sink.held("killed"):
        run = await chaos.create("killed", "alone", {"what": "killed"})
        pod = await at_the_sink(chaos, "killed")
        await kill_part(pod, "agent", stack=chaos, name="killed")
        chaos.sink.open("killed")
        view = await chaos.until(run)
    assert (view.state, view.attempt) == ("Succeeded", 2)
    assert await pods_of(chaos, run) == [str(pod.pod_id)] * 2
    assert pod.agent.code is None


@pytest.mark.parametrize("part", ["agent", "sidecar"])
async def test_a_killed_half_of_the_pod_takes_nothing_along(chaos: Stack, part: str) -> None:
    """The parent process, or the sidecar: the run goes on in another pod, and of this one nothing is left, long before the grace period
    is over. (Of a parent that was killed the sidecar tells; of a sidecar that was, those who see the pod's processes.)"""
    name = f"half-{part}"
    await chaos.pool("lingerer", name="forked", warm=1, fork=True, grace=600)
    with chaos.sink.held(name):
        run = await chaos.create(name, "forked", {"what": name})
        pod = await at_the_sink(chaos, name)
        [child] = psutil.Process(pod.agent.pid).children()
        getattr(pod, part).send(9)
        if part == "sidecar":
            await chaos.event(run, "run.lost")
            assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        chaos.sink.open(name)
        view = await chaos.until(run)
    assert view.state == "Succeeded"
    assert len(set(await pods_of(chaos, run))) == 2
    lost = [event["data"]["reason"] for event in await chaos.events(run) if event["kind"] == "run.lost"]
    assert lost == (["SidecarExited"] if part == "sidecar" else []), "its processes were seen to end; no lease had to"
    await pod.wait()
    await ended(child)
