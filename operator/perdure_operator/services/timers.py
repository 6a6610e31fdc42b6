"""Finds what the clock made due (timers, wait timeouts, deadlines) and settles those runs.

Suspended runs cost nothing in between: the question is one probe of a partial index, however many sleep.
"""

from __future__ import annotations

from typing import NoReturn

from perdure_operator.services.polling import Poll
from perdure_operator.services.port import Settle
from perdure_operator.store.store import Store

POLL_SECONDS = 0.03
OUTAGE_SECONDS = 0.5
BATCH = 256


class Timers:
    def __init__(self, store: Store, settle: Settle) -> None:
        self._store = store
        self._settle = settle

    async def run(self) -> NoReturn:
        await Poll("due timers could not be handled", seconds=POLL_SECONDS, outage=OUTAGE_SECONDS).run(self._look)

    async def _look(self) -> bool:
        due = await self._store.due_runs(BATCH)
        await self._settle(due)
        return len(due) >= BATCH
