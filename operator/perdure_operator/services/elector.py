"""Who leads among the operator's replicas: a row with a term in Postgres.

The leader renews well before others may take over. What it writes to the store carries the term and is refused when that is over; what
it writes to Kubernetes cannot be fenced so, and is safe without it (uid preconditions, resource versions, names from the store).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.observability import metrics
from perdure_operator.store.resources import Resources

log = structlog.get_logger(__name__)

ROLE = "operator"
TERM_SECONDS = 6.0
RENEW_SECONDS = 1.0
STEP_DOWN_SECONDS = 4.0
"""Without a renewal for so long the leader stops, before anybody else may begin."""


class Elector:
    """Runs ``lead(term)`` while this process leads, and cancels it when it does not any more. When ``lead`` ends, so does ``run``."""

    def __init__(self, resources: Resources, holder: str, lead: Callable[[int], Awaitable[None]]) -> None:
        self._resources = resources
        self._holder = holder
        self._lead = lead
        self.term: int | None = None
        self._deposed = False

    async def run(self) -> None:
        """Until cancelled; then gives the lead back, so that another replica has it within a second."""
        work: asyncio.Task[None] | None = None
        renewed = time.monotonic()
        try:
            while True:
                term = await self._ask()
                now = time.monotonic()
                if term is not None:
                    renewed = now
                if work is not None and (term not in (None, self.term) or now - renewed > STEP_DOWN_SECONDS or self._deposed):
                    await _end(work)
                    work, self.term = None, None
                    log.warning("no longer leading", holder=self._holder)
                if work is None and term is not None:
                    log.info("leading", holder=self._holder, term=term)
                    self.term = term
                    work = asyncio.ensure_future(self._lead(term))
                metrics.LEADING.set(self.term is not None)
                if work is not None:
                    await asyncio.wait([work], timeout=RENEW_SECONDS)
                    if work.done():
                        work.result()
                        return
                else:
                    await asyncio.sleep(RENEW_SECONDS)
        finally:
            if work is not None:
                await _end(work)
                try:
                    await self._resources.resign(ROLE, self._holder)
                except PerdureError as error:
                    log.warning("the lead could not be given back", error=str(error))

    async def _ask(self) -> int | None:
        """The term, or None when another leads or nobody can tell."""
        self._deposed = False
        try:
            term = await self._resources.lead(ROLE, self._holder, TERM_SECONDS)
        except PerdureError as error:
            log.warning("the lead could not be asked for", error=str(error))
            return None
        self._deposed = term is None
        return term


async def _end(work: asyncio.Task[None]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
