"""The agent's WebSocket: many operations at once, pushes, and the pings that show that the agent's event loop still turns.

An operation passes through as bytes: its body is cut out of the message without being decoded, its answer is put into the reply without
being decoded. When the outbox is full, or the agent does not read, the session is not read from either.
"""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from typing import Final

import msgspec
from msgspec import Raw, Struct

from perdure import websocket
from perdure.protocol import Answer, Problem
from perdure.sidecar.http_server import MAX_BODY_BYTES
from perdure.sidecar.outbox import Outcome
from perdure.sidecar.pod import Pod
from perdure.sidecar.problems import ProblemError, encode_problem, problem, refuse
from perdure.sidecar.run import operation_tag

ENVELOPE_BYTES: Final = 256

_ID: Final = re.compile(rb'"id"\s*:\s*(\d{1,18})')


class FromAgent(Struct, forbid_unknown_fields=True):
    """``{"id":1,"req":"<uuid>","body":{…operation…}}`` or ``{"pong":n}``."""

    id: int | None = None
    req: str = ""
    body: Raw = Raw()
    pong: int | None = None


_decoder = msgspec.json.Decoder(FromAgent)


class Session:
    """A channel of ``http_server``, a listener of ``websocket``, an agent channel of ``pod``."""

    def __init__(self, transport: asyncio.Transport, pod: Pod, secret: str | None) -> None:
        loop = asyncio.get_running_loop()
        self._transport = transport
        self._pod = pod
        self._secret = secret
        self._time = loop.time
        self._socket = websocket.WebSocket(transport, self, client=False, max_bytes=MAX_BODY_BYTES + ENVELOPE_BYTES, batch=pod.batch)
        self._pings = 0
        self._holds: set[str] = set()
        self._left = False
        self.last_pong = loop.time()
        pod.presence.sessions.add(self)
        pod.open_channel(self)

    # -------------------------------------------------------------------------------------------- http_server.Channel

    def received(self, data: bytes) -> None:
        self._socket.feed(data)

    def gone(self) -> None:
        if self._leave():
            self._pod.supervisor.session_closed(self._secret)

    def writable(self, yes: bool) -> None:
        self._release("agent") if yes else self._hold("agent")

    # -------------------------------------------------------------------------------------------- pod.AgentChannel

    def poke(self, poke: bytes, parts: list[tuple[str, bytes]]) -> None:
        self._send(b'{"push":%b}' % poke)

    def lost(self, reason: str) -> None:
        self._send(b'{"lost":%b}' % msgspec.json.encode(reason))

    def end(self) -> None:
        self._leave()
        self._socket.close(websocket.GOING_AWAY, "the run is over")

    def ping(self) -> None:
        """Not while the session is not read from: its pong could not arrive."""
        if self._holds:
            self.last_pong = self._time()
            return
        self._pings += 1
        self._send(b'{"ping":%d}' % self._pings)

    def _leave(self) -> bool:
        """True the first time."""
        first, self._left = not self._left, True
        self._pod.presence.sessions.discard(self)
        self._pod.channels.discard(self)
        return first

    # -------------------------------------------------------------------------------------------- websocket.Listener

    def on_message(self, data: bytes) -> None:
        try:
            message = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            self._socket.close(websocket.UNSUPPORTED_DATA, f"not a message of the session: {error}"[:120])
            return
        if message.pong is not None:
            self.last_pong = self._time()
        elif message.id is None:
            self._socket.close(websocket.UNSUPPORTED_DATA, "a message has an id or a pong")
        else:
            self._operation(message.id, message.req or str(uuid.uuid4()), bytes(message.body))

    def _operation(self, id: int, req: str, body: bytes) -> None:
        pod = self._pod
        try:
            if len(body) > MAX_BODY_BYTES:
                raise refuse("payload-too-large", f"the operation has {len(body)} bytes; it may have {MAX_BODY_BYTES}")
            op = operation_tag(body)
            pod.perform(pod.running(self._secret, op), op=op, body=body, req=req, waiter=functools.partial(self._answered, id))
        except ProblemError as error:
            self._refused(id, error.problem)
        except msgspec.DecodeError as error:
            self._refused(id, problem("bad-request", f"the body is not an operation: {error}"))
        if pod.outbox.full and "outbox" not in self._holds:
            self._hold("outbox")
            pod.outbox.when_room(functools.partial(self._release, "outbox"))

    def on_oversize(self, head: bytes, size: int) -> bool:
        found = _ID.search(head)
        if found is None:
            return False
        self._refused(int(found[1]), problem("payload-too-large", f"the message has {size} bytes; an operation may have {MAX_BODY_BYTES}"))
        return True

    def on_close_frame(self, code: int, reason: str) -> None:
        self.gone()

    # -------------------------------------------------------------------------------------------- out

    def _answered(self, id: int, outcome: Outcome) -> None:
        if isinstance(outcome, Answer):
            self._send(b'{"id":%d,"answer":%b}' % (id, outcome.body))
        else:
            self._refused(id, outcome.problem)

    def _refused(self, id: int, what: Problem) -> None:
        self._send(b'{"id":%d,"problem":%b}' % (id, encode_problem(what)))

    def _send(self, message: bytes) -> None:
        self._socket.send(websocket.TEXT, message)

    # -------------------------------------------------------------------------------------------- back-pressure

    def _hold(self, why: str) -> None:
        if not self._holds:
            self._transport.pause_reading()
        self._holds.add(why)

    def _release(self, why: str) -> None:
        self._holds.discard(why)
        if not self._holds and not self._transport.is_closing():
            self.last_pong = self._time()
            self._transport.resume_reading()
