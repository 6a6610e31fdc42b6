"""What the hub keeps of connected pods: how much one may have open, and which connection of a pod is the idle one."""

from __future__ import annotations

import asyncio
from typing import cast
from uuid import uuid4

from aiohttp import web

from perdure_operator.gateway.auth import PodIdentity
from perdure_operator.gateway.pods import MAX_OPEN_OPERATIONS, Hub, Pod
from perdure_operator.gateway.pools import Pools
from perdure_operator.store.store import Store

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
