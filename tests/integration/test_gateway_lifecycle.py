"""How a run moves when people and clocks push it (L6-L8), through a real gateway; time is moved in the store."""

from __future__ import annotations

import msgspec
import pytest
from tests.harness.api import Refused
from tests.harness.cluster import Cluster
from tests.harness.pods import FakePod, signal, timer
from tests.harness.postgres import move_clock

from perdure import protocol as wire

HOUR = 3600.0
BOOM = wire.ErrorInfo(type="Boom", message="it broke")


async def die(cluster: Cluster, pod: FakePod) -> None:
    await pod.cut()
    await cluster.store.pod_gone(pod.id, "PodDeleted")


# ------------------------------------------------------------------------------------------------------------ deadlines


async def test_a_deadline_passes_while_the_run_is_suspended(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create(deadlineSeconds=100)
    pod = await cluster.holder(gateway)
    await pod.wait("wait:go#0", signal("go"))
    await move_clock(cluster.pg, 101)
    view = await api.until(run)
    assert (view.state, view.error) == (
        "Failed",
        {"type": "DeadlineExceeded", "message": "deadlineSeconds (100) have passed since the first start"},
    )
    with pytest.raises(Refused, match="run-finished"):
        await api.signal(run, "go")


@pytest.mark.parametrize("body", [wire.StepEnd(key="step:s#0", name="s"), wire.EventAppend(kind="x")], ids=["step", "event"])
async def test_a_deadline_passes_while_a_worker_is_at_it(cluster: Cluster, body: wire.Body) -> None:
    gateway, api = await cluster.one()
    run = await api.create(activeDeadlineSeconds=100)
    pod = await cluster.holder(gateway)
    gateway.freeze()  # so that the operation, not the timer, finds it
    refused = pod.ask(body)
    await pod.flushed()
    await move_clock(cluster.pg, 101)
    gateway.thaw()
    frame = await refused
    assert isinstance(frame, wire.Refusal)
    assert frame.problem.type in ("urn:perdure:deadline-exceeded", "urn:perdure:run-finished")
    await pod.next(wire.LeaseLost)
    view = await api.until(run)
    assert (view.state, view.reason, view.steps) == ("Failed", "DeadlineExceeded", 0)
    assert view.error is not None
    assert view.error["message"] == "activeDeadlineSeconds (100) are used up"


async def test_waiting_does_not_use_up_the_active_deadline(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create(activeDeadlineSeconds=100)
    pod = await cluster.holder(gateway)
    await move_clock(cluster.pg, 60)
    await pod.wait("wait:go#0", signal("go"))
    await move_clock(cluster.pg, HOUR)
    assert (await api.view(run)).state == "Suspended"
    await api.signal(run, "go")
    pod = await cluster.holder(gateway)
    await pod.step("step:s#0")  # 60 of 100 are used
    await move_clock(cluster.pg, 41)
    assert (await api.until(run)).reason == "DeadlineExceeded"


# ------------------------------------------------------------------------------------------------------ pause and resume


async def test_pause_and_resume_of_a_queued_run(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    assert (await api.verb(run, "pause")).state == "Suspended"
    assert (await api.verb(run, "pause")).paused
    pod = await cluster.pod(gateway)
    assert (await api.verb(run, "resume")).state in ("Pending", "Running")
    assert (await pod.lease()).run_id == run
    assert (await api.kinds(run)).count("run.pause_requested") == 1


async def test_pause_and_resume_of_a_running_run(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    api = cluster.api(b)
    run = await api.create()
    pod = await cluster.holder(a)
    assert (await api.verb(run, "pause")).state == "Running"
    while not (await pod.poke()).pause:
        pass
    assert await pod.finish("paused") == "Suspended"
    view = await api.view(run)
    assert (view.reason, view.attempt) == ("Paused", 1)
    await api.verb(run, "resume")
    heir = await cluster.holder(b)
    assert heir.context is not None
    assert [reason.kind for reason in heir.context.reasons] == ["resume"]
    assert heir.context.attempt == 1


async def test_a_resume_before_the_worker_has_let_go(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    await api.verb(run, "pause")
    await api.verb(run, "resume")
    assert await pod.finish("paused") == "Pending"
    assert (await (await cluster.pod(gateway)).lease()).run_id == run


async def test_wakes_are_kept_while_paused(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    await pod.wait("wait:any#0", signal("go"), timer(50))
    await api.verb(run, "pause")
    await api.signal(run, "go", "kept")
    await move_clock(cluster.pg, 60)
    assert (await api.view(run)).state == "Suspended"
    await api.verb(run, "resume")
    heir = await cluster.holder(gateway)
    assert heir.context is not None
    [entry] = heir.context.journal
    outcome = msgspec.json.decode(bytes(entry.output), type=wire.WaitOutcome)
    assert [(fired.kind, bytes(fired.payload)) for fired in outcome.fired] == [("signal", b'"kept"')]


async def test_the_stricter_of_spec_and_verb_holds(cluster: Cluster) -> None:
    _, api = await cluster.one()
    run = await api.create(desiredState="Suspended")
    assert (await api.view(run)).state == "Suspended"
    assert (await api.verb(run, "resume")).state == "Suspended"


# --------------------------------------------------------------------------------------------------------------- cancel


async def test_cancel_of_a_run_that_no_worker_holds(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    queued = await api.create("queued")
    assert (await api.verb(queued, "cancel")).state == "Cancelled"
    asleep = await api.create("asleep")
    pod = await cluster.holder(gateway)
    await pod.wait("wait:go#0", signal("go"))
    assert (await api.verb(asleep, "cancel")).state == "Cancelled"
    assert (await api.verb(asleep, "cancel")).state == "Cancelled"  # saying it again changes nothing
    with pytest.raises(Refused, match="run-finished"):
        await api.verb(asleep, "pause")


async def test_a_worker_that_obeys_a_cancel(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    run = await cluster.api(b).create()
    pod = await cluster.holder(a)
    with pytest.raises(Refused, match="illegal-transition"):
        await pod.finish("cancelled")  # nobody asked for it
    assert (await cluster.api(b).verb(run, "cancel")).cancel_requested
    while not (await pod.poke()).cancel:
        pass
    with pytest.raises(Refused, match="cancel-requested"):
        await pod.finish("succeeded")
    await pod.step("step:last-words#0")
    assert await pod.finish("cancelled") == "Cancelled"


async def test_a_worker_that_ignores_a_cancel_loses_its_lease_after_its_grace(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create(terminationGracePeriodSeconds=20)
    pod = await cluster.holder(gateway)
    await api.verb(run, "cancel")
    await move_clock(cluster.pg, 20)
    await pod.step("step:s#0")  # within the grace, and the five seconds for last words
    await move_clock(cluster.pg, 6)
    assert (await pod.next(wire.LeaseLost)).epoch == 1
    assert (await api.view(run)).state == "Cancelled"
    with pytest.raises(Refused, match="run-finished"):
        await pod.finish("succeeded")


async def test_a_completion_that_was_committed_first_stays(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    await pod.finish(output=b'"done"')
    with pytest.raises(Refused, match="run-finished"):
        await api.verb(run, "cancel")
    view = await api.view(run)
    assert (view.state, view.result) == ("Succeeded", "done")
