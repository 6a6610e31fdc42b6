"""What the sidecar's tests stand on: gateways that remember what they committed, real sidecar processes, agents that speak to them.

The gateways are aiohttp servers in the test's own loop that share one :class:`Store`, as the real ones share a database. The sidecar is the
program itself, started with ``python -m perdure.sidecar``; nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import perdure
from perdure import protocol
from perdure.protocol import Answer, Beat, Hello, Idle, Lease, LeaseLost, Op, Problem, Push, Refusal, Retire, Welcome

PATIENCE = 20.0
"""Seconds that a test waits for something that must happen."""

RUN = "0198c0de-0000-7000-8000-000000000001"
SOURCE_ROOT = Path(perdure.__file__).parents[1]


def problem(code: str, status: int = 409, *, retryable: bool = False) -> Problem:
    return Problem(type=f"urn:perdure:{code}", title=code, status=status, detail=code, retryable=retryable, action="-")


@dataclass
class Store:
    """What the gateways have committed. ``ops`` in the order of the commits; ``epoch`` is the one that may write."""

    epoch: int = 1
    held: bool = True
    ops: list[Op] = field(default_factory=list)
    answers: dict[str, Answer | Refusal] = field(default_factory=dict)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(op.body) for op in self.ops]

    def kinds(self) -> list[str]:
        return [body["op"] for body in self.bodies()]

    def commit(self, op: Op) -> Answer | Refusal:
        """Once for a request id; fenced by the epoch, receipts excepted."""
        known = self.answers.get(op.req)
        if known is not None:
            known.id = op.id
            return known
        kind = json.loads(op.body)["op"]
        if (op.epoch != self.epoch or not self.held) and kind != "activity.end":
            return Refusal(id=op.id, problem=problem("lease-lost"))
        self.ops.append(op)
        self.answers[op.req] = answer = Answer(id=op.id, body=b'{"seq":%d}' % len(self.ops))
        if kind in ("finish", "suspend") or (kind == "wait" and json.loads(op.body).get("suspend")):
            self.held, answer.released = False, True
            answer.body = b'{"state":"Pending"}' if kind == "finish" else b'{"status":"suspended"}'
        return answer


class Pod:
    """One connection of a sidecar, seen by the gateway. ``received``: every frame in order."""

    def __init__(self, gateway: Gateway, socket: web.WebSocketResponse, request: web.Request) -> None:
        self.gateway = gateway
        self.socket = socket
        self.request = request
        self.received: list[protocol.FromPod] = []

    def of(self, kind: type) -> list[Any]:
        return [frame for frame in self.received if isinstance(frame, kind)]

    @property
    def hello(self) -> Hello:
        frame = self.received[0]
        assert isinstance(frame, Hello)
        return frame

    async def send(self, *frames: protocol.FromGateway) -> None:
        for frame in frames:
            await self.socket.send_bytes(protocol.encode_frame(frame))

    def cut(self) -> None:
        """As when the network or the process goes: no close frame."""
        transport = self.request.transport
        if transport is not None:
            transport.abort()


class Gateway:
    """``react`` is called with each frame of a pod; the default is a gateway that grants RUN and commits what it gets."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.pods: list[Pod] = []
        self.heartbeat_seconds = 0.1
        self.lease_seconds = 5.0
        self.lease = Lease(run=RUN, epoch=1, context=b'{"runId":"%b","input":{"a":1}}' % RUN.encode(), grace_seconds=5.0)
        self.react: Callable[[Pod, protocol.FromPod], Awaitable[None]] = self.behave
        self.refuse_status: int | None = None
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/v1/pod", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for pod in self.pods:
            pod.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def pod(self) -> Pod:
        """The newest connection."""
        return self.pods[-1]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.refuse_status is not None:
            return web.Response(status=self.refuse_status)
        socket = web.WebSocketResponse(max_msg_size=protocol.MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        pod = Pod(self, socket, request)
        with contextlib.suppress(ConnectionError):  # cut by the test
            async for message in socket:
                frame = protocol.decode_from_pod(message.data)
                pod.received.append(frame)
                if isinstance(frame, Hello):
                    self.pods.append(pod)
                await self.react(pod, frame)
                await self._notify()
        await self._notify()
        return socket

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for a condition that a frame can make true."""
        async with asyncio.timeout(PATIENCE), self._changed:
            return await self._changed.wait_for(condition)

    # -------------------------------------------------------------------------------------------- behaviour, to be replaced

    async def behave(self, pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Hello):
            await self.greet(pod, frame)
        elif isinstance(frame, Idle) and self.store.held:
            await pod.send(self.lease)
        elif isinstance(frame, Op):
            await pod.send(self.store.commit(frame))

    async def greet(self, pod: Pod, hello: Hello) -> None:
        await pod.send(Welcome(pod="pod", pool="pool", heartbeat_seconds=self.heartbeat_seconds, lease_seconds=self.lease_seconds))
        if hello.run is not None and not (self.store.held and hello.epoch == self.store.epoch):
            await pod.send(LeaseLost(run=hello.run, epoch=hello.epoch or 0, reason="superseded"))
        elif self.store.held and (hello.ready or hello.run is not None):
            await pod.send(self.lease)

    def commit_in_silence(self) -> None:
        """From now on operations are committed and their answers get lost."""

        async def react(pod: Pod, frame: protocol.FromPod) -> None:
            if isinstance(frame, Op):
                self.store.commit(frame)
            else:
                await self.behave(pod, frame)

        self.react = react

    def swallow(self) -> None:
        """From now on operations are neither committed nor answered."""

        async def react(pod: Pod, frame: protocol.FromPod) -> None:
            if not isinstance(frame, Op):
                await self.behave(pod, frame)

        self.react = react

    async def push(self, **poke: Any) -> None:
        await self.pod.send(Push(run=RUN, epoch=self.lease.epoch, poke=json.dumps(poke).encode()))


class Sidecar:
    """A sidecar process. ``agent``: an HTTP client on its unix socket."""

    def __init__(self, folder: Path, gateways: list[Gateway], **env: str) -> None:
        self.socket = folder / "agent.sock"
        self.log: list[dict[str, Any]] = []
        self._logged = asyncio.Condition()
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")},
            "PYTHONPATH": str(SOURCE_ROOT),
            "PERDURE_GATEWAY_URLS": ",".join(gateway.url for gateway in gateways),
            "PERDURE_SOCKET": str(self.socket),
            "PERDURE_PORT": "off",
            **env,
        }

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "perdure.sidecar", env=self._env, stderr=asyncio.subprocess.PIPE
        )
        assert self.process.stderr is not None
        self._reader = asyncio.create_task(self._read_log(self.process.stderr))
        await self.logged("listening", times=1 if self._env["PERDURE_PORT"] == "off" else 2)
        self.agent = aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(self.socket), limit=0))

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.log.append({"event": line.decode()})
            async with self._logged:
                self._logged.notify_all()

    async def logged(self, text: str, times: int = 1) -> None:
        """Waits until so many lines of the log contain the text."""
        async with asyncio.timeout(PATIENCE), self._logged:
            await self._logged.wait_for(lambda: sum(text in json.dumps(line) for line in self.log) >= times)

    @property
    def port(self) -> int:
        return int(next(line["port"] for line in self.log if "port" in line))

    def most_memory(self) -> int:
        """Bytes that the process has ever had resident; 0 where the system does not tell."""
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE):
            code = await self.process.wait()
            await self._reader
        return code

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def close(self) -> None:
        await self.agent.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reader

    async def post(self, path: str, body: Any, *, req: str | None = None, secret: str | None = None) -> tuple[int, Any]:
        headers = {"Perdure-Request-Id": req} if req else {}
        if secret:
            headers["Authorization"] = f"Bearer {secret}"
        async with self.agent.post(f"/v1/{path}", json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str, *, secret: str | None = None) -> tuple[int, Any]:
        async with self.agent.get(path, headers={"Authorization": f"Bearer {secret}"} if secret else {}) as response:
            text = await response.text()
            return response.status, json.loads(text) if "json" in response.content_type else text

    @contextlib.asynccontextmanager
    async def session(self, *, secret: str | None = None, hang: bool = False, early: bool = False) -> AsyncIterator[Agent]:
        """``early``: does not wait for a run first."""
        if not early:
            assert (await self.get("/v1/run", secret=secret))[0] == 200
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        async with self.agent.ws_connect("/v1/session", max_msg_size=0, headers=headers) as socket:
            agent = Agent(socket, hang=hang)
            yield agent
            agent.reader.cancel()


class Agent:
    """An SDK's side of a session. ``hang``: its event loop does not answer pings."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, *, hang: bool = False) -> None:
        self.socket = socket
        self.hang = hang
        self.pushes: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.pings = 0
        self.answers: list[int] = []
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = 0
        self.closed = asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            data = json.loads(message.data)
            if "ping" in data:
                self.pings += 1
                if not self.hang:
                    await self.socket.send_json({"pong": data["ping"]})
            elif "id" in data:
                self.answers.append(data["id"])
                self._waiting.pop(data["id"]).set_result(data)
            else:
                self.pushes.put_nowait(data)
        self.closed.set()

    async def send(self, op: str, req: str | None = None, **body: Any) -> asyncio.Future[dict[str, Any]]:
        self._ids += 1
        self._waiting[self._ids] = answer = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": self._ids, "req": req or str(uuid.uuid4()), "body": {"op": op, **body}})
        return answer

    async def call(self, op: str, req: str | None = None, **body: Any) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            return await (await self.send(op, req, **body))

    async def step(self, name: str) -> dict[str, Any]:
        return await self.call("step.end", key=name, name=name)

    async def pushed(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            return await self.pushes.get()


@contextlib.asynccontextmanager
async def running(folder: Path, *gateways: Gateway, **env: str) -> AsyncIterator[Sidecar]:
    """Starts the gateways that are not started, and one sidecar."""
    for gateway in gateways:
        if not gateway.url:
            await gateway.start()
    sidecar = Sidecar(folder, list(gateways), **env)
    await sidecar.start()
    try:
        yield sidecar
    finally:
        await sidecar.close()
        for gateway in gateways:
            await gateway.stop()


__all__ = [
    "RUN",
    "Agent",
    "Answer",
    "Beat",
    "Gateway",
    "Idle",
    "LeaseLost",
    "Op",
    "Refusal",
    "Retire",
    "Sidecar",
    "Store",
    "problem",
    "running",
]
