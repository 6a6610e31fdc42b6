"""A sidecar made of aiohttp and the record of a simulation: another implementation for the SDK's transport and processes to speak to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from perdure import protocol
from perdure.protocol import Problem, encode_json
from perdure.sdk.errors import Refused
from perdure.testing.record import RunRecord

PATIENCE = 20.0


def problem(code: str, *, status: int = 409, retryable: bool = False) -> Problem:
    return Problem(type=f"urn:perdure:{code}", title=code, status=status, detail="as the test says", retryable=retryable, action="")


@dataclass
class FakeSidecar:
    """``react`` sees each operation (its number, its body) before it is performed and may raise Refused; ``after`` sees it
    before it is answered."""

    socket: Path
    secret: str | None = None
    react: Callable[[int, protocol.Operation], Awaitable[None] | None] = lambda number, body: None
    after: Callable[[int, protocol.Operation], None] = lambda number, body: None
    operations: list[tuple[str, protocol.Operation]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    pongs: list[int] = field(default_factory=list)
    idles: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    retired: bool = False
    ws: web.WebSocketResponse | None = None
    request: web.Request | None = None

    def __post_init__(self) -> None:
        self.record: RunRecord | None = None
        self.context = b""
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/run", self._run)
        app.router.add_get("/v1/session", self._session)
        app.router.add_get("/v1/next", self._next)
        app.router.add_post("/v1/idle", self._idle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def stop(self) -> None:
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    async def hold(self, record: RunRecord) -> None:
        """This pod holds the run now."""
        self.record = record
        self.context = record.lease()
        await self.changed()

    async def retire(self) -> None:
        self.retired = True
        await self.changed()

    async def changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(condition)

    async def push(self, message: dict[str, Any]) -> None:
        assert self.ws is not None
        await self.ws.send_str(json.dumps(message))

    def cut(self) -> None:
        """As when the process goes: no close frame."""
        if self.request is not None and self.request.transport is not None:
            self.request.transport.abort()

    # ------------------------------------------------------------------------------------------- routes

    def _authorized(self, request: web.Request) -> bool:
        return self.secret is None or request.headers.get("Authorization") == f"Bearer {self.secret}"

    async def _run(self, request: web.Request) -> web.Response:
        await self._wait_for_run()
        if self.record is None:
            return self._refuse(problem("retiring", status=410))
        if not self._authorized(request):
            return self._refuse(problem("unauthorized", status=401))
        return web.Response(body=self.context, content_type="application/json")

    async def _next(self, request: web.Request) -> web.Response:
        await self._wait_for_run()
        if self.record is None:
            return self._refuse(problem("retiring", status=410))
        return web.json_response({"secret": self.secret})

    async def _wait_for_run(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.record is not None or self.retired)

    async def _idle(self, request: web.Request) -> web.Response:
        self.idles.append(await request.json())
        self.record = None
        await self.changed()
        return web.json_response({})

    async def _session(self, request: web.Request) -> web.StreamResponse:
        if not self._authorized(request):
            return self._refuse(problem("unauthorized", status=401))
        self.request = request
        self.ws = ws = web.WebSocketResponse(max_msg_size=0, compress=False)
        await ws.prepare(request)
        self.connections += 1
        await self.changed()
        with contextlib.suppress(ConnectionError):
            async for message in ws:
                assert message.type is WSMsgType.TEXT
                data = json.loads(message.data)
                if "pong" in data:
                    self.pongs.append(data["pong"])
                else:
                    await self._operation(ws, data["id"], data["req"], encode_json(data["body"]))
                await self.changed()
        await self.changed()
        return ws

    async def _operation(self, ws: web.WebSocketResponse, number: int, req: str, body: bytes) -> None:
        operation = protocol.decode_operation(body)
        self.operations.append((req, operation))
        assert self.record is not None
        try:
            reaction = self.react(len(self.operations), operation)
            if reaction is not None:
                await reaction
            answer = self.record.perform(self.record.epoch, req, operation)
        except Refused as refusal:
            await ws.send_str(f'{{"id":{number},"problem":{encode_json(refusal.problem).decode()}}}')
            return
        self.after(len(self.operations), operation)
        with contextlib.suppress(ConnectionError):
            await ws.send_str(f'{{"id":{number},"answer":{answer.decode()}}}')

    def _refuse(self, what: Problem) -> web.Response:
        return web.Response(status=what.status, body=encode_json(what), content_type="application/problem+json")


@contextlib.asynccontextmanager
async def fake_sidecar(folder: Path, **options: Any) -> AsyncIterator[FakeSidecar]:
    sidecar = FakeSidecar(folder / "agent.sock", **options)
    await sidecar.start()
    try:
        yield sidecar
    finally:
        await sidecar.stop()
