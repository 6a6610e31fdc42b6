"""Follows the log of one run and lets the demo wait for what it says: everything happens on an event, nothing on a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from examples.report.gateway import Event, Gateway


class RunOver(Exception):
    """The run ended before what was waited for happened."""


class Log:
    """The events of a run so far, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.over = False
        self._changed = asyncio.Condition()

    async def until(self, what: str, accept: Callable[[Event], bool], after: int = 0) -> Event:
        """The first event behind sequence ``after`` that ``accept`` accepts. Raises RunOver; ``what`` names it then."""
        seen = after
        async with self._changed:
            while True:
                for event in self.events[seen:]:
                    if accept(event):
                        return event
                seen = len(self.events)
                if self.over:
                    raise RunOver(f"the run ended without: {what}")
                await self._changed.wait()

    async def end(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.over)

    async def follow(self, gateway: Gateway, run: str, show: Callable[[Event], None]) -> None:
        try:
            async for event in gateway.tail(run):
                async with self._changed:
                    self.events.append(event)
                    show(event)
                    self._changed.notify_all()
        finally:
            async with self._changed:
                self.over = True
                self._changed.notify_all()


@asynccontextmanager
async def following(gateway: Gateway, run: str, show: Callable[[Event], None]) -> AsyncIterator[Log]:
    """``show`` sees every event as it comes."""
    log = Log()
    task = asyncio.create_task(log.follow(gateway, run, show))
    try:
        yield log
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
