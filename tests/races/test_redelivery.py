"""What was committed and not heard is delivered again: payloads until a wait takes them (W5), leases to the pod that holds them (L3),
answers to whoever resends a request (R3)."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import asyncpg
import msgspec
import pytest
from tests.harness import runs
from tests.harness.cluster import Cluster
from tests.harness.gateways import Gateway
from tests.harness.pods import FakePod, signal
from tests.harness.postgres import locked, waiters

from perdure import protocol as wire
from perdure_operator.domain.errors import Unavailable
from perdure_operator.gateway.dispatch import Dispatcher
from perdure_operator.store.context import LEAN
from perdure_operator.store.store import Store


async def die(cluster: Cluster, pod: FakePod) -> None:
    """The pod's process ends, and the fleet sees it."""
    await pod.cut()
    await cluster.store.pod_gone(pod.id, "PodDeleted")


def signals(context: wire.RunContext) -> list[tuple[str, bytes]]:
    return [(reason.id, bytes(reason.payload)) for reason in context.reasons if reason.kind == "signal"]


async def test_a_payload_comes_with_every_lease_until_a_wait_takes_it(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    api = cluster.api(a)
    run = await api.create()
    big = {"text": "x" * 5000}
    await api.signal(run, "data", 1, key="one")
    await api.signal(run, "data", big, key="two")
    both = [("one", b"1"), ("two", wire.encode_json(big))]
    for attempt in range(1, 5):
        pod = await cluster.holder((a, b)[attempt % 2])
        assert pod.context is not None
        assert pod.context.attempt == attempt
        assert signals(pod.context) == both
        await die(cluster, pod)
    pod = await cluster.holder(b)
    answer = await pod.wait("wait:data#0", signal("data"))
    assert answer.outcomes["wait:data#0"].fired[0].id == "one"
    await die(cluster, pod)
    # Bound is bound: the first is in the journal now, the second is still offered.
    pod = await cluster.holder(a)
    assert pod.context is not None
    assert signals(pod.context) == both[1:]
    [entry] = pod.context.journal
    outcome = msgspec.json.decode(bytes(entry.output), type=wire.WaitOutcome)
    assert [bytes(fired.payload) for fired in outcome.fired] == [b"1"]
    rows = await cluster.pg.fetch("select id, bound_key from perdure.wakeups where kind = 'signal' order by seq")
    assert [tuple(row) for row in rows] == [("one", "wait:data#0"), ("two", None)]


async def test_a_wake_survives_every_worker_that_dies_with_it(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    assert (await pod.wait("wait:go#0", signal("go"))).status == "suspended"
    await api.signal(run, "go", "payload", key="one")
    for _ in range(3):
        pod = await cluster.holder(gateway)
        assert pod.context is not None
        assert pod.context.reasons[0].kind == "signal"
        assert b'"payload"' in bytes(pod.context.journal[0].output)
        await die(cluster, pod)
    assert (await api.kinds(run)).count("wait.satisfied") == 1


async def test_a_lease_that_no_frame_delivered_is_delivered_by_the_other_gateway(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    run = await cluster.api(b).create()
    blocker = await asyncpg.connect(cluster.dsn)
    async with blocker.transaction():
        # The dispatcher does not read this table, the delivery does: the lease is committed and cannot be told.
        await blocker.execute("lock table perdure.run_specs in access exclusive mode")
        pod = await cluster.pod(a)
        await waiters(cluster.dsn, 1)
        assert await cluster.pg.fetchval("select holder from perdure.leases") == pod.id
        await a.kill()
    await blocker.close()
    assert pod.heard(wire.Lease) == 0
    await pod.cut()
    await pod.connect(b)
    context = await pod.lease()
    assert (context.run_id, context.epoch) == (run, 1)
    assert await b.metric("perdure_leases_total", path="redelivered") == 1
    assert await pod.finish() == "Succeeded"


OPERATIONS: dict[str, wire.Body] = {
    "step.end": wire.StepEnd(key="step:x#0", name="x", output=msgspec.Raw(b'{"big":"' + b"x" * 3000 + b'"}')),
    "event": wire.EventAppend(kind="note", data=msgspec.Raw(b"1")),
    "checkpoint": wire.CheckpointSave(slices=[wire.Slice(name="plan", value=msgspec.Raw(b"[1]"), append=True)]),
    "activity.begin": wire.ActivityBegin(tool="send_mail", arguments=msgspec.Raw(b'{"to":"a"}')),
    "spawn": wire.Spawn(key="spawn:c#0", input=msgspec.Raw(b"1"), spec={"desiredState": "Suspended"}),
    "wait": wire.WaitBegin(key="wait:w#0", on=[signal("never")], suspend=True),
    "finish": wire.Finish(outcome="succeeded", output=msgspec.Raw(b'"done"')),
    "retry": wire.Finish(outcome="retry", error=wire.ErrorInfo(type="Boom")),
}


async def cut_off_in_the_middle(cluster: Cluster, pod: FakePod, kind: str, other: Gateway, *, kill: Gateway | None = None) -> None:
    """Its connection (or its gateway) dies while the operation waits for the row; it is sent again elsewhere under the same request id."""
    assert pod.run is not None
    run, req, body = uuid.UUID(pod.run), str(uuid.uuid4()), OPERATIONS[kind]
    async with locked(cluster.dsn, run):
        pod.ask(body, req=req)
        await waiters(cluster.dsn, 1)
        if kill is not None:
            await kill.kill()
        await pod.cut()
        await pod.connect(other)
        await pod.next(wire.Lease)
        second = pod.ask(body, req=req)
        await waiters(cluster.dsn, 2)
    answered = await second
    events = await cluster.pg.fetchval("select count(*) from perdure.events")
    third = await pod.ask(body, req=req)
    assert isinstance(answered, wire.Answer), answered
    assert isinstance(third, wire.Answer), third
    assert (third.body, third.released) == (answered.body, answered.released)
    assert await cluster.pg.fetchval("select count(*) from perdure.events") == events
    kinds = [row[0] for row in await cluster.pg.fetch("select kind from perdure.events where run_id = $1 order by seq", run)]
    assert len(kinds) == len(set(kinds)), kinds
    if kind == "activity.begin":
        token = msgspec.json.decode(answered.body, type=wire.ActivityDecision).token
        assert await cluster.pg.fetchval("select token::text from perdure.ledger where run_id = $1", run) == token
    if kind == "checkpoint":
        assert await cluster.pg.fetchval("select count(*) from perdure.slices where run_id = $1", run) == 1


async def test_operations_cut_off_in_the_middle_are_done_once(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    for kind in OPERATIONS:
        await cluster.api(a).create(retry={"backoffSeconds": 3600})
        await cut_off_in_the_middle(cluster, await cluster.holder(a), kind, b)


@pytest.mark.parametrize("kind", ["step.end", "finish"])
async def test_an_operation_whose_gateway_is_killed_is_done_once(cluster: Cluster, kind: str) -> None:
    a, b = await cluster.start("a", "b")
    await cluster.api(a).create()
    await cut_off_in_the_middle(cluster, await cluster.holder(a), kind, b, kill=a)


async def test_a_resent_suspend_still_says_that_the_pod_is_released(cluster: Cluster) -> None:
    """Before the pod asked again the run was woken and runs elsewhere: the old pod must not believe that it holds it."""
    a, b = await cluster.start("a", "b")
    api = cluster.api(b)
    run = await api.create()
    pod = await cluster.holder(a)
    req = str(uuid.uuid4())
    body = wire.WaitBegin(key="wait:go#0", on=[signal("go")], suspend=True)
    first = await pod.ask(body, req=req)
    await api.signal(run, "go")
    heir = await cluster.holder(b)
    assert (heir.run, heir.epoch) == (run, 2)
    second = await pod.ask(body, req=req)
    assert isinstance(first, wire.Answer)
    assert isinstance(second, wire.Answer)
    assert (first.body, first.released) == (second.body, second.released) == (b'{"status":"suspended"}', True)
    assert await heir.finish() == "Succeeded"


async def test_a_finish_is_answered_although_the_pod_was_told_to_retire(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    await cluster.api(a).create()
    pod = await cluster.holder(a)
    req, body = str(uuid.uuid4()), wire.Finish(outcome="succeeded")
    await pod.ask(body, req=req)
    await pod.cut()
    await pod.connect(b)
    await pod.next(wire.Retire)
    again = await pod.ask(body, req=req)
    assert isinstance(again, wire.Answer)
    assert (again.body, again.released) == (b'{"state":"Succeeded"}', True)


async def test_children_are_spawned_once_however_often_the_parent_starts_again(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create("parent")
    found = set()
    for _ in range(3):
        pod = await cluster.holder(gateway)
        found.add(await pod.spawn("spawn:c#0", spec={"desiredState": "Suspended"}))
        await die(cluster, pod)
    assert len(found) == 1
    assert await cluster.pg.fetchval("select count(*) from perdure.runs") == 2


async def test_a_pod_that_moved_is_told_at_its_new_gateway(cluster: Cluster) -> None:
    """Its old connection still hangs at the first gateway and even beats there; news of its run go to where it said hello last."""
    a, b = await cluster.start("a", "b", lease_seconds=1.0)
    run = await cluster.api(a).create()
    pod = await cluster.holder(a)
    moved = cluster.new_pod(pod_id=pod.id)
    moved.run, moved.epoch = pod.run, pod.epoch
    await moved.connect(b)
    await moved.lease()
    assert (await moved.wait("wait:go#0", signal("go"), suspend=False)).status == "open"
    beats = await cluster.pg.fetchval("select beat_at from perdure.leases")
    while await cluster.pg.fetchval("select beat_at from perdure.leases") < beats + timedelta(seconds=0.6):
        assert await cluster.pg.fetchval("select gateway from perdure.leases") == "b"
    await cluster.api(a).signal(run, "go", 1)
    while not (poke := await moved.poke()).outcomes:
        pass  # a hello is followed by a push of what there is
    assert list(poke.outcomes) == ["wait:go#0"]


async def test_a_lease_whose_commit_was_not_answered_is_brought_to_its_pod(cluster: Cluster) -> None:
    """The gateway never hears of the grant: it looks what became of the pods that wait."""
    gateway, _ = await cluster.one()
    pod = await cluster.pod(gateway)
    name = await cluster.pg.fetchval("select gateway from perdure.pods where pod_id = $1", pod.id)
    gateway.freeze()
    run = await runs.pending(cluster.store)
    [grant] = await cluster.store.dispatch(name, [pod.id])
    gateway.thaw()
    context = await pod.lease()
    assert (context.run_id, context.epoch) == (str(run), grant.epoch)
    assert await pod.finish() == "Succeeded"


async def test_news_that_could_not_be_brought_is_news_again(store: Store) -> None:
    """It counts as told when the gateway has taken it, and the gateway's next statement fails."""
    ours = await runs.running(store)
    await runs.apply(store, runs.wait_for(ours, "w", runs.on_signal("go"), suspend=False))
    await runs.apply(store, runs.signal(ours.run, "go", "1"))
    told = asyncio.Event()

    class Pod:
        held = SimpleNamespace(fence=ours.fence)
        portion = LEAN

        def send(self, frame: object) -> None:
            told.set()

    class Hub:
        def leases(self) -> list[int]:
            return [1]

        def hearer(self, run: UUID, epoch: int) -> Pod:
            return Pod()

    class Interrupted:
        """The store; the first read of payloads gets no answer."""

        failures = 1
        news, tell_again = store.news, store.tell_again

        async def outcomes(self, raw: Any, portion: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise Unavailable("the connection is gone")
            return await store.outcomes(raw, portion)

    bringing = asyncio.create_task(Dispatcher(cast(Store, Interrupted()), runs.GATEWAY).run_news(cast(Any, Hub())))
    try:
        async with asyncio.timeout(10):
            await told.wait()
    finally:
        bringing.cancel()
        await asyncio.gather(bringing, return_exceptions=True)
