"""The loopback API: which path is what. HTTP in, pod out; nothing is decided here that the pod could decide."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from msgspec import Struct

from perdure.protocol import OPERATION_PATHS, Answer
from perdure.sidecar.gateway_client import GatewayClient
from perdure.sidecar.http_server import Reply, Request, Response, Stream, Upgrade
from perdure.sidecar.metrics import CONTENT_TYPE, Metrics
from perdure.sidecar.outbox import Outcome, Waiter
from perdure.sidecar.pod import Pod
from perdure.sidecar.problems import encode_problem, refuse
from perdure.sidecar.receipts import Receipts
from perdure.sidecar.run import HeldRun, State, closed_token
from perdure.sidecar.session import Session
from perdure.sidecar.stream import EventStream

REQUEST_ID: Final = "perdure-request-id"
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class ChildEnded(Struct, rename="camel", forbid_unknown_fields=True):
    """Body of ``POST /v1/idle``. ``clean``: no process of the run is left. ``exitCode``: None if it was killed by a signal."""

    clean: bool
    exit_code: int | None = None


_child_ended = msgspec.json.Decoder(ChildEnded)


def splice_tag(op: str, body: bytes) -> bytes:
    """Puts the ``op`` tag in front of the fields of a JSON object. Raises ProblemError if it does not begin like one."""
    text = body.strip() or b"{}"
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise refuse("bad-request", "the body must be a JSON object")
    fields = text[1:].lstrip()
    return b'{"op":"%b"%b%b' % (op.encode(), b"" if fields == b"}" else b",", fields)


class Api:
    def __init__(self, pod: Pod, gateway: GatewayClient, receipts: Receipts | None, *, reuse: bool, parent_secret: str | None) -> None:
        self._pod = pod
        self._gateway = gateway
        self._receipts = receipts
        self._parent_secret = parent_secret
        self._operations = {f"/v1/{path}": op for op, path in OPERATION_PATHS.items()}
        self._routes: dict[str, dict[str, Callable[[Request], Awaitable[Reply]]]] = {
            "/v1/run": {"GET": self._run},
            "/v1/stream": {"GET": self._stream},
            "/v1/session": {"GET": self._session},
            "/healthz": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
        }
        if reuse:
            self._routes |= {"/v1/next": {"GET": self._next}, "/v1/idle": {"POST": self._idle}}

    async def __call__(self, request: Request) -> Reply:
        """Raises ProblemError."""
        op = self._operations.get(request.path)
        if op is not None and request.method == "POST":
            return await self._operation(op, request)
        methods = self._routes.get(request.path) if op is None else {"POST": None}
        if methods is None:
            raise refuse("not-found", f"no path {request.path[:200]!r}")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise refuse("method-not-allowed", f"{request.path} takes {', '.join(methods)}")
        return await handler(request)

    # -------------------------------------------------------------------------------------------- the run

    async def _run(self, request: Request) -> Reply:
        return await _within(request, self._pod.context(_bearer(request), fetches=_fetches(request)))

    async def _operation(self, op: str, request: Request) -> Reply:
        req = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        if not _UUID.fullmatch(req):
            raise refuse("bad-request", f"Perdure-Request-Id must be a UUID, not {req[:100]!r}")
        body, secret, pod = splice_tag(op, request.body), _bearer(request), self._pod
        run = pod.running(secret, op)
        while pod.outbox.full:
            room = asyncio.Event()
            pod.outbox.when_room(room.set)
            await room.wait()
            run = pod.running(secret, op)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def settled(outcome: Outcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        try:
            if op == "activity.end" and self._receipts is not None:
                # Shielded: once it is on disk it is also sent, whether or not its sender still waits.
                await asyncio.shield(self._perform_kept(self._receipts, run, req, body, settled))
            else:
                pod.perform(run, op=op, body=body, req=req, waiter=settled)
        except msgspec.DecodeError as error:
            raise refuse("bad-request", f"the body is not JSON: {error}") from error
        outcome = await answer
        headers = (("Perdure-Request-Id", req),)
        if isinstance(outcome, Answer):
            return Response(200, outcome.body, headers=headers)
        return Response(outcome.problem.status, encode_problem(outcome.problem), "application/problem+json", headers)

    async def _perform_kept(self, receipts: Receipts, run: HeldRun, req: str, body: bytes, waiter: Waiter) -> None:
        """Puts a receipt on disk first and takes it off when the gateway has it. Raises msgspec.DecodeError."""
        closed_token(body)
        record = await receipts.keep(run=run.run, epoch=run.epoch, req=req, body=body)

        def settled(outcome: Outcome) -> None:
            receipts.answered(self._pod.submit, record, outcome)
            waiter(outcome)

        self._pod.perform(run, op="activity.end", body=body, req=req, waiter=settled)

    async def _stream(self, request: Request) -> Reply:
        self._admit(request)
        return Stream("text/event-stream", lambda transport: EventStream(transport, self._pod))

    async def _session(self, request: Request) -> Reply:
        secret = self._admit(request)
        headers = request.headers
        if request.upgrade != "websocket" or headers.get("sec-websocket-version") != "13" or "sec-websocket-key" not in headers:
            raise refuse("bad-request", "this path is a WebSocket, version 13")
        self._pod.fetches |= _fetches(request)
        return Upgrade(lambda transport: Session(transport, self._pod, secret))

    def _admit(self, request: Request) -> str | None:
        """Channels may be opened before there is a run, but not with a secret that is not the run's."""
        secret, run = _bearer(request), self._pod.held
        if self._pod.reuse if run is None else not run.admits(secret):
            raise refuse("unauthorized", "this pod runs each run under its own secret")
        return secret

    # -------------------------------------------------------------------------------------------- the parent of ForkPerRun

    async def _next(self, request: Request) -> Reply:
        self._parent_only(request)
        self._pod.fetches |= _fetches(request)

        async def secret() -> bytes:
            return msgspec.json.encode({"secret": await self._pod.next_secret()})

        return await _within(request, secret())

    async def _idle(self, request: Request) -> Reply:
        self._parent_only(request)
        try:
            ended = _child_ended.decode(request.body)
        except msgspec.DecodeError as error:
            raise refuse("bad-request", str(error)) from error
        await self._pod.child_ended(clean=ended.clean, exit_code=ended.exit_code)
        return Response(200, msgspec.json.encode({"retiring": bool(self._pod.retiring)}))

    def _parent_only(self, request: Request) -> None:
        if not request.unix:
            raise refuse("parent-only", "this path is served on the unix socket only")
        if self._parent_secret is not None and _bearer(request) != self._parent_secret:
            raise refuse("parent-only", "the parent's secret is missing or wrong")

    # -------------------------------------------------------------------------------------------- for the people around

    async def _health(self, request: Request) -> Reply:
        pod = self._pod
        state = "retiring" if pod.retiring else pod.held.state.value if pod.held else "idle"
        return Response(200, msgspec.json.encode({"state": state, "gateway": pod.link.address.url if pod.link else None}))

    async def _metrics(self, request: Request) -> Reply:
        pod = self._pod
        age = pod.presence.age(asyncio.get_running_loop().time())
        gauges: dict[str, tuple[str, float]] = {
            "in_flight": ("Operations without an answer.", len(pod.outbox)),
            "in_flight_bytes": ("Their size.", pod.outbox.size),
            "gateway_connected": ("1 while there is a connection to a gateway.", float(pod.link is not None)),
            "gateway_connects_total": ("Connections made.", self._gateway.connects),
            "gateway_failures_total": ("Attempts that made no connection.", self._gateway.failures),
            "lease_held": ("1 while this pod holds a run.", float(pod.held is not None and pod.held.state is State.LIVE)),
            "sessions": ("Open sessions of the agent.", len(pod.presence.sessions)),
            "agent_age_seconds": ("Since the agent last showed that it lives; -1 when nothing can show it.", -1.0 if age is None else age),
        }
        if self._receipts is not None:
            gauges["spool_receipts"] = ("Receipts on disk that the gateway has not taken.", self._receipts.unacknowledged)
            gauges["spool_damage_total"] = ("Places in the spool that could not be read.", self._receipts.damaged)
            gauges["spool_failures_total"] = ("Receipts that could not be written to the spool.", self._receipts.failed)
        return Response(200, pod.metrics.exposition(gauges), CONTENT_TYPE)

    async def _openapi(self, request: Request) -> Reply:
        from perdure.sidecar.openapi import document  # costs time and memory that no agent needs

        return Response(200, msgspec.json.encode(document()))


def make_metrics() -> Metrics:
    return Metrics(OPERATION_PATHS)


def _bearer(request: Request) -> str | None:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def _fetches(request: Request) -> bool:
    """Whether this agent fetches what is too large to come with the run."""
    return request.parameter("fetch") == "true"


async def _within(request: Request, answer: Awaitable[bytes]) -> Reply:
    """200, or 204 when ``?timeout=`` seconds have passed; without it there is no limit."""
    text = request.parameter("timeout")
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if seconds is not None and not seconds >= 0:
        raise refuse("bad-request", f"timeout must be a number of seconds, not {str(text)[:100]!r}")
    try:
        async with asyncio.timeout(seconds):
            return Response(200, await answer)
    except TimeoutError:
        return Response(204)
