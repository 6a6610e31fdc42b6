"""Server-sent events of ``GET /v1/stream``: what a session is pushed, for clients without a WebSocket."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.sidecar.pod import Pod

KEEP_ALIVE_SECONDS = 15.0
MAX_BEHIND_BYTES = 4 * 1024 * 1024
"""A reader this far behind is cut off rather than buffered for."""


class EventStream:
    """A channel of ``http_server`` and of ``pod``."""

    def __init__(self, transport: asyncio.Transport, pod: Pod) -> None:
        self._transport = transport
        self._pod = pod
        self._timer: asyncio.TimerHandle | None = None
        pod.presence.streams.add(self)
        self._keep_alive()
        pod.open_channel(self)

    def _keep_alive(self) -> None:
        self._write(b": open\n\n")
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._keep_alive)

    def _write(self, data: bytes) -> None:
        if self._transport.get_write_buffer_size() > MAX_BEHIND_BYTES:
            self._transport.abort()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def _event(self, name: str, data: bytes) -> None:
        self._write(b"event: %b\ndata: %b\n\n" % (name.encode(), data.replace(b"\r", b" ").replace(b"\n", b" ")))

    def received(self, data: bytes) -> None:
        """Nothing is expected from a reader."""

    def gone(self) -> None:
        self._pod.presence.streams.discard(self)
        self._pod.channels.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def writable(self, yes: bool) -> None:
        """Nothing to stop: what is written here comes from elsewhere and is bounded by MAX_BEHIND_BYTES."""

    def poke(self, poke: bytes, parts: list[tuple[str, bytes]]) -> None:
        for name, data in parts:
            self._event(name, data)

    def lost(self, reason: str) -> None:
        self._event("lost", b'{"reason":%b}' % msgspec.json.encode(reason))

    def end(self) -> None:
        self._transport.close()
