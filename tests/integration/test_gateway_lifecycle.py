"""How a run moves when people, clocks and failing workers push it (L5-L8), through a real gateway; time is moved in the store."""

from __future__ import annotations

import asyncio

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


# ---------------------------------------------------------------------------------------------------- retries and losses


async def test_backoff_and_exhausted_retries(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create(retry={"maxRetries": 2, "backoffSeconds": 10, "maxBackoffSeconds": 15})
    for attempt, longest in [(1, 10), (2, 15)]:
        pod = await cluster.holder(gateway)
        assert pod.context is not None
        assert pod.context.attempt == attempt
        assert await pod.finish("retry", error=BOOM) == "Pending"
        assert (await api.view(run)).reason == "BackOff"
        left = await cluster.pg.fetchval("select extract(epoch from runnable_at - perdure.now())::float from perdure.runs")
        assert longest / 2 - 2 < left <= longest
        await move_clock(cluster.pg, longest)
    pod = await cluster.holder(gateway)
    assert [reason.name for reason in (pod.context.reasons if pod.context else []) if reason.kind == "retry"] == ["Boom", "Boom"]
    assert await pod.finish("retry", error=BOOM) == "Failed"
    view = await api.view(run)
    assert view.error == {"type": "RetriesExhausted", "message": "3 attempts failed, the last one: Boom: it broke"}


async def test_a_final_failure_is_not_retried(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    assert await pod.finish("failed", error=BOOM) == "Failed"
    assert (await api.view(run)).error == {"type": "Boom", "message": "it broke", "retryable": True}


async def test_losses_without_progress_park_the_run(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create(retry={"maxLosses": 2})
    for lost in range(3):
        pod = await cluster.holder(gateway)
        await pod.step("step:always-the-same#0")  # the first time it is progress
        await die(cluster, pod)
        assert (await api.view(run)).state == ("Pending" if lost < 3 else "Suspended")
    pod = await cluster.holder(gateway)
    assert (await pod.step("step:always-the-same#0")).existing
    assert (await pod.wait("wait:hold#0", signal("x"), suspend=False)).status == "open"  # progress again: the count starts anew
    await die(cluster, pod)
    for _ in range(2):
        pod = await cluster.holder(gateway)
        await pod.step("step:always-the-same#0")
        await pod.wait("wait:hold#0", signal("x"), suspend=False)  # it is there already: no progress
        await die(cluster, pod)
    view = await api.until(run, "Suspended", seconds=2)
    assert (view.reason, view.paused) == ("LossesExhausted", True)
    assert "3 workers were lost without progress" in view.message
    await api.verb(run, "resume")
    pod = await cluster.holder(gateway)
    assert await pod.finish() == "Succeeded"


# --------------------------------------------------------------------------------------------------- waits and the journal


async def test_timers_and_timeouts_wake(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    await pod.wait("wait:long#0", signal("go"), timer(HOUR), mode="all", timeout_seconds=2 * HOUR)
    await move_clock(cluster.pg, HOUR + 1)
    await asyncio.sleep(0.1)
    assert (await api.view(run)).state == "Suspended"
    await move_clock(cluster.pg, HOUR)
    heir = await cluster.holder(gateway)
    assert heir.context is not None
    outcome = msgspec.json.decode(bytes(heir.context.journal[0].output), type=wire.WaitOutcome)
    assert (outcome.status, outcome.fired[0].kind, outcome.fired[0].index) == ("timed_out", "timeout", -1)
    assert outcome.fired[0].late_seconds >= 1
    assert (await heir.wait("wait:zero#0", timer(0))).status == "done"


async def test_the_first_outcome_of_a_step_stays(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    begin = wire.StepBegin(name="s", key="step:s#0")
    assert (await pod.op(begin))["decision"] == "execute"
    first = await pod.step("step:s#0", b'"first"')
    second = await pod.step("step:s#0", b'"second"')
    assert (second.seq, second.existing) == (first.seq, True)
    assert await pod.op(begin) == {"decision": "done", "key": "step:s#0", "output": "first"}
    await pod.op(wire.StepEnd(key="step:f#0", name="f", state="failed", error=BOOM))
    failed = await pod.op(wire.StepBegin(name="f"))
    assert (failed["decision"], failed["error"]["type"]) == ("failed", "Boom")


async def test_constraints_deny_a_tool(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create(constraints={"forbiddenTools": ["send_mail"], "allowedTools": ["search"]})
    pod = await cluster.holder(gateway)
    decisions = [(await pod.op(wire.ActivityBegin(tool=tool)))["decision"] for tool in ("send_mail", "post", "search")]
    assert decisions == ["denied", "denied", "execute"]
    assert await cluster.pg.fetchval("select count(*) from perdure.ledger") == 1
