"""Keeps one link to some gateway: connects, and when it is lost connects to the next one, waiting a little longer each time.

Which gateway does not matter, all are equal. What the frames mean is the pod's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from perdure.sidecar.config import Settings
from perdure.sidecar.link import Endpoint, GatewayRefusedError, Link, connect

FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 2.0
STABLE_SECONDS = 5.0
"""A link that has lived this long was a good one: the next wait begins at the shortest again."""

log = logging.getLogger("perdure.sidecar.gateway")


def delay_seconds(failures: int, jitter: float) -> float:
    """The wait before the attempt that follows ``failures`` failures in a row; ``jitter`` in [0, 1) spreads it over the upper half."""
    longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(failures, 16))
    return longest * (0.5 + jitter / 2)


def random_fraction() -> float:
    """In [0, 1)."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


class GatewayClient:
    def __init__(self, settings: Settings, endpoint: Endpoint, *, jitter: Callable[[], float] = random_fraction) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._jitter = jitter
        self._link: Link | None = None
        self.connects = 0
        self.failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        gateways = self._settings.gateways
        turn = int(self._jitter() * len(gateways))
        loop = asyncio.get_running_loop()
        in_a_row = 0
        try:
            while True:
                address = gateways[turn % len(gateways)]
                turn += 1
                try:
                    link = self._link = await connect(address, self._settings.token(), self._endpoint, self._settings.tls)
                except (OSError, TimeoutError, GatewayRefusedError) as error:
                    self.failures += 1
                    log.warning("no connection to a gateway", extra={"gateway": address.url, "error": str(error) or type(error).__name__})
                else:
                    since = loop.time()
                    self.connects += 1
                    reason = await link.closed
                    log.warning("the connection to the gateway is lost", extra={"gateway": address.url, "reason": reason})
                    if loop.time() - since >= STABLE_SECONDS:
                        in_a_row = 0
                await asyncio.sleep(delay_seconds(in_a_row, self._jitter()))
                in_a_row += 1
        finally:
            if self._link is not None:
                self._link.close("the pod ends")
