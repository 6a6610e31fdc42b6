"""The agent's end of its session with the sidecar: the upgrade, then the codec that both use (:mod:`perdure.websocket`)."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Protocol, cast

from perdure.protocol import MAX_FRAME_BYTES
from perdure.websocket import TEXT, Batch, WebSocket, accept_key


class Owner(Protocol):
    def on_open(self) -> None: ...

    def on_message(self, data: bytes) -> None: ...

    def on_closed(self, status: int) -> None:
        """Once. ``status``: HTTP status of a refused handshake, 0 for a connection that ended."""


class WebSocketClient(asyncio.Protocol):
    """Use as a protocol factory's product; it opens the session at ``path`` by itself."""

    def __init__(self, owner: Owner, path: str, secret: str | None) -> None:
        self._owner = owner
        self._key = base64.b64encode(os.urandom(16))
        authorization = f"Authorization: Bearer {secret}\r\n" if secret else ""
        self._request = (
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Upgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {self._key.decode()}\r\n\r\n"
        ).encode()
        self._transport: asyncio.Transport | None = None
        self._socket: WebSocket | None = None
        self._answer = bytearray()
        self._status = 0

    @property
    def open(self) -> bool:
        return self._socket is not None and not self._socket.closing

    def send(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.send(TEXT, data)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        elif self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by type
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.feed(data)
            return
        self._answer += data
        head, found, rest = bytes(self._answer).partition(b"\r\n\r\n")
        if found:
            self._upgraded(head, rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._socket = None
        self._owner.on_closed(self._status)

    def _upgraded(self, head: bytes, rest: bytes) -> None:
        assert self._transport is not None
        lines = head.split(b"\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        status = int(lines[0].split(b" ")[1])
        if status != 101 or headers.get(b"sec-websocket-accept") != accept_key(self._key):
            self._status = status
            self._transport.close()
            return
        self._socket = WebSocket(self._transport, self, client=True, max_bytes=MAX_FRAME_BYTES, batch=Batch())
        self._owner.on_open()
        if rest:
            self._socket.feed(rest)

    # ------------------------------------------------------------------------------------------- perdure.websocket.Listener

    def on_message(self, data: bytes) -> None:
        self._owner.on_message(data)

    def on_oversize(self, head: bytes, size: int) -> bool:
        return False

    def on_close_frame(self, code: int, reason: str) -> None:
        """The connection ends next, and the owner hears of that."""
