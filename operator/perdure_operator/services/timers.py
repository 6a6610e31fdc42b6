"""Finds what the clock made due (timers, wait timeouts, deadlines) and settles those runs.

Suspended runs cost nothing in between: the question is one probe of a partial index, however many sleep.
"""

from __future__ import annotations

import asyncio

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.services.port import Settle
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.03
BATCH = 256


class Timers:
    def __init__(self, store: Store, settle: Settle) -> None:
        self._store = store
        self._settle = settle

    async def run(self) -> None:
        while True:
            pause = POLL_SECONDS
            try:
                due = await self._store.due_runs(BATCH)
                await self._settle(due)
                if len(due) >= BATCH:
                    continue
            except PerdureError as error:
                log.warning("due timers could not be handled", error=str(error))
                pause = 0.5
            await asyncio.sleep(pause)
