"""What the hub keeps of connected pods: how much one may have open, and which connection of a pod is the idle one."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn, cast
from uuid import UUID, uuid4

import pytest
from aiohttp import WSMessage, WSMsgType, web

from perdure import protocol as wire
from perdure_operator.domain.errors import Unavailable
from perdure_operator.gateway import pods
from perdure_operator.gateway.auth import PodIdentity
from perdure_operator.gateway.pods import MAX_OPEN_OPERATIONS, Hub, Pod
from perdure_operator.gateway.pools import Pools
from perdure_operator.store.store import PodStatus, Store

MIB = 1024 * 1024
NO_SOCKET = cast(web.WebSocketResponse, None)


async def test_nothing_more_is_read_from_a_pod_with_too_much_open() -> None:
    pod = Pod(PodIdentity(uuid4(), "default/p"), NO_SOCKET)
    for _ in range(MAX_OPEN_OPERATIONS - 1):
        pod.opened()
    await asyncio.wait_for(pod.room(), 1)
    pod.opened()
    waiting = asyncio.create_task(pod.room())
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    pod.answered()
    await asyncio.wait_for(waiting, 1)


async def test_the_end_of_an_old_connection_leaves_the_new_one_idle() -> None:
    hub = Hub(cast(Store, None), "g", cast(Pools, None), lease_seconds=30, kick=lambda: None)
    identity = PodIdentity(uuid4(), "default/p")
    old, new = Pod(identity, NO_SOCKET), Pod(identity, NO_SOCKET)
    hub._becomes_idle(old)
    hub._becomes_idle(new)
    hub.not_idle(old)
    assert hub.idle_pods() == [identity.pod_id]
    assert hub.waits(new)
    hub.not_idle(new)
    assert hub.idle_pods() == []


class Windows:
    """Of a store: each fetch is answered with a mebibyte."""

    def __init__(self) -> None:
        self.read = 0

    async def fetch(self, *_: object) -> bytes:
        self.read += 1
        await asyncio.sleep(0)
        return b"x" * MIB


class SlowSocket:
    """Takes a frame each time it is told to."""

    def __init__(self) -> None:
        self.takes, self.taken = asyncio.Semaphore(0), 0

    async def send_bytes(self, data: bytes) -> None:
        await self.takes.acquire()
        self.taken += 1


async def settled() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


async def test_nothing_more_is_fetched_for_a_pod_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, socket = Windows(), SlowSocket()
    monkeypatch.setattr(pods.delivery, "fetch", windows.fetch)
    hub = Hub(cast(Store, None), "g", cast(Pools, None), lease_seconds=30, kick=lambda: None)
    pod = Pod(PodIdentity(uuid4(), "default/p"), cast(web.WebSocketResponse, socket))
    pump = asyncio.create_task(pod.pump())
    frames = [wire.Op(id=n, req=str(uuid4()), run="r", epoch=1, body=b"") for n in range(150)]
    fetches = [asyncio.create_task(hub._fetch(pod, frame, uuid4(), wire.Fetch(after=""))) for frame in frames]
    for _ in fetches:
        pod.opened()
    await settled()
    assert windows.read == 8, "as many as fill the queue"
    for _ in range(5):
        socket.takes.release()
    await settled()
    assert (socket.taken, windows.read) == (5, 13)
    assert sum(not fetch.done() for fetch in fetches) == 137
    pod.gone()
    async with asyncio.timeout(5):
        await asyncio.gather(*fetches)
    assert windows.read == 13, "nothing is read for a pod that went away"
    pump.cancel()


class LateStore:
    """Knows a lease of every pod, and takes its time to read the run."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def pod_hello(self, pod: UUID, *_: Any, **__: Any) -> PodStatus:
        return PodStatus("leased", uuid4(), 1, pod)

    async def context(self, run: UUID, portion: object) -> NoReturn:
        self.asked.set()
        await self.answer.wait()
        raise Unavailable("down")


class Socket:
    """Says hello, and would say more."""

    def __init__(self) -> None:
        self.read, self.closed = 0, asyncio.Event()

    async def receive(self) -> WSMessage:
        return WSMessage(WSMsgType.BINARY, wire.encode_frame(wire.Hello(protocol=wire.PROTOCOL_VERSION, sidecar="t", connection=1)), "")

    def __aiter__(self) -> Socket:
        return self

    async def __anext__(self) -> NoReturn:
        self.read += 1
        raise StopAsyncIteration

    async def send_bytes(self, data: bytes) -> None: ...

    async def close(self, code: int) -> None:
        self.closed.set()


async def test_no_operation_is_read_before_the_lease_is_delivered_again() -> None:
    """A sidecar resends on the heels of its hello; what comes before the hub knows the run would be refused."""
    store, socket = LateStore(), Socket()
    hub = Hub(cast(Store, store), "g", cast(Pools, None), lease_seconds=30, kick=lambda: None)
    serving = asyncio.create_task(hub.serve(PodIdentity(uuid4(), "default/p"), cast(web.WebSocketResponse, socket)))
    await asyncio.wait_for(store.asked.wait(), 1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert socket.read == 0
    [pod] = hub._connections
    store.answer.set()
    await asyncio.wait_for(serving, 5)
    async with pod.turn() as there:
        assert not there, "who waits to read for it hears that it went"
    assert socket.read == 1
    assert socket.closed.is_set(), "without a run it holds nothing: it is to say hello again"
