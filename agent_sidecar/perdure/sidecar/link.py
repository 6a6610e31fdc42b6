"""One connection to one gateway: the WebSocket handshake, frames out as bytes, frames in decoded.

A link is made by :func:`connect` and dies once; ``gateway_client`` makes the next one.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import ssl
from typing import Protocol, cast

import msgspec

from perdure import websocket
from perdure.protocol import MAX_FRAME_BYTES, FromGateway, decode_from_gateway
from perdure.sidecar import VERSION
from perdure.sidecar.config import GatewayAddress
from perdure.sidecar.http_parser import MAX_HEAD_BYTES, parse_response_head
from perdure.sidecar.problems import ProblemError

CONNECT_SECONDS = 5.0
_WRITE_HIGH_WATER = 1024 * 1024

log = logging.getLogger("perdure.sidecar.link")


class GatewayRefusedError(Exception):
    """The gateway answered the upgrade with another status; ``status`` 0: it did not speak HTTP or closed."""

    code = "gateway-refused"
    retryable = True

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}" if status else detail)
        self.status = status


class GatewayUntrustedError(OSError):
    """What answered showed a certificate that does not prove it to be the gateway. It was told nothing, the token least of all."""

    code = "gateway-untrusted"
    retryable = True

    def __init__(self, address: GatewayAddress, reason: str) -> None:
        super().__init__(f"the certificate of {address.host} is not to be trusted: {reason.rstrip('.')} (see PERDURE_GATEWAY_CA)")


class Endpoint(Protocol):
    """Who uses links, one at a time. ``on_connected`` comes first, ``on_disconnected`` last and once; between them frames in order."""

    batch: websocket.Batch

    def on_connected(self, link: Link) -> None: ...
    def on_frame(self, link: Link, frame: FromGateway) -> None: ...
    def on_writable(self) -> None:
        """Sending may go on after ``writable`` was False."""

    def on_disconnected(self, link: Link) -> None: ...


class Link(asyncio.Protocol):
    """``opened`` fails with GatewayRefusedError; ``closed`` gives the reason. ``last_heard``: loop time of the gateway's last byte."""

    def __init__(self, address: GatewayAddress, token: str | None, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        self.address = address
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        self.writable = True
        self.last_heard = loop.time()
        self._time = loop.time
        self._token = token
        self._endpoint = endpoint
        self._key = base64.b64encode(os.urandom(16))
        self._answer = bytearray()
        self._socket: websocket.WebSocket | None = None
        self._transport: asyncio.Transport | None = None

    # -------------------------------------------------------------------------------------------- used by the pod

    def send(self, frame: bytes) -> None:
        if self._socket is not None:
            self._socket.send(websocket.BINARY, frame)

    def ping(self) -> None:
        if self._socket is not None:
            self._socket.ping()

    def close(self, reason: str) -> None:
        """In order: what was sent before still goes out."""
        self._end(reason)
        if self._socket is not None:
            self._socket.close(websocket.GOING_AWAY, reason)
        elif self._transport is not None:
            self._transport.abort()

    def abort(self, reason: str) -> None:
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(reason)
        if self._socket is not None:
            self._endpoint.on_disconnected(self)
        if not self.opened.done():
            self.opened.set_exception(GatewayRefusedError(0, reason))

    # -------------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        lines = [
            "GET /v1/pod HTTP/1.1",
            f"Host: {host}:{self.address.port}",
            f"User-Agent: perdure-sidecar/{VERSION}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {self._key.decode()}",
        ]
        if self._token:
            lines.append(f"Authorization: Bearer {self._token}")
        self._transport.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}" if exc else "closed by the gateway")

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._endpoint.on_writable()

    def data_received(self, data: bytes) -> None:
        self.last_heard = self._time()
        if self.closed.done():
            return
        if self._socket is not None:
            self._socket.feed(data)
            return
        self._answer += data
        head, end, rest = bytes(self._answer).partition(b"\r\n\r\n")
        if end:
            self._answered(head, rest)
        elif len(head) > MAX_HEAD_BYTES:
            self.abort("no answer to the upgrade")

    # -------------------------------------------------------------------------------------------- handshake

    def _answered(self, head: bytes, rest: bytes) -> None:
        assert self._transport is not None
        try:
            status, headers = parse_response_head(head)
        except ProblemError as error:
            self.abort(f"no answer to the upgrade: {error}")
            return
        if status != 101:
            self.opened.set_exception(GatewayRefusedError(status, rest[:500].decode(errors="replace")))
            self.abort(f"refused with status {status}")
        elif headers.get("sec-websocket-accept", "").encode("latin-1") != websocket.accept_key(self._key):
            self.abort("the gateway did not prove the upgrade")
        else:
            self._socket = websocket.WebSocket(self._transport, self, client=True, max_bytes=MAX_FRAME_BYTES, batch=self._endpoint.batch)
            self._endpoint.on_connected(self)
            self.opened.set_result(None)
            if rest:
                self._socket.feed(rest)

    # -------------------------------------------------------------------------------------------- websocket.Listener

    def on_message(self, data: bytes) -> None:
        if self.closed.done():
            return  # by an earlier frame of the same read
        try:
            frame = decode_from_gateway(data)
        except msgspec.DecodeError as error:
            log.error("a frame of the gateway cannot be read", extra={"gateway": self.address.url, "error": str(error)})
            self.close("unreadable frame")
            return
        self._endpoint.on_frame(self, frame)

    def on_oversize(self, head: bytes, size: int) -> bool:
        log.error("a frame of the gateway is too large", extra={"gateway": self.address.url, "bytes": size})
        return False

    def on_close_frame(self, code: int, reason: str) -> None:
        self._end(f"closed by the gateway: {code} {reason}".rstrip())


async def connect(address: GatewayAddress, token: str | None, endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> Link:
    """``tls`` is for an ``https`` address. Raises OSError (GatewayUntrustedError among them), TimeoutError, GatewayRefusedError."""
    loop = asyncio.get_running_loop()
    link = Link(address, token, endpoint)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.create_connection(lambda: link, address.host, address.port, ssl=tls if address.tls else None)
            await link.opened
    except ssl.SSLCertVerificationError as error:
        raise GatewayUntrustedError(address, error.verify_message) from error
    except BaseException:
        link.abort("not opened")
        if link.opened.done() and not link.opened.cancelled():
            link.opened.exception()
        raise
    return link
