"""The shell agent against a loopback API that keeps a journal: every body must be a valid operation of the protocol."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from perdure.protocol import (
    OPERATION_PATHS,
    ActivityBegin,
    ActivityDecision,
    ActivityEnd,
    ActivityResolve,
    Finish,
    Fired,
    StepBegin,
    StepDecision,
    StepEnd,
    WaitAnswer,
    WaitBegin,
    WaitOutcome,
    decode_operation,
)

ROOT = Path(__file__).parents[3]
KEY = "k-1"

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the shell agent needs curl")


class Loopback:
    """One run, its journal and its webhook."""

    def __init__(self) -> None:
        self.steps: dict[str, StepEnd] = {}
        self.approved = False
        self.activity: str | None = None
        self.finished: Finish | None = None
        self.measured = 0
        self.webhook: list[str] = []
        self.lose_receipt = False
        self.deaf = False
        self.unproven = False
        self.asked_by = ""
        self.mute = 0
        self.url = self.hook_url = ""

    async def run(self, _request: web.Request) -> web.Response:
        context = {"runId": "r-1", "attempt": 1, "input": {"notifyUrl": self.hook_url or f"{self.url}/hook"}, "journal": []}
        return web.json_response(context)

    async def operation(self, request: web.Request) -> web.Response:
        op = next(op for op, path in OPERATION_PATHS.items() if path == request.match_info["path"])
        body = decode_operation(b'{"op":"%s",' % op.encode() + (await request.read())[1:])
        if isinstance(body, ActivityEnd) and self.lose_receipt:
            self.lose_receipt = False
            return web.json_response({}, status=409)
        return web.Response(body=msgspec.json.encode(self.answer(body)), content_type="application/json")

    def answer(self, body: Any) -> Any:
        match body:
            case StepBegin():
                done = self.steps.get("step:measure#0")
                return (
                    StepDecision(decision="done", key="step:measure#0", output=done.output)
                    if done
                    else StepDecision(decision="execute", key="step:measure#0")
                )
            case StepEnd():
                self.measured += 1
                self.steps[body.key] = body
                return {"seq": 1}
            case WaitBegin():
                assert body.suspend
                if body.on[0].name == f"effect:{KEY}:1":
                    answer = [Fired(index=0, kind="signal", name=body.on[0].name, payload=msgspec.Raw(b'{"happened": false}'))]
                    return WaitAnswer(status="done", outcomes={body.key: WaitOutcome(status="satisfied", fired=answer)})
                fired = [Fired(index=0, kind="signal", name="approved", payload=msgspec.Raw(b'{"by": "Ada"}'))]
                outcome = WaitOutcome(status="satisfied", fired=fired)
                return WaitAnswer(status="done", outcomes={body.key: outcome}) if self.approved else WaitAnswer(status="suspended")
            case ActivityBegin():
                assert body.max_retries == 20
                if self.activity == "failed":
                    return ActivityDecision(decision="failed", key=KEY, message="the retries of this call are used up")
                if self.activity is None:
                    self.activity = "running"
                    return ActivityDecision(decision="execute", key=KEY, token="t")
                if self.activity == "succeeded":
                    return ActivityDecision(decision="receipt", key=KEY)
                return ActivityDecision(decision="unknown", key=KEY, policy="query", retry_after_seconds=0.01)
            case ActivityResolve(happened=False, by="query") if self.unproven:
                return ActivityDecision(
                    decision="unknown", key=KEY, policy="ask", message="nothing proves that the earlier executor is gone"
                )
            case ActivityResolve(happened=happened, by=by):
                self.asked_by = by
                self.activity = "succeeded" if happened else "running"
                return (
                    ActivityDecision(decision="receipt", key=KEY) if happened else ActivityDecision(decision="retry", key=KEY, token="t2")
                )
            case ActivityEnd():
                self.activity = body.state
                return {"state": body.state}
            case Finish():
                self.finished = body
                return {"state": "Succeeded"}
        raise AssertionError(body)

    async def hook(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            if self.mute:
                self.mute -= 1
                return web.Response(status=503, text=request.query["key"])
            return web.json_response({"items": [{"key": key} for key in self.webhook if key == request.query["key"]]})
        if self.deaf:
            self.deaf = False
            return web.Response(status=502)
        self.webhook.append(request.headers["Idempotency-Key"])
        return web.json_response({})

    async def start(self, port: int) -> int:
        environment = {**os.environ, "PERDURE_PORT": str(port)}
        process = await asyncio.create_subprocess_exec("sh", "examples/shell/agent.sh", cwd=ROOT, env=environment)
        return await process.wait()


@pytest.fixture
async def loopback() -> AsyncIterator[tuple[Loopback, int]]:
    state = Loopback()
    app = web.Application()
    app.router.add_get("/v1/run", state.run)
    app.router.add_post("/v1/{path:.+}", state.operation)
    app.router.add_route("*", "/hook", state.hook)
    async with TestServer(app) as server:
        state.url = str(server.make_url("")).rstrip("/")
        assert server.port is not None
        yield state, server.port


async def test_it_suspends_and_goes_on_after_the_signal(loopback: tuple[Loopback, int]) -> None:
    state, port = loopback
    assert await state.start(port) == 0
    assert (state.measured, state.finished, state.webhook) == (1, None, [])
    state.approved = True
    assert await state.start(port) == 0
    assert (state.measured, state.webhook) == (1, [KEY])
    assert state.finished is not None
    assert state.finished.outcome == "succeeded"
    assert msgspec.json.decode(state.finished.output) == msgspec.json.decode(state.steps["step:measure#0"].output)


async def test_a_lost_receipt_is_asked_for_and_not_sent_again(loopback: tuple[Loopback, int]) -> None:
    state, port = loopback
    state.approved = state.lose_receipt = True
    assert await state.start(port) == 22
    assert await state.start(port) == 0
    assert state.webhook == [KEY]
    assert state.finished is not None


async def test_a_webhook_that_does_not_say_is_asked_until_it_does(loopback: tuple[Loopback, int]) -> None:
    state, port = loopback
    state.approved = state.lose_receipt = True
    state.mute = 1
    assert await state.start(port) == 22
    assert await state.start(port) == 0
    assert state.webhook == [KEY], "that it did not answer was taken for a no"
    assert state.mute == 0
    assert state.finished is not None


async def test_a_call_that_did_not_arrive_is_made_again(loopback: tuple[Loopback, int]) -> None:
    state, port = loopback
    state.approved = state.deaf = True
    assert await state.start(port) == 0
    assert state.webhook == [KEY]
    assert state.activity == "succeeded"


async def test_a_webhook_that_never_answers_fails_the_run_and_says_why(loopback: tuple[Loopback, int]) -> None:
    state, port = loopback
    state.approved, state.hook_url = True, "http://127.0.0.1:9/hook"
    assert await state.start(port) == 1
    assert state.finished is not None
    assert state.finished.error is not None
    assert state.finished.error.type == "NotifyFailed"
    assert state.finished.error.message == "the webhook http://127.0.0.1:9/hook could not be reached, and all retries are used up"
    assert not state.finished.error.retryable


async def test_where_nothing_proves_that_the_old_worker_is_gone_a_person_is_asked(loopback: tuple[Loopback, int]) -> None:
    state, port = loopback
    state.approved = state.deaf = state.unproven = True
    assert await state.start(port) == 0
    assert (state.webhook, state.asked_by) == ([KEY], "person")
