"""The clock of the triggers: stores the firings that are due, in every gateway at once.

What is due is worked out here from rows that were only read; one statement then claims those rows that nobody else has moved meanwhile,
stores the firings under their keys and moves the rows on. A crash anywhere leaves all of a tick or nothing of it, and two gateways at
the same tick do it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from perdure_operator.domain.errors import InvalidInput
from perdure_operator.domain.trigger import Firing, due, scheduled_key
from perdure_operator.services.polling import Poll
from perdure_operator.services.trigger_plan import calendar_of, parse_spec, policy_of
from perdure_operator.store.triggers import Tick, TriggerRow, Triggers

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.2
OUTAGE_SECONDS = 0.5
BATCH = 100


class TriggerScheduler:
    """``fired``: deliveries wait for a router."""

    def __init__(self, triggers: Triggers, fired: Callable[[], None]) -> None:
        self._triggers = triggers
        self._fired = fired
        self._not_understood: set[tuple[str, int]] = set()

    async def run(self) -> NoReturn:
        await Poll("due triggers could not be fired", seconds=POLL_SECONDS, outage=OUTAGE_SECONDS).run(self._look)

    async def _look(self) -> bool:
        return await self.tick() >= BATCH

    async def tick(self) -> int:
        """Gives how many triggers were moved on, by us as far as we know."""
        found = await self._triggers.due(BATCH)
        # After a long sleep of all of us there may be much to work out, and this process has leases to keep alive.
        ticks = await asyncio.to_thread(lambda: [tick for row in found if (tick := self._tick_of(row)) is not None]) if found else []
        if ticks and await self._triggers.fire(ticks):
            self._fired()
        return len(ticks)

    def _tick_of(self, row: TriggerRow) -> Tick | None:
        try:
            spec = parse_spec(row.spec)
        except InvalidInput as error:
            if (row.key, row.revision) not in self._not_understood:
                self._not_understood.add((row.key, row.revision))
                log.error("a trigger's spec is not understood here: another version must fire it", trigger=row.key, error=str(error))
            return None
        calendar = calendar_of(spec, row.anchor_at)
        if calendar is None or row.next_at is None:
            return None
        now = due(calendar, row.next_at, row.now, policy_of(spec))
        firings = [
            Firing(
                row.key, row.source, scheduled_key(row.source, row.key, at), at,
                skipped_since=row.next_at if now.skipped and at == now.firings[0] else None,
            )
            for at in now.firings
        ]  # fmt: skip
        if not firings:
            log.warning("firings were missed", trigger=row.key, since=str(row.next_at), next=str(now.next_at))
        return Tick(row, firings, now.next_at)
