"""The client side of a pod's WebSocket, as little of RFC 6455 as a load driver needs, so that the driver stays cheap.

The mask key is zero, which the RFC allows and which makes masking free; the server cannot tell and unmasks as ever. Messages from the
gateway are whole frames (it never fragments).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

_NO_MASK = b"\0\0\0\0"
_BINARY, _CLOSE, _PING, _PONG = 0x2, 0x8, 0x9, 0xA


class WebSocket(asyncio.Protocol):
    """``on_message`` gets each binary message, ``on_lost`` is called once when the connection ends, with why."""

    def __init__(self, request: bytes, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._upgraded = False
        self._rest = b""

    def send(self, payload: bytes, opcode: int = _BINARY) -> None:
        assert self._transport is not None
        size = len(payload)
        if size < 126:
            head = bytes((0x80 | opcode, 0x80 | size))
        elif size < 65536:
            head = bytes((0x80 | opcode, 0xFE, size >> 8, size & 0xFF))
        else:
            head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
        self._transport.write(head + _NO_MASK + payload)

    def close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.send(b"\x03\xe9", _CLOSE)
            self._transport.close()

    # ------------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"the connection ended: {exc or 'closed by the gateway'}"
        if not self.opened.done():
            self.opened.set_exception(ConnectionError(why))
        self._on_lost(why)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at = 0 if self._upgraded else self._upgrade(data)
        while self._upgraded and len(data) - at >= 2:
            size, start = data[at + 1], at + 2
            if size == 126:
                start = at + 4
                size = int.from_bytes(data[at + 2 : start], "big")
            elif size == 127:
                start = at + 10
                size = int.from_bytes(data[at + 2 : start], "big")
            if len(data) < start + size:
                break
            self._frame(data[at] & 0x0F, data[start : start + size])
            at = start + size
        self._rest = data[at:]

    def _upgrade(self, data: bytes) -> int:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return 0
        if not data.startswith(b"HTTP/1.1 101"):
            self.opened.set_exception(ConnectionError(f"no upgrade: {data[:300].decode(errors='replace')}"))
            return len(data)
        self._upgraded = True
        self.opened.set_result(None)
        return end + 4

    def _frame(self, opcode: int, payload: bytes) -> None:
        if opcode == _BINARY:
            self._on_message(payload)
        elif opcode == _PING:
            self.send(payload, _PONG)


async def connect(
    host: str, port: int, path: str, token: str, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]
) -> WebSocket:
    """Raises OSError."""
    request = (
        f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer {token}\r\n\r\n"
    )
    socket = WebSocket(request.encode(), on_message, on_lost)
    await asyncio.get_running_loop().create_connection(lambda: socket, host, port)
    await socket.opened
    return socket
