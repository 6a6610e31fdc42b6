"""RFC 6455 framing for both sides of one connection, without extensions.

Written here because it is the hot path of every operation and the libraries at hand cost this process 5 to 15 MiB and up to 0.3 s of
its start; the tests speak to it with an independent implementation. Bytes go in by :meth:`WebSocket.feed`, whole messages come out at
the listener; nothing is awaited. Who owns the transport tells of its loss.

Text is not checked for UTF-8 here: each message is JSON that a decoder checks next.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from typing import Final, Protocol

TEXT: Final = 0x1
BINARY: Final = 0x2
_CONTINUATION: Final = 0x0
_CLOSE: Final = 0x8
_PING: Final = 0x9
_PONG: Final = 0xA

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
UNSUPPORTED_DATA: Final = 1003
TOO_BIG: Final = 1009

_ACCEPT_SUFFIX: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_OVERSIZE_HEAD: Final = 512
_CLOSE_SECONDS: Final = 1.0
_BATCH_BYTES: Final = 65_536
_TABLE_BYTES: Final = 8192
_EVERY_BYTE: Final = bytes(range(256))


class Transport(Protocol):
    """The part of asyncio.Transport that framing needs."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool: ...


class Listener(Protocol):
    def on_message(self, data: bytes) -> None: ...

    def on_oversize(self, head: bytes, size: int) -> bool:
        """A message of ``size`` bytes is over the limit and is being thrown away; ``head`` is how it begins. False: close instead."""

    def on_close_frame(self, code: int, reason: str) -> None: ...


class ProtocolViolationError(Exception):
    """The other side broke RFC 6455; ``close_code`` is what it is told."""

    code = "websocket-protocol"
    retryable = False

    def __init__(self, close_code: int, message: str) -> None:
        super().__init__(message)
        self.close_code = close_code


def accept_key(key: bytes) -> bytes:
    """RFC 6455, 4.2.2: what proves that the server understood the upgrade."""
    return base64.b64encode(hashlib.sha1(key + _ACCEPT_SUFFIX, usedforsecurity=False).digest())


def apply_mask(data: bytes, key: bytes) -> bytes:
    """XOR with the key, again and again. As one large integer, which is the fastest for a small message; a large one goes byte by byte
    through a table for each byte of the key, which is four times as fast there."""
    size = len(data)
    if size < _TABLE_BYTES:
        mask = (key * ((size >> 2) + 1))[:size]
        return (int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")).to_bytes(size, "little")
    masked = bytearray(size)
    for at in range(4):
        masked[at::4] = data[at::4].translate(apply_mask(_EVERY_BYTE, key[at : at + 1] * 4))
    return bytes(masked)


def encode_frame(opcode: int, payload: bytes, *, masked: bool) -> bytes:
    """One final frame. ``masked``: this side is the client."""
    size = len(payload)
    mask_bit = 0x80 if masked else 0
    if size < 126:
        head = bytes((0x80 | opcode, mask_bit | size))
    elif size < 65536:
        head = bytes((0x80 | opcode, mask_bit | 126, size >> 8, size & 0xFF))
    else:
        head = bytes((0x80 | opcode, mask_bit | 127)) + size.to_bytes(8, "big")
    if not masked:
        return head + payload
    key = os.urandom(4)
    return head + key + apply_mask(payload, key)


class Batch:
    """Sockets that feed each other. What the messages of one read cause to be sent, on any of them, goes out together when the read is
    done: one system call a socket instead of one a message, and those are half of what a message costs."""

    def __init__(self) -> None:
        self.reading = 0
        self.waiting: list[WebSocket] = []

    def flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        for socket in waiting:
            socket.flush()


class WebSocket:
    """One open connection. ``client``: this side made the connection, so it masks and the other side must not."""

    def __init__(self, transport: Transport, listener: Listener, *, client: bool, max_bytes: int, batch: Batch) -> None:
        self._transport = transport
        self._listener = listener
        self._batch = batch
        self._out: list[bytes] = []
        self._out_size = 0
        self._client = client
        self._max_bytes = max_bytes
        self._pending = bytearray()
        self._need = 0
        self._skip = 0
        self._fragments = bytearray()
        self._in_message = False
        self._close_sent = False

    @property
    def closing(self) -> bool:
        return self._close_sent or self._transport.is_closing()

    def send(self, opcode: int, payload: bytes) -> None:
        """Nothing is sent once this side has said that it closes."""
        if self._close_sent:
            return
        frame = encode_frame(opcode, payload, masked=self._client)
        if not self._out and not self._batch.reading:
            self._transport.write(frame)
            return
        if not self._out:
            self._batch.waiting.append(self)
        self._out.append(frame)
        self._out_size += len(frame)
        if self._out_size > _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sends what waits for the end of a read."""
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()
            self._out_size = 0

    def _shut(self) -> None:
        self.flush()
        self._transport.close()

    def ping(self) -> None:
        self.send(_PING, b"")

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Says that this side closes, and closes the transport when the other side has said so too, or after a second. (Closing it at
        once while there are unread bytes would reset the connection and take away what was just sent.)"""
        if self._close_sent:
            return
        self.send(_CLOSE, code.to_bytes(2, "big") + reason.encode()[:123])
        self._close_sent = True
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._shut)

    def feed(self, data: bytes) -> None:
        """Takes what the transport received. A violation closes the connection with its code and is told to the listener as a close."""
        self._batch.reading += 1
        try:
            self._feed(data)
        except ProtocolViolationError as violation:
            self.close(violation.close_code, str(violation))
            self._shut()
            self._listener.on_close_frame(violation.close_code, str(violation))
        finally:
            self._batch.reading -= 1
            self._batch.flush()

    def _feed(self, data: bytes) -> None:
        if self._skip:
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            data = data[dropped:]
        if self._pending:
            self._pending += data
            if len(self._pending) < self._need:
                return
            data = bytes(self._pending)
            self._pending = bytearray()
        at = self._frames(data)
        if at < len(data):
            self._pending += data[at:] if at else data

    def _frames(self, data: bytes) -> int:
        """Handles the whole frames of ``data``; gives the offset of the first that is not, and keeps in ``_need`` how long that is."""
        at, end = 0, len(data)
        while True:
            self._need = 2
            if end - at < 2:
                return at
            first, second = data[at], data[at + 1]
            size, start = second & 0x7F, at + 2
            if size == 126:
                start, self._need = at + 4, 4
                size = int.from_bytes(data[at + 2 : start], "big")
            elif size == 127:
                start, self._need = at + 10, 10
                size = int.from_bytes(data[at + 2 : start], "big")
            masked = second >= 0x80
            if masked:
                start += 4
                self._need += 4
            if end < start:
                return at
            if first & 0x70 or masked is self._client:
                raise ProtocolViolationError(PROTOCOL_ERROR, "reserved bit set" if first & 0x70 else "masked by the wrong side")
            key = data[start - 4 : start] if masked else b""
            opcode, stop = first & 0x0F, start + size
            if opcode < _CLOSE and size + len(self._fragments) > self._max_bytes:
                if end - start < min(size, _OVERSIZE_HEAD):
                    self._need = start - at + min(size, _OVERSIZE_HEAD)
                    return at
                self._oversize(first, opcode, data[start:stop][:_OVERSIZE_HEAD], key, size)
                self._skip = max(0, stop - end)
                at = min(stop, end)
                continue
            if stop > end:
                self._need = stop - at
                return at
            payload = data[start:stop]
            self._frame(first, opcode, apply_mask(payload, key) if masked else payload)
            at = stop

    def _oversize(self, first: int, opcode: int, head: bytes, key: bytes, size: int) -> None:
        whole = first >= 0x80 and opcode in (TEXT, BINARY) and not self._in_message
        if not whole or not self._listener.on_oversize(apply_mask(head, key) if key else head, size):
            raise ProtocolViolationError(TOO_BIG, f"a message may have {self._max_bytes} bytes")

    def _frame(self, first: int, opcode: int, payload: bytes) -> None:
        final = first >= 0x80
        if opcode >= _CLOSE:
            if not final or len(payload) > 125:
                raise ProtocolViolationError(PROTOCOL_ERROR, "a control frame must be short and whole")
            self._control(opcode, payload)
        elif opcode > BINARY or (opcode == _CONTINUATION) is not self._in_message:
            raise ProtocolViolationError(PROTOCOL_ERROR, f"unexpected opcode {opcode}")
        elif self._close_sent:
            pass
        elif final and not self._in_message:
            self._listener.on_message(payload)
        else:
            self._fragments += payload
            self._in_message = not final
            if final:
                message = bytes(self._fragments)
                self._fragments.clear()
                self._listener.on_message(message)

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == _PING:
            self.send(_PONG, payload)
        elif opcode == _CLOSE:
            if len(payload) == 1:
                raise ProtocolViolationError(PROTOCOL_ERROR, "a close code has two bytes")
            self.send(_CLOSE, payload[:2])
            already_told, self._close_sent = self._close_sent, True
            self._shut()
            if not already_told:
                self._listener.on_close_frame(
                    int.from_bytes(payload[:2], "big") if payload else NORMAL, payload[2:].decode(errors="replace")
                )
        elif opcode != _PONG:
            raise ProtocolViolationError(PROTOCOL_ERROR, f"unknown control opcode {opcode}")
