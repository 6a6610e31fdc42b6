"""The transport to the sidecar: one WebSocket for operations and pushes, and an HTTP request for the run's context.

What was sent and not answered is kept, and sent again in order with the same request ids when the connection is back (R3): a sidecar may
restart under a living agent. Pings of the sidecar are answered from the event loop: they are how it sees that the loop still turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from perdure.protocol import Poke, Problem
from perdure.sdk.errors import PodRetired, Refused, SidecarUnavailable
from perdure.sdk.transport import Listener, resend_helps
from perdure.sdk.websocket import WebSocketClient

DEFAULT_PORT: Final = 4555
GIVE_UP_SECONDS: Final = 60.0
"""How long an agent waits for a sidecar that has not been there yet."""
AWAY_SECONDS: Final = 15.0
"""How long an agent goes on without its sidecar before it ends: as long as a lease lasts, by default. A kubelet starts a sidecar that has
ended again at once, or after ten seconds if it has done so before; after the lease the run is somebody else's."""

_QUIET_SECONDS: Final = 0.5
"""How much later than its agent a sidecar may be without a word."""
_BY_HAND: Final = (
    "no sidecar at %s (%s). An agent is not started by hand: `perdure dev -f FILE` starts it here, an AgentPool on a cluster, each with a "
    "sidecar beside it. Trying for %.0f s"
)
_RECONNECT_SECONDS: Final = (0.02, 1.0)
_RESEND_SECONDS: Final = (0.05, 2.0)
_log = logging.getLogger("perdure")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the sidecar listens: a unix socket, else a port of this machine."""

    socket: str | None = None
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return self.socket or f"127.0.0.1:{self.port}"

    async def connect(self, client: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        if self.socket is not None:
            await loop.create_unix_connection(lambda: client, self.socket)
        else:
            await loop.create_connection(lambda: client, "127.0.0.1", self.port)

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.socket is not None:
            return await asyncio.open_unix_connection(self.socket)
        return await asyncio.open_connection("127.0.0.1", self.port)


def address_from(env: Mapping[str, str]) -> Address:
    """PERDURE_SOCKET, unless it is ``off``; else PERDURE_PORT."""
    socket = env.get("PERDURE_SOCKET", "off")
    return Address(None if socket == "off" else socket, int(env.get("PERDURE_PORT") or DEFAULT_PORT))


_NOTHING: Final = msgspec.Raw()


class _Incoming(msgspec.Struct):
    id: int = 0
    answer: msgspec.Raw = _NOTHING
    problem: Problem | None = None
    push: Poke | None = None
    lost: str | None = None
    ping: int | None = None


@dataclass(slots=True)
class _Pending:
    message: bytes
    future: asyncio.Future[bytes]
    delay: float = _RESEND_SECONDS[0]


_decoder = msgspec.json.Decoder(_Incoming)


class SidecarTransport:
    """``secret``: of the current lease, where the pod is reused."""

    def __init__(self, address: Address, secret: str | None = None, *, give_up: float = GIVE_UP_SECONDS) -> None:
        self._address = address
        self._secret = secret
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._pending: dict[int, _Pending] = {}
        self._count = 0
        self._socket: WebSocketClient | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._connecting: asyncio.Task[None] | None = None
        self._closing = False
        self._lost: str | None = None
        self._was_open = False
        self._delay, self._away_since = _RECONNECT_SECONDS[0], self._loop.time()

    async def open(self) -> None:
        """Raises SidecarUnavailable, PodRetired."""
        self._connect()
        await asyncio.shield(self._opened)

    async def context(self) -> bytes:
        delay, since = _RECONNECT_SECONDS[0], self._loop.time()
        silent, patience = True, self._give_up
        while True:
            try:
                status, body = await self._get("/v1/run")
            except OSError as error:
                if self._loop.time() - since > patience:
                    raise SidecarUnavailable(f"no sidecar at {self._address}: {error}") from error
                if silent and self._loop.time() - since > _QUIET_SECONDS:
                    silent = False
                    _log.warning(_BY_HAND, self._address, error, self._give_up)
                await asyncio.sleep(delay)
                delay = min(delay * 2, _RECONNECT_SECONDS[1])
                continue
            patience = min(self._give_up, AWAY_SECONDS)
            if status == 200:
                return body
            if status == 410:
                raise PodRetired
            if status != 204:
                problem = msgspec.json.decode(body, type=Problem)
                if not resend_helps(problem):
                    raise Refused(problem)
                await asyncio.sleep(delay)
            delay, since = _RECONNECT_SECONDS[0], self._loop.time()

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        if self._lost is not None:
            listener.on_lost(self._lost)

    def call(self, body: bytes) -> asyncio.Future[bytes]:
        self._count += 1
        number = self._count
        message = b'{"id":%d,"req":"%s","body":%b}' % (number, str(uuid.uuid4()).encode(), body)
        pending = self._pending[number] = _Pending(message, self._loop.create_future())
        self._transmit(number)
        return pending.future

    async def close(self) -> None:
        self._closing = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._socket is not None:
            self._socket.close()
            await asyncio.sleep(0)

    # ------------------------------------------------------------------------------------------- websocket.Owner

    def on_open(self) -> None:
        self._delay = _RECONNECT_SECONDS[0]
        for number in list(self._pending):
            self._transmit(number)
        if self._was_open and self._listener is not None:
            self._listener.on_reconnected()
        self._was_open = True
        if not self._opened.done():
            self._opened.set_result(None)

    def on_message(self, data: bytes) -> None:
        message = _decoder.decode(data)
        if message.ping is not None:
            if self._socket is not None:
                self._socket.send(b'{"pong":%d}' % message.ping)
        elif message.id:
            self._answered(message)
        elif message.push is not None:
            if self._listener is not None:
                self._listener.on_poke(message.push)
        elif message.lost is not None:
            self._lease_lost(message.lost)

    def on_closed(self, status: int) -> None:
        if self._closing:
            return
        if status in (401, 403, 409, 410):
            # Another run's secret, or no run any more: this process is of a lease that is over.
            self._lease_lost(f"the sidecar refused the session with status {status}")
            self._fail(PodRetired())
        else:
            self._connect()

    # ------------------------------------------------------------------------------------------- pieces

    def _transmit(self, number: int) -> None:
        pending = self._pending.get(number)
        if pending is not None and self._socket is not None and self._socket.open:
            self._socket.send(pending.message)

    def _answered(self, message: _Incoming) -> None:
        pending = self._pending.get(message.id)
        if pending is None:
            return
        if message.problem is not None and resend_helps(message.problem):
            self._loop.call_later(pending.delay, self._transmit, message.id)
            pending.delay = min(pending.delay * 2, _RESEND_SECONDS[1])
            return
        del self._pending[message.id]
        if pending.future.done():
            return
        if message.problem is None:
            pending.future.set_result(bytes(message.answer or b"null"))
        else:
            pending.future.set_exception(Refused(message.problem))

    def _lease_lost(self, reason: str) -> None:
        self._lost = reason
        if self._listener is not None:
            self._listener.on_lost(reason)

    def _connect(self) -> None:
        """Begins to connect. The handshake goes on by itself; ``on_closed`` comes here again when it fails."""
        if self._connecting is None or self._connecting.done():
            self._connecting = self._loop.create_task(self._keep_connecting())

    async def _keep_connecting(self) -> None:
        if self._was_open and self._delay == _RECONNECT_SECONDS[0]:
            self._away_since = self._loop.time()
        while not self._closing:
            self._socket = WebSocketClient(self, "/v1/session", self._secret)
            try:
                if self._delay > _RECONNECT_SECONDS[0]:
                    await asyncio.sleep(self._delay)
                self._delay = min(self._delay * 2, _RECONNECT_SECONDS[1])
                await self._address.connect(self._socket)
            except OSError as error:
                patience = min(self._give_up, AWAY_SECONDS) if self._was_open else self._give_up
                if self._loop.time() - self._away_since > patience:
                    gone = SidecarUnavailable(f"no sidecar at {self._address}: {error}")
                    self._fail(gone)
                    # Also if the agent asks for nothing just now: nothing that it does could be recorded any more.
                    self._lease_lost(str(gone))
                    return
            else:
                return

    def _fail(self, error: Exception) -> None:
        waiting: list[asyncio.Future[Any]] = [self._opened, *(pending.future for pending in self._pending.values())]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever awaits sees it; nobody may

    async def _get(self, path: str) -> tuple[int, bytes]:
        reader, writer = await self._address.streams()
        try:
            authorization = f"Authorization: Bearer {self._secret}\r\n" if self._secret else ""
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Connection: close\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            return int(lines[0].split(" ")[1]), await reader.readexactly(int(headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, ValueError, IndexError) as error:
            raise ConnectionError(f"the sidecar hung up: {error}") from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
