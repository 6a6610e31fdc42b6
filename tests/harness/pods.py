"""A worker pod that says exactly what the test says: frames of the pod protocol, sent, kept back, repeated, or cut off in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections import defaultdict
from typing import Any, Self, TypeVar
from uuid import UUID

import aiohttp
import msgspec
from tests.harness.api import Refused
from tests.harness.gateways import PATIENCE, Gateway

from perdure import protocol as wire

F = TypeVar("F", bound=wire.FromGateway)
T = TypeVar("T")
_context = msgspec.json.Decoder(wire.RunContext)
_poke = msgspec.json.Decoder(wire.Poke)

STEP = b'{"op":"step.end","key":"%b","name":"s","output":%b}'


class CutError(ConnectionError):
    """The connection ended before the answer came."""


class FakePod:
    """One pod: one identity, at most one connection at a time.

    It beats by itself as a sidecar would, until :meth:`silence`; everything else is the test's. ``context`` is that of its last lease.
    """

    def __init__(self, token: str, pod_id: UUID, *, reuse: bool = False) -> None:
        self.id = pod_id
        self.reuse = reuse
        self.run: str | None = None
        self.epoch: int | None = None
        self.context: wire.RunContext | None = None
        self.lost: list[wire.LeaseLost] = []
        self.silent = False
        self.connections = 0
        self.headers = {"Authorization": f"Bearer {token}"}
        self._next = 0
        self._open: dict[int, asyncio.Future[wire.Answer | wire.Refusal]] = {}
        self._frames: dict[type, asyncio.Queue[wire.FromGateway]] = defaultdict(asyncio.Queue)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------------------------------------------ connection

    async def connect(self, gateway: Gateway, hello: wire.FromPod | None = None) -> Self:
        """Says hello with what it believes to hold. Raises aiohttp.WSServerHandshakeError when the upgrade is refused."""
        opened = await gateway.http.ws_connect(gateway.url + "/v1/pod", headers=self.headers, max_msg_size=0, compress=0)
        self._socket = opened
        self._frames.clear()
        self._out = asyncio.Queue()
        self.send(hello or self.hello())
        self._tasks = [asyncio.create_task(part) for part in (self._listen(opened), self._pump(opened, self._out), self._beat())]
        return self

    def hello(self, **fields: Any) -> wire.Hello:
        """Of the next connection."""
        self.connections += 1
        own = {"reuse": self.reuse, "run": self.run, "epoch": self.epoch, "connection": self.connections}
        return wire.Hello(protocol=wire.PROTOCOL_VERSION, sidecar="test", **(own | fields))

    async def cut(self) -> None:
        """The connection breaks, without a word."""
        open_socket, self._socket = self._socket, None
        raw = open_socket.get_extra_info("socket") if open_socket is not None else None
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail()

    async def closed(self) -> None:
        """Returns when the gateway has ended the connection."""
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(self._tasks[0], return_exceptions=True)

    def hang(self) -> None:
        """Reads nothing any more; the connection stays, and fills."""
        self._tasks[0].cancel()

    def silence(self) -> None:
        """Stops beating; the connection stays."""
        self.silent = True

    async def _listen(self, opened: aiohttp.ClientWebSocketResponse) -> None:
        async for message in opened:
            if message.type is not aiohttp.WSMsgType.BINARY:
                break
            frame = wire.decode_from_gateway(message.data)
            if isinstance(frame, wire.Answer | wire.Refusal):
                future = self._open.pop(frame.id, None)
                if future is not None and not future.done():
                    future.set_result(frame)
                continue
            self.on_frame(frame)
        self._fail()

    def on_frame(self, frame: wire.FromGateway) -> None:
        """Every frame but the answers."""
        if isinstance(frame, wire.LeaseLost):
            self.lost.append(frame)
        self._frames[type(frame)].put_nowait(frame)

    async def _pump(self, opened: aiohttp.ClientWebSocketResponse, out: asyncio.Queue[bytes]) -> None:
        while True:
            await opened.send_bytes(await out.get())
            out.task_done()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if not self.silent:
                self.send(wire.Beat(run=self.run, epoch=self.epoch))

    def _fail(self) -> None:
        waiting, self._open = self._open, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(CutError("the connection ended"))
                future.exception()

    # ---------------------------------------------------------------------------------------------------------- frames

    def send(self, frame: wire.FromPod) -> None:
        self.send_bytes(wire.encode_frame(frame))

    def send_bytes(self, data: bytes) -> None:
        """In order, without waiting for anything."""
        self._out.put_nowait(data)

    async def flushed(self) -> None:
        """Returns when all frames are on the wire."""
        await self._out.join()

    async def next(self, kind: type[F], seconds: float = PATIENCE) -> F:
        """The next frame of this type that was not taken yet."""
        async with asyncio.timeout(seconds):
            frame = await self._frames[kind].get()
        assert isinstance(frame, kind)
        return frame

    def heard(self, kind: type[wire.FromGateway]) -> int:
        """How many frames of this type wait to be taken."""
        return self._frames[kind].qsize()

    async def lease(self, seconds: float = PATIENCE) -> wire.RunContext:
        """Waits for a run and holds it."""
        frame = await self.next(wire.Lease, seconds)
        self.run, self.epoch = frame.run, frame.epoch
        self.context = _context.decode(frame.context)
        return self.context

    async def poke(self) -> wire.Poke:
        return _poke.decode((await self.next(wire.Push)).poke)

    # ------------------------------------------------------------------------------------------------------ operations

    def ask(
        self, body: wire.Body | bytes, *, req: str | None = None, run: str | None = None, epoch: int | None = None
    ) -> asyncio.Future[wire.Answer | wire.Refusal]:
        """Sends an operation and does not wait. ``run``, ``epoch``: another fence than the lease's."""
        self._next += 1
        future: asyncio.Future[wire.Answer | wire.Refusal] = asyncio.get_running_loop().create_future()
        self._open[self._next] = future
        self.send(
            wire.Op(
                id=self._next,
                run=run if run is not None else self.run or "",
                epoch=epoch if epoch is not None else self.epoch or 0,
                req=req or str(uuid.uuid4()),
                body=body if isinstance(body, bytes) else wire.encode_json(body),
            )
        )
        return future

    async def op(self, body: wire.Body | bytes, **options: Any) -> Any:
        """Sends an operation and gives its decoded answer. Raises Refused, CutError."""
        return decoded(await asyncio.wait_for(self.ask(body, **options), PATIENCE))

    async def get(self, kind: type[T], body: wire.Body | bytes, **options: Any) -> T:
        """The same for an answer of this type."""
        return answer(kind, await asyncio.wait_for(self.ask(body, **options), PATIENCE))

    async def step(self, key: str, output: bytes = b"1", **options: Any) -> wire.Recorded:
        """Journals a step."""
        return await self.get(wire.Recorded, STEP % (key.encode(), output), **options)

    async def wait(self, key: str, *on: wire.Condition, suspend: bool = True, **fields: Any) -> wire.WaitAnswer:
        return await self.get(wire.WaitAnswer, wire.WaitBegin(key=key, on=list(on), suspend=suspend, **fields))

    async def spawn(self, key: str, **fields: Any) -> str:
        """Starts a child; gives its id."""
        return str((await self.op(wire.Spawn(key=key, **fields)))["child"])

    async def finish(self, outcome: Any = "succeeded", output: bytes = b"null", **fields: Any) -> str:
        """Gives the run's state after it."""
        answer = await self.op(wire.Finish(outcome=outcome, output=msgspec.Raw(output), **fields))
        return str(answer["state"])


def answer(kind: type[T], frame: wire.Answer | wire.Refusal) -> T:
    """Raises Refused."""
    if isinstance(frame, wire.Refusal):
        raise Refused(frame.problem)
    return msgspec.json.decode(frame.body, type=kind)


def decoded(frame: wire.Answer | wire.Refusal) -> Any:
    """Raises Refused."""
    return answer(Any, frame)


def signal(name: str) -> wire.Condition:
    return wire.Condition(kind="signal", name=name)


def timer(seconds: float) -> wire.Condition:
    return wire.Condition(kind="timer", seconds=seconds)


def child(run: str) -> wire.Condition:
    return wire.Condition(kind="child_done", name=run)
