"""What is left of an earlier connection, or of an earlier lease, changes nothing, whenever and wherever it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest
from tests.harness import runs
from tests.harness.api import Refused
from tests.harness.cluster import Cluster
from tests.harness.gateways import Gateway
from tests.harness.pods import FakePod, signal

from perdure import protocol as wire
from perdure_operator.store.operations import Control, SliceWrite
from perdure_operator.store.store import Store

CALL: dict[str, Any] = {
    "tool": "t", "effect": "external", "policy": "query", "fingerprint": "f", "occurrence": 0, "step": None,
    "timeoutSeconds": 7.0, "leaseSeconds": 1.0, "maxRetries": 3,
}  # fmt: skip


@asynccontextmanager
async def unread(cluster: Cluster, gateway: Gateway, pod: FakePod) -> AsyncIterator[None]:
    """The pod's hello lies unread at a frozen gateway, which reads it when the block has ended."""
    headers = {"Authorization": f"Bearer {cluster.tokens.issue_pod(pod.id, 'default/p')}"}
    socket = await gateway.http.ws_connect(gateway.url + "/v1/pod", headers=headers, compress=0)
    gateway.freeze()
    await socket.send_bytes(wire.encode_frame(pod.hello()))
    yield
    gateway.thaw()
    await asyncio.wait_for(socket.receive(), 10)
    await socket.close()


async def gateway_of(cluster: Cluster, pod: FakePod) -> str:
    return str(await cluster.pg.fetchval("select gateway from perdure.pods where pod_id = $1", pod.id))


async def test_a_hello_that_is_read_late_does_not_take_the_pod_back(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    pod = cluster.new_pod()
    async with unread(cluster, a, pod):
        await pod.connect(b)
        await pod.next(wire.Welcome)
        there = await gateway_of(cluster, pod)
    assert await gateway_of(cluster, pod) == there
    await cluster.api(b).create()
    await pod.lease()


async def test_an_idle_that_is_read_late_does_not_take_the_pod_back(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    pod = cluster.new_pod()
    await pod.connect(a, pod.hello(ready=False))
    await pod.next(wire.Welcome)
    a.freeze()
    pod.send(wire.Idle())
    await pod.flushed()
    await pod.cut()
    await pod.connect(b)
    await pod.next(wire.Welcome)
    there = await gateway_of(cluster, pod)
    a.thaw()
    # A gateway deals with what came first: when this pod is known, the idle before it has been read.
    other = await cluster.pod(a)
    await cluster.store.pod_gone(other.id, "PodDeleted")
    await other.cut()
    assert await gateway_of(cluster, pod) == there
    await cluster.api(b).create()
    await pod.lease()


async def test_a_hello_that_is_read_late_does_not_take_the_news_away(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    api = cluster.api(b)
    run = await api.create()
    pod = await cluster.holder(b)
    await pod.wait("wait:go#0", signal("go"), suspend=False)
    async with unread(cluster, a, pod):
        await pod.cut()
        await pod.connect(b)
        await pod.lease()
    while pod.heard(wire.Push):
        await pod.next(wire.Push)
    await api.signal(run, "go", 1)
    await pod.next(wire.Push)


async def test_a_pod_whose_lease_expired_unheard_is_used_again(cluster: Cluster) -> None:
    """Its gateway stood still between the commit of the lease and the delivery; another gateway's reaper ended the lease."""
    a, b = await cluster.start("a", "b", lease_seconds=1.0)
    await cluster.api(b).create()
    pod = cluster.new_pod(reuse=True)
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%dispatch%'"
    async with cluster.pg.transaction():
        await cluster.pg.execute("lock table perdure.leases in share mode")
        await pod.connect(a)
        await pod.next(wire.Welcome)
        other = await asyncpg.connect(cluster.dsn)
        while not await other.fetchval(waiting):
            await other.execute("select pg_sleep(0.01)")
        await other.close()
        a.freeze()
    while not await cluster.pg.fetchval("select count(*) from perdure.events where kind = 'run.lost'"):
        await cluster.pg.execute("select pg_sleep(0.02)")
    a.thaw()
    await pod.lease(15)
    assert await pod.finish() == "Succeeded"


async def test_a_worker_that_was_given_up_is_granted_no_call_again(cluster: Cluster) -> None:
    """Its own gateway has not heard that the lease is over, and knows the answer to its request."""
    a, b = await cluster.start("a", "b", lease_seconds=1.0)
    run = await cluster.api(a).create()
    pod = await cluster.holder(a)
    body = wire.ActivityBegin(tool="send_mail", on_unknown="retry-same-key", timeout_seconds=0.1)
    request = str(uuid4())
    assert (await pod.get(wire.ActivityDecision, body, req=request)).decision == "execute"
    pod.silence()
    expire = {"leaseEpoch": 1, "reason": "HeartbeatLost", "silentSeconds": 1.0}
    while not (await runs.apply(cluster.store, Control(UUID(run), "expire", expire))).answer.get("expired"):
        if await cluster.pg.fetchval("select epoch from perdure.runs") != 1:
            break  # a gateway's own reaper was faster: it is over either way
        await asyncio.sleep(0.005)
    heir = await cluster.holder(b)
    second = await heir.get(wire.ActivityDecision, body)
    while second.decision == "unknown":
        await asyncio.sleep(second.retry_after_seconds + 0.02)
        second = await heir.get(wire.ActivityDecision, body)
    assert (second.decision, second.attempt) == ("execute", 2)
    with pytest.raises(Refused) as refusal:
        await pod.get(wire.ActivityDecision, body, req=request)
    assert refusal.value.code == "lease-lost"


@pytest.mark.parametrize("kind", ["activity.begin", "activity.resolve"])
async def test_no_grant_is_repeated_to_who_has_lost_the_lease(store: Store, kind: str) -> None:
    held = await runs.running(store)
    call = {**CALL, "key": "k", "token": str(uuid4())}
    granted = runs.work(held, "activity.begin", **call)
    assert (await runs.apply(store, granted)).answer["decision"] == "execute"
    if kind == "activity.resolve":
        # Under the call's own timeout and retries, which it does not name again.
        await runs.apply(store, runs.work(held, "activity.end", key="k", token=call["token"], state="failed"))
        granted = runs.work(held, "activity.resolve", key="k", happened=False, token=str(uuid4()), leaseSeconds=1.0)
        assert (await runs.apply(store, granted)).answer["decision"] == "retry"
    assert (await runs.apply(store, granted)).answer["decision"] in ("execute", "retry"), "under the same lease it gets the same answer"
    await runs.apply(store, Control(held.run, "expire", held.lease))
    assert (await runs.apply(store, granted)).code == "lease-lost"


async def test_a_resend_writes_no_session(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    step = runs.step(held, "step:s#0")
    await store.journal([step], wait=True)
    late = msgspec.structs.replace(step, slices=(SliceWrite("plan", b'"' + b"x" * 3000 + b'"'),))
    for _ in range(2):
        [outcome] = await store.journal([late], wait=True)
        assert outcome.code == "ok"
        assert await pg.fetchval("select count(*) from perdure.slices") + await pg.fetchval("select count(*) from perdure.blobs") == 0
        await runs.apply(store, Control(held.run, "expire", held.lease))


async def test_a_late_receipt_writes_no_session(store: Store, pg: asyncpg.Connection) -> None:
    """It is evidence for the ledger, whether the run waits for its next worker, has one or has finished; the session is the next one's."""

    async def session() -> list[asyncpg.Record]:
        saved = "perdure.events where kind in ('checkpoint.saved', 'session.saved')"
        return [row for part in ("perdure.slices", "perdure.checkpoints", saved) for row in await pg.fetch(f"select * from {part}")]

    held = await runs.running(store)
    calls = {f"k{n}": str(uuid4()) for n in range(3)}
    for key, token in calls.items():
        begin = runs.work(held, "activity.begin", **CALL, key=key, token=token)
        assert (await runs.apply(store, begin)).answer["decision"] == "execute"
    checkpoint = runs.work(held, "checkpoint", type="step", coversSeq=0)
    await runs.apply(store, replace(checkpoint, slices=(SliceWrite("plan", b"[1]", append=True),)))
    before = await session()
    await runs.apply(store, Control(held.run, "expire", held.lease))

    async def receipt(key: str) -> None:
        end = runs.work(held, "activity.end", key=key, token=calls[key], state="succeeded", payload=b'"sent"')
        late = (SliceWrite("plan", b"[2]", append=True), SliceWrite("other", b"1"))
        for request in (uuid4(), uuid4()):  # the second time it moves nothing in the ledger
            outcome = await runs.apply(store, replace(end, request=request, slices=late))
            assert (outcome.code, outcome.answer["state"], outcome.answer["evidence"]) == ("ok", "SUCCEEDED", True)
            assert await session() == before

    await receipt("k0")
    heir = await runs.lease_next(store)
    await receipt("k1")
    context = await store.context(held.run)
    assert [(piece.name, piece.chunks) for piece in context.slices] == [("plan", [b"[1]"])]
    await runs.apply(store, runs.work(heir, "finish", outcome="succeeded"))
    await receipt("k2")


async def test_what_comes_with_a_step_is_stored_once(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    steps = [msgspec.structs.replace(runs.step(held, f"step:{n}#0"), slices=(SliceWrite("plan", b"1"),)) for n in range(3)]
    await store.journal(steps[:2], wait=True)
    await store.journal(steps, wait=True)
    written = [row[0] for row in await pg.fetch("select seq from perdure.slices order by seq")]
    assert written == [row[0] for row in await pg.fetch("select seq from perdure.journal order by seq")]
