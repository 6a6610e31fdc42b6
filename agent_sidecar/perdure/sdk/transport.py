"""The port between an attempt of a run and whoever keeps its record: the sidecar, or the memory of a test.

A transport delivers each operation once, in order, however often its connection breaks: it resends by request id until an answer comes,
and keeps trying on a problem that says that trying again helps. What reaches the caller is an answer or a final refusal.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, Protocol

from perdure.protocol import Poke, Problem

_FOR_THE_CALLER: Final = frozenset({"concurrent-append", "effect-running"})
"""Problems that are retryable only by deciding anew, not by sending the same again."""


class Listener(Protocol):
    def on_poke(self, poke: Poke) -> None: ...

    def on_lost(self, reason: str) -> None:
        """The lease is over. Only receipts may still be sent."""

    def on_reconnected(self) -> None:
        """A push may have been missed."""


class Transport(Protocol):
    async def context(self) -> bytes:
        """Blocks until there is a run to work on; gives its RunContext as JSON. Raises PodRetired, SidecarUnavailable."""

    def listen(self, listener: Listener) -> None: ...

    def call(self, body: bytes) -> Awaitable[bytes]:
        """Sends one operation (JSON with its ``op`` tag) and gives the answer's JSON. Raises Refused, SidecarUnavailable."""

    async def close(self) -> None: ...


def resend_helps(problem: Problem) -> bool:
    return problem.retryable and problem.type.rpartition(":")[2] not in _FOR_THE_CALLER
