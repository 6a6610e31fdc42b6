"""A small HTTP/1.1 server for loopback: handlers are coroutines, one request of a connection at a time.

Flow: ``HttpConnection.data_received`` -> ``http_parser`` -> :class:`Request` -> the handler -> a :class:`Response`, a :class:`Stream`
(head now, bytes later) or an :class:`Upgrade` (the connection becomes a WebSocket). A handler whose client has gone is cancelled.

It serves processes of this pod, not the internet; it still bounds what one of them can make it hold in memory.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from msgspec import Struct

from perdure import websocket
from perdure.protocol import MAX_PAYLOAD_BYTES
from perdure.sidecar.http_parser import Head, RequestParser
from perdure.sidecar.problems import ProblemError, encode_problem, refuse

MAX_BODY_BYTES = 2 * MAX_PAYLOAD_BYTES + 65_536
"""Largest operation: an output and a slice of full size, and their envelope."""

MAX_CONNECTIONS = 512
MAX_BUFFERED_BYTES = 32 * 1024 * 1024
"""Bodies of all connections together; a request beyond is answered 503."""

MAX_PIPELINED = 8
LINGER_SECONDS = 2.0
"""How long the rest of a refused request is read and thrown away, so that its sender gets to see the refusal."""

REASONS = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    409: "Conflict", 410: "Gone", 413: "Content Too Large", 421: "Misdirected Request", 422: "Unprocessable Content",
    429: "Too Many Requests", 431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip

_PORT = re.compile(r":[0-9]+\Z")
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})

log = logging.getLogger("perdure.sidecar.http")


class Request(Struct, frozen=True):
    """``headers`` have lower-case names. ``unix``: it came over the unix socket. ``upgrade``: what the connection is to become, or ""."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    unix: bool
    upgrade: str

    def parameter(self, name: str) -> str | None:
        for part in self.query.split("&"):
            key, _, value = part.partition("=")
            if key == name:
                return value
        return None


class Response(Struct, frozen=True):
    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class Channel(Protocol):
    """What lives on a connection after a :class:`Stream` or an :class:`Upgrade`."""

    def received(self, data: bytes) -> None: ...
    def gone(self) -> None:
        """The connection is closed; called once."""

    def writable(self, yes: bool) -> None:
        """The other side has stopped, or gone on, reading what is sent to it."""


class Stream(Struct, frozen=True):
    """A response without a length. ``open`` gets the transport after the head is written and gives the channel that writes to it."""

    content_type: str
    open: Callable[[asyncio.Transport], Channel]


class Upgrade(Struct, frozen=True):
    open: Callable[[asyncio.Transport], Channel]


Reply = Response | Stream | Upgrade
Handler = Callable[[Request], Awaitable[Reply]]


class HttpServer:
    """The connections of all listeners. ``busy``: at least one request is being answered or one channel is open."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections: set[HttpConnection] = set()
        self.buffered_bytes = 0

    def factory(self, *, unix: bool) -> Callable[[], HttpConnection]:
        return lambda: HttpConnection(self, unix=unix)

    @property
    def busy(self) -> bool:
        return any(connection.busy for connection in self.connections)

    def close(self) -> None:
        for connection in tuple(self.connections):
            connection.transport.close()


class HttpConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, server: HttpServer, *, unix: bool) -> None:
        self._server = server
        self._unix = unix
        self._parser = RequestParser(self)
        self._queue: deque[tuple[Request | ProblemError, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._refused = False
        self._buffered_bytes = 0
        self._body_bytes = 0

    @property
    def busy(self) -> bool:
        return self._task is not None or self._channel is not None

    # -------------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if len(self._server.connections) >= MAX_CONNECTIONS:
            self._refused = True
            self._write(self._problem(refuse("busy", f"{MAX_CONNECTIONS} connections are open")), keep_alive=False)
            self.transport.close()
            return
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._channel is not None:
            self._channel.gone()
        self._account(-self._buffered_bytes)

    def _account(self, size: int) -> None:
        self._buffered_bytes += size
        self._server.buffered_bytes += size

    def pause_writing(self) -> None:
        if self._channel is not None:
            self._channel.writable(False)

    def resume_writing(self) -> None:
        if self._channel is not None:
            self._channel.writable(True)

    def data_received(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.received(data)
            return
        if self._refused:
            return
        try:
            self._parser.feed(data)
        except ProblemError as error:
            self._refuse(error)
        if self._parser.upgraded:
            self.transport.pause_reading()

    # -------------------------------------------------------------------------------------------- http_parser.Sink

    def on_head(self, head: Head) -> None:
        self._body_bytes = 0
        if head.length is not None and head.length > MAX_BODY_BYTES:
            raise _too_large(head.length)
        if self._server.buffered_bytes > MAX_BUFFERED_BYTES:
            raise refuse("busy", f"bodies of {self._server.buffered_bytes} bytes wait for the gateway")
        if head.headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, size: int) -> None:
        self._body_bytes += size
        if self._body_bytes > MAX_BODY_BYTES:
            raise _too_large(self._body_bytes)
        self._account(size)

    def on_request(self, head: Head, body: bytes) -> None:
        path, _, query = head.target.partition("?")
        request = Request(head.method, path, query, head.headers, body, self._unix, head.upgrade)
        self._enqueue(request, keep_alive=head.keep_alive and not head.upgrade)

    def _enqueue(self, request: Request | ProblemError, *, keep_alive: bool) -> None:
        self._queue.append((request, keep_alive))
        if len(self._queue) == MAX_PIPELINED:
            self.transport.pause_reading()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._answer())

    # -------------------------------------------------------------------------------------------- answering

    async def _answer(self) -> None:
        """Answers what is queued, in order, until the queue is empty or the connection has become something else."""
        while self._queue and not self.transport.is_closing():
            request, keep_alive = self._queue.popleft()
            if len(self._queue) == MAX_PIPELINED - 1:
                self.transport.resume_reading()
            if isinstance(request, ProblemError):
                self._refuse_now(request)
                break
            reply = await self._reply(request)
            self._account(-len(request.body))
            if isinstance(reply, Response):
                self._write(reply, keep_alive=keep_alive, head_only=request.method == "HEAD")
                if not keep_alive:
                    self.transport.close()
            elif isinstance(reply, Stream):
                head = f"HTTP/1.1 200 OK\r\nContent-Type: {reply.content_type}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
                self.transport.write(head.encode("ascii"))
                self._channel = reply.open(self.transport)
                break
            else:
                self._switch(request, reply)
                break
        self._task = None

    async def _reply(self, request: Request) -> Reply:
        try:
            _from_this_machine(request)
            return await self._server.handler(request)
        except ProblemError as error:
            return self._problem(error)
        except Exception as error:
            log.exception("a handler failed", extra={"path": request.path})
            return self._problem(refuse("internal", f"{type(error).__name__} while answering {request.method} {request.path[:200]}"))

    @staticmethod
    def _problem(error: ProblemError) -> Response:
        retry = (("Retry-After", "1"),) if error.problem.status == 503 else ()
        return Response(error.problem.status, encode_problem(error.problem), "application/problem+json", retry)

    def _write(self, response: Response, *, keep_alive: bool, head_only: bool = False) -> None:
        lines = [f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Unknown')}"]
        if response.status != 204:
            lines.append(f"Content-Type: {response.content_type}\r\nContent-Length: {len(response.body)}")
        lines.extend(f"{name}: {value}" for name, value in response.headers)
        if not keep_alive:
            lines.append("Connection: close")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if head_only or len(response.body) > 65_536:
            self.transport.write(head)
            if not head_only:
                self.transport.write(response.body)
        else:
            self.transport.write(head + response.body)

    def _refuse(self, error: ProblemError) -> None:
        """The stream of requests cannot go on after this answer."""
        self._refused = True
        self._enqueue(error, keep_alive=False)

    def _refuse_now(self, error: ProblemError) -> None:
        """Answers, then reads on for a while only to throw away: closing at once would take the answer away from a sender at work."""
        self._write(self._problem(error), keep_alive=False)
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # -------------------------------------------------------------------------------------------- upgrade

    def _switch(self, request: Request, reply: Upgrade) -> None:
        key = request.headers.get("sec-websocket-key", "").encode("latin-1")
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n"
        self.transport.write(head % websocket.accept_key(key))
        self._channel = reply.open(self.transport)
        self.transport.resume_reading()
        if early := self._parser.rest:
            self._channel.received(early)


def _from_this_machine(request: Request) -> None:
    """A web page in a browser on this machine reaches loopback too; it is known by its Origin, or after DNS rebinding by its Host."""
    if "origin" in request.headers:
        raise refuse("foreign-origin", "the request has an Origin header, so a web page made it")
    host = request.headers.get("host", "localhost")
    if not request.unix and _PORT.sub("", host) not in LOOPBACK_HOSTS:
        raise refuse("misdirected", f"the Host header is {host[:100]!r}")


def _too_large(size: int) -> ProblemError:
    return refuse("payload-too-large", f"the body has {size} bytes or more; the limit is {MAX_BODY_BYTES}")
