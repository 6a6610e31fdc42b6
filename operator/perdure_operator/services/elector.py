"""Who leads among the operator's replicas: a row with a term in Postgres.

The leader renews well before others may take over. What it writes to the store carries the term and is refused when that is over; what
it writes to Kubernetes cannot be fenced so, and is safe without it (uid preconditions, resource versions, names from the store).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.observability import metrics

log = structlog.get_logger(__name__)

ROLE = "operator"
TERM_SECONDS = 6.0
RENEW_SECONDS = 1.0
STEP_DOWN_SECONDS = 5.0
"""So long after it asked for the renewal that it got last the leader stops, before anybody else may begin."""


class Leadership(Protocol):
    """The row in the store. Either raises PerdureError when nobody can tell."""

    async def lead(self, role: str, holder: str, seconds: float) -> int | None: ...
    async def resign(self, role: str, holder: str) -> None: ...


class Elector:
    """Runs ``lead(term)`` while this process leads, and cancels it when it does not any more. When ``lead`` ends, so does ``run``."""

    def __init__(self, leadership: Leadership, holder: str, lead: Callable[[int], Awaitable[None]]) -> None:
        self._leadership = leadership
        self._holder = holder
        self._lead = lead
        self.term: int | None = None
        self._deposed = False

    async def run(self) -> None:
        """Until cancelled; then gives the lead back, so that another replica has it within a second."""
        clock = asyncio.get_running_loop().time
        work: asyncio.Task[None] | None = None
        until = 0.0
        try:
            while True:
                asked = clock()
                # Nobody knows when the store decided: no sooner than it was asked. A leader waits no longer for an answer than it may lead.
                term = await self._ask(until if work is not None else asked + STEP_DOWN_SECONDS)
                if term is not None:
                    until = asked + STEP_DOWN_SECONDS
                if work is not None and (term not in (None, self.term) or clock() >= until or self._deposed):
                    await _end(work)
                    work, self.term = None, None
                    log.warning("no longer leading", holder=self._holder)
                if work is None and term is not None:
                    log.info("leading", holder=self._holder, term=term)
                    self.term = term
                    work = asyncio.ensure_future(self._lead(term))
                metrics.LEADING.set(self.term is not None)
                pause = max(0.0, asked + RENEW_SECONDS - clock())
                if work is not None:
                    await asyncio.wait([work], timeout=pause)
                    if work.done():
                        work.result()
                        return
                else:
                    await asyncio.sleep(pause)
        finally:
            if work is not None:
                await _end(work)
                try:
                    await self._leadership.resign(ROLE, self._holder)
                except PerdureError as error:
                    log.warning("the lead could not be given back", error=str(error))

    async def _ask(self, until: float) -> int | None:
        """The term, or None when another leads or nobody can tell by that time of the event loop."""
        self._deposed = False
        try:
            async with asyncio.timeout_at(until):
                term = await self._leadership.lead(ROLE, self._holder, TERM_SECONDS)
        except (PerdureError, TimeoutError) as error:
            log.warning("the lead could not be asked for", error=str(error) or "no answer in time")
            return None
        self._deposed = term is None
        return term


async def _end(work: asyncio.Task[None]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
