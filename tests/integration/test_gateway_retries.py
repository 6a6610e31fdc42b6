"""How a run goes on when its worker fails (L5), when time passes over its waits, and what its journal keeps; time is moved in the store."""

from __future__ import annotations

from uuid import UUID

import msgspec
from tests.harness import runs
from tests.harness.cluster import Cluster
from tests.harness.pods import FakePod, signal, timer
from tests.harness.postgres import move_clock

from perdure import protocol as wire

HOUR = 3600.0
BOOM = wire.ErrorInfo(type="Boom", message="it broke")


async def die(cluster: Cluster, pod: FakePod) -> None:
    """Its node is lost with it: nobody has taken it away."""
    await pod.cut()
    await cluster.store.pod_gone(pod.id, "NodeLost")


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
    # Progress in the first and in the third attempt: what the others do has been done before.
    for new in ("step", "", "wait", "", ""):
        pod = await cluster.holder(gateway)
        assert (await pod.step("step:same#0")).existing is (new != "step")
        # Neither of these is progress: the next attempt does the like, and dies of it again.
        assert (await pod.op(wire.ActivityBegin(tool=f"of epoch {pod.epoch}")))["decision"] == "execute"
        await pod.op(wire.EventAppend(kind="still-here"))
        if new == "wait" or (pod.context is not None and len(pod.context.journal) == 2):
            assert (await pod.wait("wait:same#0", signal("x"), suspend=False)).status == "open"
        await die(cluster, pod)
    view = await api.until(run, "Suspended", seconds=2)
    assert (view.reason, view.paused) == ("LossesExhausted", True)
    why = await api.call("GET", f"/runs/{run}/why")
    assert why["pausedBy"] == ["losses"]
    assert why["message"] == "3 workers were lost without progress, the last one: NodeLost; resume to try again"
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
    await cluster.store.control([runs.settle(UUID(run))], wait=True)
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
