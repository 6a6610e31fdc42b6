"""A receipt that is on its way to the disk is on its way to the gateway, whoever still waits for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from perdure.protocol import Answer, Lease, Op, Problem, Refusal, Welcome, decode_from_pod
from perdure.sidecar.app import Api, make_metrics
from perdure.sidecar.config import from_environment
from perdure.sidecar.gateway_client import GatewayClient
from perdure.sidecar.http_server import Request, Response
from perdure.sidecar.pod import Pod
from perdure.sidecar.receipts import Receipts
from perdure.sidecar.spool import Spool

BODY = b'{"key":"k","token":"t","state":"succeeded"}'


class SlowDisk(Spool):
    """Writes when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()
        self.writes = 0
        self.appended = asyncio.Semaphore(0)

    def append(self, payload: bytes) -> int:
        self.appended.release()
        return super().append(payload)

    def write(self, data: bytes) -> None:
        assert self.may_write.wait(10)
        self.writes += 1
        super().write(data)


class Gateway:
    """A link that only remembers."""

    writable = True

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Op] = asyncio.Queue()

    def send(self, frame: bytes) -> None:
        decoded = decode_from_pod(frame)
        if isinstance(decoded, Op):
            self.sent.put_nowait(decoded)


def pod_and_api(spool: Spool) -> tuple[Pod, Gateway, Api]:
    pod = Pod(reuse=False, metrics=make_metrics(), time=asyncio.get_running_loop().time)
    receipts = Receipts(spool)
    receipts.replay(pod.submit)
    gateway: Any = Gateway()
    pod.on_connected(gateway)
    pod.on_frame(gateway, Welcome(pod="p", pool="p", heartbeat_seconds=1, lease_seconds=5))
    pod.on_frame(gateway, Lease(run="r", epoch=3, context=b"{}"))
    client = GatewayClient(from_environment({"PERDURE_GATEWAY_URLS": "http://127.0.0.1:9"}), pod)
    return pod, gateway, Api(pod, client, receipts, reuse=False, parent_secret=None)


def post(api: Api) -> asyncio.Task[Any]:
    async def call() -> Any:
        return await api(Request("POST", "/v1/activities/end", "", {}, BODY, True, ""))

    return asyncio.get_running_loop().create_task(call())


async def test_a_sender_that_leaves_while_the_disk_is_slow_is_not_waited_for(tmp_path: Path) -> None:
    spool = SlowDisk(tmp_path)
    pod, gateway, api = pod_and_api(spool)
    task = post(api)
    await spool.appended.acquire()
    task.cancel()
    await asyncio.wait([task])
    assert gateway.sent.empty()
    spool.may_write.set()
    op = await asyncio.wait_for(gateway.sent.get(), 10)
    assert (op.run, op.epoch) == ("r", 3)
    pod.on_frame(gateway, Answer(id=op.id, body=b"{}"))  # type: ignore[arg-type]
    assert spool.unacknowledged == 0


async def test_one_flush_serves_all_that_came_while_the_last_one_ran(tmp_path: Path) -> None:
    spool = SlowDisk(tmp_path)
    pod, gateway, api = pod_and_api(spool)
    tasks = [post(api) for _ in range(50)]
    for _ in tasks:
        await spool.appended.acquire()
    spool.may_write.set()
    for _ in tasks:
        op = await asyncio.wait_for(gateway.sent.get(), 10)
        pod.on_frame(gateway, Answer(id=op.id, body=b"{}"))  # type: ignore[arg-type]
    replies = await asyncio.gather(*tasks)
    assert all(isinstance(reply, Response) and reply.status == 200 for reply in replies)
    assert spool.writes == 2


async def test_a_final_refusal_ends_a_receipt(tmp_path: Path) -> None:
    spool = SlowDisk(tmp_path)
    spool.may_write.set()
    pod, gateway, api = pod_and_api(spool)
    task = post(api)
    op = await asyncio.wait_for(gateway.sent.get(), 10)
    problem = Problem(type="urn:perdure:x", title="x", status=422, detail="", retryable=False, action="")
    pod.on_frame(gateway, Refusal(id=op.id, problem=problem))  # type: ignore[arg-type]
    assert (await task).status == 422
    assert spool.unacknowledged == 0
