"""Applies wakeups that one run inserted for another: child done, cancel.

The inserting transaction never locks the target; this one locks only the target. Kicked by this process's own commits, and looking on
its own for those of others.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.services.port import Settle
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.03
BATCH = 256


class WakeupApplier:
    def __init__(self, store: Store, settle: Settle) -> None:
        self._store = store
        self._settle = settle
        self._kicked = asyncio.Event()

    def kick(self) -> None:
        self._kicked.set()

    async def run(self) -> None:
        while True:
            pause = POLL_SECONDS
            self._kicked.clear()
            try:
                runs = await self._store.unapplied_runs(BATCH)
                await self._settle(runs)
                if runs:
                    continue
            except PerdureError as error:
                log.warning("wakeups could not be applied", error=str(error))
                pause = 0.5
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._kicked.wait(), pause)
