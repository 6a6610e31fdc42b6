"""The client's end of one WebSocket (RFC 6455) to the sidecar, text messages only.

Written out because it is small and an HTTP library costs an agent's cold start a quarter of a second. The other end is always the
sidecar on the same machine: no TLS, no extensions, no proxies.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from typing import Final, Protocol, cast

from perdure.protocol import MAX_FRAME_BYTES

_CONTINUATION: Final = 0x0
_TEXT: Final = 0x1
_BINARY: Final = 0x2
_CLOSE: Final = 0x8
_PING: Final = 0x9
_PONG: Final = 0xA
_ACCEPT_SUFFIX: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


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
        self._buffer = bytearray()
        self._message = bytearray()
        self._status = 0
        self.open = False

    def send(self, data: bytes) -> None:
        self._frame(_TEXT, data)

    def close(self) -> None:
        if self.open:
            self._frame(_CLOSE, b"\x03\xe8")
            self.open = False
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by type
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self.open and not self._handshake():
            return
        while self._next_frame():
            pass

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._owner.on_closed(self._status)

    # ------------------------------------------------------------------------------------------- in

    def _handshake(self) -> bool:
        head, found, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not found:
            return False
        lines = head.split(b"\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        wanted = base64.b64encode(hashlib.sha1(self._key + _ACCEPT_SUFFIX, usedforsecurity=False).digest())
        status = int(lines[0].split(b" ")[1])
        if status != 101 or headers.get(b"sec-websocket-accept") != wanted:
            self._status = status
            self.close()
            return False
        self._buffer = bytearray(rest)
        self.open = True
        self._owner.on_open()
        return True

    def _next_frame(self) -> bool:
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        size, start = buffer[1] & 0x7F, 2
        if size == 126:
            start = 4
            size = int.from_bytes(buffer[2:4], "big")
        elif size == 127:
            start = 10
            size = int.from_bytes(buffer[2:10], "big")
        if size > MAX_FRAME_BYTES or buffer[1] & 0x80:
            self.close()
            return False
        end = start + size
        if len(buffer) < end:
            return False
        first, payload = buffer[0], bytes(buffer[start:end])
        del buffer[:end]
        self._received(first & 0x0F, payload, final=bool(first & 0x80))
        return True

    def _received(self, opcode: int, payload: bytes, *, final: bool) -> None:
        if opcode in (_TEXT, _BINARY, _CONTINUATION):
            if final and not self._message:
                self._owner.on_message(payload)
                return
            self._message += payload
            if final:
                whole, self._message = bytes(self._message), bytearray()
                self._owner.on_message(whole)
        elif opcode == _PING:
            self._frame(_PONG, payload)
        elif opcode == _CLOSE:
            self.close()

    # ------------------------------------------------------------------------------------------- out

    def _frame(self, opcode: int, payload: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        size = len(payload)
        if size < 126:
            head = bytes((0x80 | opcode, 0x80 | size))
        elif size < 65536:
            head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
        else:
            head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
        mask = os.urandom(4)
        transport.write(head + mask + _masked(payload, mask))


def _masked(data: bytes, mask: bytes) -> bytes:
    size = len(data)
    whole = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(whole, "little")).to_bytes(size, "little")
