"""The framing, against its own inverse, against another implementation, and against peers that break the rules."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from perdure.protocol import Retire
from perdure.protocol import encode_frame as encode_pod_frame
from perdure.sidecar.config import GatewayAddress
from perdure.sidecar.link import Link, connect
from perdure.websocket import (
    BINARY,
    PROTOCOL_ERROR,
    TEXT,
    TOO_BIG,
    UNSUPPORTED_DATA,
    Batch,
    WebSocket,
    accept_key,
    apply_mask,
    encode_frame,
)

LIMIT = 100_000


class Wire:
    """A transport and a listener that only remember."""

    def __init__(self, *, oversize: bool = False) -> None:
        self.written = bytearray()
        self.closed = False
        self.messages: list[bytes] = []
        self.oversize: list[tuple[bytes, int]] = []
        self.closes: list[int] = []
        self._tolerant = oversize

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def on_message(self, data: bytes) -> None:
        self.messages.append(data)

    def on_oversize(self, head: bytes, size: int) -> bool:
        self.oversize.append((head, size))
        return self._tolerant

    def on_close_frame(self, code: int, reason: str) -> None:
        self.closes.append(code)


def side(wire: Wire, *, client: bool, limit: int = LIMIT) -> WebSocket:
    return WebSocket(wire, wire, client=client, max_bytes=limit, batch=Batch())


def portions(data: bytes, sizes: list[int]) -> list[bytes]:
    parts, at = [], 0
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return [*parts, data[at:]]


sizes = st.one_of(st.integers(0, 300), st.sampled_from([125, 126, 127, 65_535, 65_536, 70_000]))


@given(lengths=st.lists(sizes, max_size=5), cuts=st.lists(st.integers(0, 70_100), max_size=8), client=st.booleans())
def test_messages_arrive_whole_in_whatever_portions_their_bytes_come(lengths: list[int], cuts: list[int], client: bool) -> None:
    messages = [bytes([n & 0xFF for n in range(length)]) for length in lengths]
    wire = Wire()
    receiver = side(wire, client=client)
    for part in portions(b"".join(encode_frame(BINARY, message, masked=not client) for message in messages), cuts):
        receiver.feed(part)
    assert wire.messages == messages
    assert not wire.closes


@given(data=st.binary(max_size=40), times=st.sampled_from([1, 1, 1, 300]), key=st.binary(min_size=4, max_size=4))
def test_the_mask_is_xor_by_position(data: bytes, times: int, key: bytes) -> None:
    data *= times
    assert apply_mask(data, key) == bytes(byte ^ key[at % 4] for at, byte in enumerate(data))


@given(parts=st.lists(st.binary(max_size=50), min_size=2, max_size=6))
def test_fragments_become_one_message_with_pings_answered_between(parts: list[bytes]) -> None:
    wire = Wire()
    receiver = side(wire, client=True)
    for at, part in enumerate(parts):
        opcode = TEXT if at == 0 else 0
        final = 0x80 if at == len(parts) - 1 else 0
        receiver.feed(bytes([final | opcode, len(part)]) + part + b"\x89\x02hi")
    assert wire.messages == [b"".join(parts)]
    pongs = [wire.written[at : at + 8] for at in range(0, len(wire.written), 8)]
    assert [(pong[:2], apply_mask(bytes(pong[6:]), bytes(pong[2:6]))) for pong in pongs] == [(b"\x8a\x82", b"hi")] * len(parts)


def test_what_one_read_causes_goes_out_in_order_at_its_end() -> None:
    """Two sockets that feed each other, as agent and gateway do."""
    batch = Batch()
    near, far = Wire(), Wire()
    receiver, sender = (WebSocket(wire, wire, client=False, max_bytes=LIMIT, batch=batch) for wire in (near, far))
    writes: list[bytes] = []
    far.write = writes.append  # type: ignore[assignment]
    near.on_message = lambda data: sender.send(TEXT, data)  # type: ignore[method-assign]
    receiver.feed(b"".join(encode_frame(TEXT, b"%d" % n, masked=True) for n in range(5)) + encode_frame(TEXT, b"half", masked=True)[:5])
    assert writes == [b"".join(encode_frame(TEXT, b"%d" % n, masked=False) for n in range(5))]
    sender.send(TEXT, b"alone")
    assert writes[1:] == [encode_frame(TEXT, b"alone", masked=False)], "at once outside of a read"


def test_the_handshakes_proof_is_the_one_of_the_rfc() -> None:
    assert accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xc1\x00", PROTOCOL_ERROR),  # a reserved bit: compression was not agreed on
        (b"\x81\x81\x01\x02\x03\x04x", PROTOCOL_ERROR),  # a server does not mask
        (b"\x83\x00", PROTOCOL_ERROR),  # no such opcode
        (b"\x8b\x00", PROTOCOL_ERROR),
        (b"\x80\x00", PROTOCOL_ERROR),  # the continuation of nothing
        (b"\x01\x00\x81\x00", PROTOCOL_ERROR),  # a new message inside another
        (b"\x09\x00", PROTOCOL_ERROR),  # a control frame in pieces
        (b"\x89\x7e\x00\x80" + bytes(128), PROTOCOL_ERROR),
        (b"\x88\x01\x03", PROTOCOL_ERROR),
        (b"\x82\x7f" + (LIMIT + 1).to_bytes(8, "big") + bytes(600), TOO_BIG),
        (b"\x02\x7e\xff\xff" + bytes(65_535) + b"\x80\x7e\xff\xff" + bytes(65_535), TOO_BIG),  # too large in sum
    ],
)
async def test_who_breaks_the_rules_is_told_and_cut_off(data: bytes, code: int) -> None:
    wire = Wire()
    receiver = side(wire, client=True)
    receiver.feed(data)
    assert wire.closes == [code]
    assert wire.closed
    assert not wire.messages
    assert apply_mask(bytes(wire.written[6:8]), bytes(wire.written[2:6])) == code.to_bytes(2, "big")


@given(size=st.integers(LIMIT + 1, LIMIT + 5000), cuts=st.lists(st.integers(1, 60_000), max_size=6))
def test_an_oversize_message_is_thrown_away_and_the_next_one_read(size: int, cuts: list[int]) -> None:
    wire = Wire(oversize=True)
    receiver = side(wire, client=False)
    message = bytes(n % 251 for n in range(size))
    for part in portions(encode_frame(TEXT, message, masked=True) + encode_frame(TEXT, b"next", masked=True), cuts):
        receiver.feed(part)
    assert wire.oversize == [(message[:512], size)]
    assert wire.messages == [b"next"]


async def test_a_close_is_answered_once_and_nothing_is_sent_after_it() -> None:
    wire = Wire()
    receiver = side(wire, client=False)
    receiver.feed(encode_frame(0x8, UNSUPPORTED_DATA.to_bytes(2, "big") + b"why", masked=True))
    receiver.send(TEXT, b"late")
    assert bytes(wire.written) == b"\x88\x02" + UNSUPPORTED_DATA.to_bytes(2, "big")
    assert (wire.closes, wire.closed) == ([UNSUPPORTED_DATA], True)


class Endpoint:
    def __init__(self) -> None:
        self.batch = Batch()
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        self.events: list[str] = []

    def on_connected(self, link: Link) -> None:
        self.events.append("connected")

    def on_frame(self, link: Link, frame: Any) -> None:
        self.frames.put_nowait(frame)

    def on_writable(self) -> None: ...

    def on_disconnected(self, link: Link) -> None:
        self.events.append("disconnected")


async def test_a_link_understands_a_server_of_another_make() -> None:
    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0, heartbeat=0.05)
        await socket.prepare(request)
        async for message in socket:
            size = int(message.data)
            await socket.send_bytes(encode_pod_frame(Retire(reason="r" * size)))
            if size == 99:
                await socket.close(code=1001)
        return socket

    app = web.Application()
    app.router.add_get("/v1/pod", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    endpoint = Endpoint()
    link = await connect(GatewayAddress(f"http://127.0.0.1:{port}", "127.0.0.1", port, False), "secret", endpoint)
    for size in (0, 1, 125, 126, 65_535, 65_536, 3_000_000, 99):
        link.send(str(size).encode())
        assert len((await asyncio.wait_for(endpoint.frames.get(), 10)).reason) == size
    assert "1001" in await asyncio.wait_for(link.closed, 10)
    assert endpoint.events == ["connected", "disconnected"]
    await runner.cleanup()


async def test_a_client_of_another_make_is_understood() -> None:
    """Behind the smallest possible server: the handshake by hand, the framing by the module."""

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: Any = transport
            self.socket: WebSocket | None = None

        def data_received(self, data: bytes) -> None:
            if self.socket is None:
                key = next(line for line in data.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:")).split(b": ")[1]
                head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n"
                self.transport.write(head % accept_key(key))
                self.socket = WebSocket(self.transport, self, client=False, max_bytes=10_000_000, batch=Batch())
            else:
                self.socket.feed(data)

        def on_message(self, data: bytes) -> None:
            assert self.socket is not None
            self.socket.send(TEXT, data)

        def on_oversize(self, head: bytes, size: int) -> bool:
            return False

        def on_close_frame(self, code: int, reason: str) -> None: ...

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession() as http, http.ws_connect(f"http://127.0.0.1:{port}", max_msg_size=0, compress=15) as socket:
        for size in (0, 1, 125, 126, 65_535, 65_536, 3_000_000):
            await socket.send_str("é" * (size // 2) + "x" * (size % 2))
            assert len((await socket.receive_str(timeout=10)).encode()) == size
        await socket.ping()
        await socket.send_str("still there")
        assert await socket.receive_str(timeout=10) == "still there"
    server.close()
