"""A worker pod as the gateway sees it: its WebSocket and its frames, with no sidecar and no agent behind them.

Operations are answered to callbacks, without a task or a future each, so that one process can play hundreds of busy pods.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

from bench.stage import BenchError, Gateway
from bench.websocket import WebSocket, connect
from perdure import protocol as wire

Answered = Callable[[wire.Answer], None]


class Pod:
    """``leased``: done with the lease when this pod was given a run. ``lease_at``: when that came, by ``time.time``."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.id = uuid4()
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.leased: asyncio.Future[wire.Lease] = loop.create_future()
        self.lease_at = 0.0
        self.failed: str | None = None
        self._socket: WebSocket | None = None
        self._next = 0
        self._waiting: dict[int, Answered] = {}

    async def join(self, gateway: Gateway, pool: str) -> None:
        """Connects; idle from the welcome on."""
        self._socket = await connect(gateway.host, gateway.port, "/v1/pod", gateway.pod_token(self.id, pool), self._received, self._lost)
        self._socket.send(wire.encode_frame(wire.Hello(protocol=wire.PROTOCOL_VERSION, sidecar="bench")))
        await self.welcomed

    def operate(self, body: bytes, answered: Answered) -> None:
        """Sends one operation of the held run."""
        assert self._socket is not None
        self._next += 1
        self._waiting[self._next] = answered
        lease = self.leased.result()
        self._socket.send(wire.encode_frame(wire.Op(id=self._next, run=lease.run, epoch=lease.epoch, req=str(uuid4()), body=body)))

    async def call(self, body: bytes) -> wire.Answer:
        future: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self.operate(body, future.set_result)
        return await future

    def leave(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _received(self, message: bytes) -> None:
        frame = wire.decode_from_gateway(message)
        if isinstance(frame, wire.Answer):
            self._waiting.pop(frame.id)(frame)
        elif isinstance(frame, wire.Lease):
            self.lease_at = time.time()
            self.leased.set_result(frame)
        elif isinstance(frame, wire.Welcome):
            self.welcomed.set_result(None)
        elif isinstance(frame, wire.Refusal):
            self._fail(f"{frame.problem.type}: {frame.problem.detail}")
        elif isinstance(frame, wire.LeaseLost):
            self._fail(f"the lease was lost: {frame.reason}")

    def _lost(self, why: str) -> None:
        if self._waiting:
            self._fail(why)

    def _fail(self, why: str) -> None:
        """A benchmark with failing operations measures something else: say so, and fail whoever waits."""
        self.failed = why
        if not self.leased.done():
            self.leased.set_exception(BenchError(why))


async def crew(gateway: Gateway, pool: str, count: int) -> list[Pod]:
    """``count`` pods, connected and idle."""
    pods = [Pod() for _ in range(count)]
    for begin in range(0, count, 64):
        await asyncio.gather(*(pod.join(gateway, pool) for pod in pods[begin : begin + 64]))
    return pods


def check(pods: list[Pod]) -> None:
    """Raises BenchError if anything was refused."""
    failed = [pod.failed for pod in pods if pod.failed]
    if failed:
        raise BenchError(f"{len(failed)} of {len(pods)} pods had a refusal, the first: {failed[0]}")
