"""The loop that every service is: it looks at the store, now and then and whenever it is kicked, and goes on through outages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

from perdure_operator.domain.errors import PerdureError

log = structlog.get_logger(__name__)


class Kick:
    """Ends a pause early. A kick that comes while nobody pauses ends the next pause at once, so none is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self._event.set()

    async def pause(self, seconds: float | None) -> None:
        """Until kicked, ``seconds`` at most. Always cancellable: ``asyncio.wait_for`` is not, when the kick and the cancel meet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        self._event.clear()


class Poll:
    """``complaint``: what is logged when a look fails. After a failure the next look comes ``outage`` seconds later."""

    def __init__(self, complaint: str, *, seconds: float, outage: float) -> None:
        self._complaint, self._seconds, self._outage = complaint, seconds, outage
        self.kick = Kick()

    async def run(self, look: Callable[[], Awaitable[object]]) -> NoReturn:
        """Until cancelled. ``look`` says whether there is more to be done at once; it may raise PerdureError."""
        while True:
            pause = self._seconds
            try:
                if await look():
                    continue
            except PerdureError as error:
                log.warning(self._complaint, error=str(error))
                pause = self._outage
            await self.kick.pause(pause)
