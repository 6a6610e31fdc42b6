"""A worker that stands still for longer than its lease, and comes back: its word is no longer state, only evidence."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from tests.chaos.stack import LEASE_SECONDS, PATIENCE, Stack

from perdure_operator.local import fleet
from perdure_operator.local.processes import LEASE_LOST, WorkerPod

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.xdist_group(__name__)]

BOTH, AGENT, SIDECAR = ("agent", "sidecar"), ("agent",), ("sidecar",)


@contextmanager
def frozen(pod: WorkerPod, parts: tuple[str, ...]) -> Iterator[None]:
    processes = [getattr(pod, part) for part in parts]
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            if process.code is None:
                os.kill(process.pid, signal.SIGCONT)


async def at_the_sink(chaos: Stack, name: str) -> WorkerPod:
    """The pod that holds the run and whose call has its effect by now, but no answer."""
    async with asyncio.timeout(PATIENCE):
        await chaos.sink.arrived[name].wait()
        return await chaos.holder(name)


async def at_the_door(chaos: Stack, name: str) -> WorkerPod:
    """The pod that holds the run and has begun its call, and not made it."""
    async with asyncio.timeout(PATIENCE):
        await chaos.sink.at_the_door[name].wait()
        return await chaos.holder(name)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ends a worker that stands still: as on a node that is cut off."""
    monkeypatch.setattr(fleet, "LOST_SECONDS", 1e9)
    monkeypatch.setattr(fleet, "RETIRE_SECONDS", 1e9)


AGENTS = ["enterer", "async_enterer", "enterer.sh"]


# Nothing shows that a shell stands still while its sidecar beats on: it has no event loop.
@pytest.mark.parametrize(("agent", "parts"), [*((agent, BOTH) for agent in AGENTS), *((agent, AGENT) for agent in AGENTS[:2])])
async def test_one_that_stood_still_before_its_call_never_makes_it_too(chaos: Stack, agent: str, parts: tuple[str, ...]) -> None:
    """The next attempt hears "not found" and goes on only when the first has been killed: that is the proof."""
    name = f"before-{agent.replace('_', '-').replace('.', '-')}-{'-'.join(parts)}"
    await chaos.pool(agent, name=name)
    run = await chaos.create(name, name, {"what": name}, stallTimeoutSeconds=1)
    pod = await at_the_door(chaos, name)
    with frozen(pod, parts):
        await chaos.event(run, "run.retrying" if parts == AGENT else "run.lost")
        chaos.sink.doors[name].set()
        view = await chaos.until(run)
    await pod.wait()
    assert (view.state, view.result, chaos.sink.parts(name)) == ("Succeeded", "ref-enter", ["enter"])
    assert "activity.duplicate_effect" not in await chaos.kinds(run)


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.usefixtures("unwatched")
async def test_without_proof_a_person_is_asked(chaos: Stack, agent: str) -> None:
    name = f"unproven-{agent.replace('_', '-').replace('.', '-')}"
    await chaos.pool(agent, name=name)
    run = await chaos.create(name, name, {"what": name})
    pod = await at_the_door(chaos, name)
    with frozen(pod, BOTH):
        await chaos.event(run, "run.lost")
        # A long time passes, in which nobody hears of the first worker.
        await chaos.sql("update perdure.executors set lost_at = lost_at - interval '1 hour' where run_id = $1", UUID(run))
        await chaos.sql("update perdure.ledger set safe_at = safe_at - interval '1 hour' where run_id = $1", UUID(run))
        await chaos.event(run, "run.suspended")
        assert chaos.sink.parts(name) == []
        [entry] = await chaos.sql("select key, attempts, state from perdure.ledger where run_id = $1", UUID(run))
        assert entry["state"] == "UNKNOWN"
        chaos.sink.doors[name].set()
    # It thaws, and does or does not do what it was about to do. Then the person looks.
    await pod.wait()
    happened = chaos.sink.parts(name) == ["enter"]
    answer = {"happened": happened, "response": "ref-enter"} if happened else {"happened": False}
    await chaos.call("POST", f"/runs/{run}/signals/effect:{entry['key']}:{entry['attempts']}", answer, key=name)
    view = await chaos.until(run)
    assert (view.state, view.result, chaos.sink.parts(name)) == ("Succeeded", "ref-enter", ["enter"])


@pytest.mark.parametrize("parts", [BOTH, SIDECAR], ids=["both", "sidecar"])
@pytest.mark.usefixtures("unwatched")
async def test_a_late_receipt_is_evidence(chaos: Stack, parts: tuple[str, ...]) -> None:
    name = f"late-{'-'.join(parts)}"
    await chaos.pool("payer")
    with chaos.sink.held(name) as gate:
        run = await chaos.create(name, "payer", {"what": name})
        pod = await at_the_sink(chaos, name)
        with frozen(pod, parts):
            await chaos.event(run, "run.lost")
            await chaos.event(run, "run.suspended")  # the next attempt asks a person
            [entry] = await chaos.sql("select key, attempts, state from perdure.ledger where run_id = $1", UUID(run))
            assert entry["state"] == "UNKNOWN"
        gate.set()
        await chaos.event(run, "activity.evidence")
        exit_ = await pod.wait()
    assert exit_.agent == LEASE_LOST
    # The person is wrong; the receipt knows better.
    await chaos.call("POST", f"/runs/{run}/signals/effect:{entry['key']}:{entry['attempts']}", {"happened": False}, key=name)
    view = await chaos.until(run)
    assert (view.state, view.result) == ("Succeeded", {"ref": "ref-invoice", "noted": "noted paid", "trail": ["paid"]})
    assert chaos.sink.parts(name) == ["invoice"]
    assert "activity.duplicate_effect" not in await chaos.kinds(run)


@pytest.mark.parametrize("parts", [BOTH, SIDECAR, AGENT], ids=["both", "sidecar", "agent"])
async def test_late_state_is_refused(chaos: Stack, parts: tuple[str, ...]) -> None:
    """The sidecar of a frozen agent beats on: its run is given back as stalled."""
    name = f"state-{'-'.join(parts)}"
    await chaos.pool("lingerer", grace=20)
    with chaos.sink.held(name) as gate:
        run = await chaos.create(name, "lingerer", {"what": name}, stallTimeoutSeconds=1)
        pod = await at_the_sink(chaos, name)
        old = pod.agent.pid
        with frozen(pod, parts):
            await chaos.event(run, "run.retrying" if parts == AGENT else "run.lost")
            gate.set()
            chaos.sink.open(name)
            view = await chaos.until(run)
        await pod.wait()
    assert view.state == "Succeeded"
    assert view.result["pid"] != old
    assert view.result["trail"] == [str(view.result["pid"])]
    assert (await chaos.until(run)).last_seq == view.last_seq
    assert (await chaos.kinds(run)).count("step.succeeded") == 1


async def test_a_run_at_work_outlives_an_outage_of_postgres(chaos: Stack) -> None:
    """R6: for longer than a lease nobody could beat; that is our silence, not the workers'."""
    names = [f"outage-{n}" for n in range(4)]
    await chaos.pool("payer")
    with chaos.sink.held(names[0]) as a, chaos.sink.held(names[1]) as b, chaos.sink.held(names[2]) as c, chaos.sink.held(names[3]) as d:
        runs = [await chaos.create(name, "payer", {"what": name}) for name in names]
        for name in names:
            await at_the_sink(chaos, name)
        await chaos.postgres.kill()
        await asyncio.sleep(2 * LEASE_SECONDS)  # the outage is the length of it
        await chaos.postgres.start()
        for gate in (a, b, c, d):
            gate.set()
        for run in runs:
            view = await chaos.until(run)
            assert (view.state, view.epoch) == ("Succeeded", 1), await chaos.kinds(run)
    assert [chaos.sink.parts(name) for name in names] == [["invoice"]] * 4
