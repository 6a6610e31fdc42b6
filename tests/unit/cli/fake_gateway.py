"""A gateway that a test plays, and the runs that it tells of."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from typing import Any, Self

from aiohttp import web

from perdure_operator.config import TlsFiles

RUN_ID, CHILD_ID = "01a2009f-c5b4-767b-b506-659dd27ac9f7", "01a2009f-c5b4-767b-b506-659dd27ac9f8"
POD_ID = "6f1f3c0e-6c3b-4a0e-9d0c-3d1f2a9b7c55"


def run(**changes: Any) -> dict[str, Any]:
    return {
        "runId": RUN_ID, "namespace": "default", "name": "weekly", "pool": "default/worker", "state": "Running", "reason": "Leased",
        "message": "", "epoch": 2, "attempt": 1, "summary": "Weekly market report", "objective": "", "parent": None, "root": RUN_ID,
        "podId": POD_ID, "createdAt": "2026-11-21T12:00:00+00:00", "startedAt": None, "finishedAt": None, "waitingFor": [],
        "result": None, "error": None, "lastSeq": 3, "cancelRequested": False, "paused": False, "labels": {},
        "children": {"active": 0, "succeeded": 0, "failed": 0}, "steps": 2, "aFieldOfTomorrow": 1, **changes,
    }  # fmt: skip


EVENTS = [
    {"seq": 1, "at": "2026-11-21T12:00:00+00:00", "epoch": 0, "kind": "run.created", "data": {"pool": "default/worker"}},
    {"seq": 2, "at": "2026-11-21T12:00:01+00:00", "epoch": 2, "kind": "run.leased", "data": {"pod": POD_ID, "epoch": 2}},
    {"seq": 3, "at": "2026-11-21T12:00:02+00:00", "epoch": 2, "kind": "step.succeeded", "data": {"name": "crawl"}},
]


class Server:
    """An HTTP server in a thread of its own. ``tls``: certificate and key."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self.url = ""
        self.port = 0
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError


class FakeGateway(Server):
    """Answers what ``answers`` holds for "METHOD path"; keeps what it was sent."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        super().__init__(tls)
        self.answers: dict[str, Any] = {}
        self.requests: list[tuple[str, Any, dict[str, str]]] = []

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        what = f"{request.method} {request.path}"
        raw = await request.text()
        self.requests.append(
            (what, json.loads(raw) if raw else None, {**request.headers, **{f"?{k}": v for k, v in request.query.items()}})
        )
        usual = json.loads(raw) if request.method == "PUT" else {"items": []} if what.endswith("/-/pools") else None
        answer = self.answers.get(what, usual)
        if callable(answer):
            answer = answer(request)
        if answer is None:
            return problem(404, "run-not-found", "there is no such run", "Check the name.")
        if isinstance(answer, web.Response):
            return answer
        return web.json_response(answer, status=201 if request.method == "POST" else 200)

    def last(self) -> tuple[str, Any, dict[str, str]]:
        return self.requests[-1]


def problem(status: int, code: str, detail: str, action: str) -> web.Response:
    body = {"type": f"urn:perdure:{code}", "title": code, "status": status, "detail": detail, "retryable": False, "action": action}
    return web.json_response(body, status=status, content_type="application/problem+json")
