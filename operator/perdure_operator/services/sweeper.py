"""A net below the wakes: finds suspended runs that should have been woken.

Suspend and wake exclude each other by the run's lock, so a hit is a bug and is counted and logged as one; the run goes on all the same.
A sweep reads what has happened since the one before it and a good while earlier, not what sleeps. The first one of a process goes back an
hour: it may be that no gateway was there to look.
"""

from __future__ import annotations

import asyncio

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.observability import metrics
from perdure_operator.services.port import Settle
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 30.0
OLDER_SECONDS = 5.0
WITHIN_SECONDS = 3 * INTERVAL_SECONDS
FIRST_WITHIN_SECONDS = 3600.0


class Sweeper:
    def __init__(self, store: Store, settle: Settle) -> None:
        self._store = store
        self._settle = settle

    async def run(self) -> None:
        within = FIRST_WITHIN_SECONDS
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            try:
                missed = await self._store.missed_wakes(OLDER_SECONDS, within)
                within = WITHIN_SECONDS
                if missed:
                    metrics.MISSED_WAKES.inc(len(missed))
                    log.error("runs slept over their wake: this is a bug", runs=[str(run) for run in missed])
                    await self._settle(missed)
            except PerdureError as error:
                log.warning("the sweep failed", error=str(error))
