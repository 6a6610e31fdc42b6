"""A net below the wakes: finds suspended runs that should have been woken.

Suspend and wake exclude each other by the run's lock, so a hit is a bug and is counted and logged as one; the run goes on all the same.
A sweep reads what has happened since the one before it and a good while earlier, not what sleeps. One that failed did not happen: the next
one goes back as far as it should have. The first one of a process goes back an hour: it may be that no gateway was there to look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn
from uuid import UUID

import structlog

from perdure_operator.observability import metrics
from perdure_operator.services.polling import Poll
from perdure_operator.services.port import Settle
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 30.0
OLDER_SECONDS = 5.0
MARGIN_SECONDS = 2 * INTERVAL_SECONDS
"""A sweep reads the last so many seconds before the one before it again: that one passed over what was not older than OLDER_SECONDS, and a
transaction that was under way then has the time of its beginning."""
FIRST_WITHIN_SECONDS = 3600.0
LIMIT = 100


class Sweeper:
    """``now``: goes on while the machine sleeps, as the store's clock does."""

    def __init__(self, store: Store, settle: Settle, *, now: Callable[[], float] = time.time) -> None:
        self._store, self._settle, self._now = store, settle, now
        self._since = now() - FIRST_WITHIN_SECONDS + MARGIN_SECONDS

    async def run(self) -> NoReturn:
        poll = Poll("the sweep failed", seconds=INTERVAL_SECONDS, outage=INTERVAL_SECONDS)
        await poll.kick.pause(INTERVAL_SECONDS)
        await poll.run(self.sweep)

    async def sweep(self) -> None:
        """Settles all that was missed, a hundred at a time. Raises PerdureError."""
        began = self._now()
        tried: list[UUID] = []
        while True:
            within = max(self._now() - self._since, 0.0) + MARGIN_SECONDS
            missed = await self._store.missed_wakes(OLDER_SECONDS, within, besides=tried, limit=LIMIT)
            if missed:
                metrics.MISSED_WAKES.inc(len(missed))
                log.error("runs slept over their wake: this is a bug", runs=[str(run) for run in missed])
                await self._settle(missed)
            if len(missed) < LIMIT:
                break
            tried += missed  # one that could not be settled is not found again and again
        self._since = began
