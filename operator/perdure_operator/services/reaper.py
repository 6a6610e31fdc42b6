"""Ends leases whose holders have fallen silent: the only place where a lease expires by time, and by the database's clock.

It must not take our own outage for everybody's death (R6). It expires nothing until it has itself looked without a gap for one whole
lease, for only then had every live pod the chance to beat; and when an unusual share of all leases is due at once, it holds and says so.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.observability import metrics
from perdure_operator.services.port import Apply
from perdure_operator.store.operations import Control
from perdure_operator.store.store import SilentLease, Store

log = structlog.get_logger(__name__)

UNUSUAL_COUNT = 20
UNUSUAL_SHARE = 0.2
LONGEST_HOLD_LEASES = 5
"""An unusual share that is still silent after so many leases is believed."""


def unusual(silent: int, live: int) -> bool:
    """R6: more leases due at once than a failure of single nodes explains."""
    return silent > max(UNUSUAL_COUNT, UNUSUAL_SHARE * live)


class Reaper:
    def __init__(self, store: Store, apply: Apply, *, lease_seconds: float) -> None:
        self._store = store
        self._apply = apply
        self._lease = lease_seconds
        self._interval = min(1.0, lease_seconds / 5)
        self._healthy_since: float | None = None
        self._last_look: float | None = None

    async def run(self) -> None:
        while True:
            try:
                await self.look(time.monotonic())
            except PerdureError as error:
                self._healthy_since = None
                log.warning("silent leases could not be read", error=str(error))
            await asyncio.sleep(self._interval)

    async def look(self, now: float) -> int:
        """One pass at monotonic time ``now``; gives the number of leases that it ended."""
        if self._last_look is None or now - self._last_look > self._interval * 3 + 1:
            self._healthy_since = None
        self._last_look = now
        await self._store.retire_silent_pods(max(60.0, self._lease * 4))
        silent = await self._store.silent_leases(self._lease)
        if self._healthy_since is None:
            self._healthy_since = now
        if not silent:
            return 0
        if now - self._healthy_since < self._lease:
            metrics.REAPER_HOLDS.labels("own-gap").inc()
            return 0
        live, in_all = await self._store.lease_silence(self._lease)
        if unusual(in_all, live) and max(s.silent_seconds for s in silent) < self._lease * LONGEST_HOLD_LEASES:
            metrics.REAPER_HOLDS.labels("unusual-share").inc()
            log.error("unusually many leases are silent at once: holding", silent=in_all, live=live)
            return 0
        return sum(await asyncio.gather(*(self._expire(lease) for lease in silent)))

    async def _expire(self, lease: SilentLease) -> int:
        body = {"leaseEpoch": lease.epoch, "reason": "HeartbeatLost", "silentSeconds": self._lease}
        try:
            outcome = await self._apply(Control(lease.run, "expire", body))
        except PerdureError as error:
            log.warning("a silent lease could not be ended", run=str(lease.run), error=str(error))
            return 0
        if not outcome.answer.get("expired"):
            return 0
        metrics.LEASE_LOSSES.labels("HeartbeatLost").inc()
        log.warning("lease lost", run=str(lease.run), epoch=lease.epoch, pod=str(lease.pod), silent=round(lease.silent_seconds, 1))
        return 1
