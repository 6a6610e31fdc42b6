"""Applies wakeups that one run inserted for another: child done, cancel.

The inserting transaction never locks the target; this one locks only the target. Kicked by this process's own commits, and looking on
its own for those of others.
"""

from __future__ import annotations

from typing import NoReturn

from perdure_operator.services.polling import Poll
from perdure_operator.services.port import Settle
from perdure_operator.store.store import Store

POLL_SECONDS = 0.03
OUTAGE_SECONDS = 0.5
BATCH = 256


class WakeupApplier:
    def __init__(self, store: Store, settle: Settle) -> None:
        self._store = store
        self._settle = settle
        self._poll = Poll("wakeups could not be applied", seconds=POLL_SECONDS, outage=OUTAGE_SECONDS)
        self.kick = self._poll.kick

    async def run(self) -> NoReturn:
        await self._poll.run(self._look)

    async def _look(self) -> bool:
        runs = await self._store.unapplied_runs(BATCH)
        await self._settle(runs)
        return bool(runs)
