"""A gateway that is told to end lets go of everybody at once: its pods serve on elsewhere, and what it has begun is answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

import pytest
from tests.harness.cluster import Cluster
from tests.harness.pods import STEP, CutError, FakePod, answer, signal
from tests.harness.postgres import locked, waiters

from perdure import protocol as wire

AT_ONCE = 2.0
"""Seconds. What waits for a shutdown to give up waiting takes five of them."""


async def test_its_pods_are_let_go_at_once(cluster: Cluster) -> None:
    old, new = await cluster.start("old", "new")
    run = await cluster.api(old).create()
    working, idle = await cluster.holder(old), await cluster.pod(old)
    await working.step("step:before#0")
    began = time.monotonic()
    ending = asyncio.create_task(old.stop())
    await asyncio.gather(working.closed(), idle.closed())
    assert time.monotonic() - began < AT_ONCE, "they waited for a gateway that no longer served them"
    for pod in (working, idle):
        await pod.connect(new)
    assert await working.lease()
    await working.step("step:after#0")
    assert await working.finish() == "Succeeded"
    view = await cluster.api(new).view(run)
    assert (view.state, view.attempt, view.steps) == ("Succeeded", 1, 2)
    again = await cluster.api(new).create()
    assert (await idle.lease()).run_id == again
    await ending
    assert time.monotonic() - began < AT_ONCE + 2


async def test_a_pod_that_hears_nothing_delays_nobody(cluster: Cluster) -> None:
    old, _ = await cluster.start("old", "new")
    deaf = [await cluster.pod(old) for _ in range(3)]
    for pod in deaf:
        pod.hang()
    well = await cluster.pod(old)
    began = time.monotonic()
    ending = asyncio.create_task(old.stop())
    await well.closed()
    assert time.monotonic() - began < AT_ONCE
    await ending
    assert time.monotonic() - began < 2 * AT_ONCE


async def test_what_it_has_begun_is_committed_once(cluster: Cluster) -> None:
    old, new = await cluster.start("old", "new")
    run = await cluster.api(old).create()
    pod = await cluster.holder(old)
    request, body = str(uuid.uuid4()), STEP % (b"step:s#0", b"1")
    async with locked(cluster.dsn, run):
        begun = pod.ask(body, req=request)
        await waiters(cluster.dsn, 1)
        ending = asyncio.create_task(old.stop())
        with pytest.raises(CutError):
            await begun
        await pod.connect(new)
        await pod.lease()
        resent = pod.ask(body, req=request)
        await waiters(cluster.dsn, 2)
    first = answer(wire.Recorded, await resent)
    assert (await cluster.api(new).view(run)).steps == 1
    assert answer(wire.Recorded, await pod.ask(body, req=request)).seq == first.seq
    assert (await cluster.api(new).kinds(run)).count("step.succeeded") == 1
    await ending


async def test_people_are_answered(cluster: Cluster) -> None:
    old, new = await cluster.start("old", "new")
    api = cluster.api(old)
    run = await api.create()
    pod = await cluster.holder(old)
    await pod.wait("wait:go#0", signal("go"))
    idle = await cluster.pod(old)
    async with locked(cluster.dsn, run):
        paused = asyncio.create_task(api.verb(run, "pause"))
        await waiters(cluster.dsn, 1)
        resumed = asyncio.create_task(api.verb(run, "resume"))
        await asyncio.sleep(0.5)  # it queues behind the other: nothing outside shows it
        ending = asyncio.create_task(old.stop())
        await idle.closed()
    await paused
    assert not (await resumed).paused, "the loops must outlive the requests that wait for them"
    await ending
    assert (await cluster.api(new).kinds(run))[-2:] == ["run.pause_requested", "run.resume_requested"]


async def test_a_live_tail_ends_and_goes_on_elsewhere(cluster: Cluster) -> None:
    old, new = await cluster.start("old", "new")
    api = cluster.api(old)
    run = await api.create()
    events = api.tail(run)
    seen = [await anext(events)]
    began = time.monotonic()
    ending = asyncio.create_task(old.stop())
    seen += [event async for event in events]
    await ending
    assert time.monotonic() - began < AT_ONCE
    assert seen[-1].event != "end"
    await cluster.api(new).verb(run, "cancel")
    rest = [event async for event in cluster.api(new).tail(run, last_event_id=seen[-1].id)]
    assert rest[-1].event == "end"


async def test_whoever_comes_late_is_sent_on(cluster: Cluster) -> None:
    """A connection that was accepted before the end and says hello after it would be one that nobody closes."""
    old, new = await cluster.start("old", "new")
    deaf = await cluster.pod(old)
    deaf.hang()
    late = cluster.new_pod()
    async with cluster.http.ws_connect(old.url + "/v1/pod", headers=late.headers) as socket:
        ending = asyncio.create_task(old.stop())
        await asyncio.sleep(0.3)
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(wire.encode_frame(late.hello()))
        began = time.monotonic()
        while not socket.closed:
            await socket.receive(timeout=20)
    assert time.monotonic() - began < AT_ONCE
    await ending
    assert isinstance(await late.connect(new), FakePod)
    await late.next(wire.Welcome)
