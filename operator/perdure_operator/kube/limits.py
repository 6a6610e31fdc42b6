"""How fast this process may ask the apiserver: a token bucket, which a ``Retry-After`` holds for everybody.

The apiserver's priority and fairness sees all our requests as one flow. One request that it sends away says that all of them come too
fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from perdure_operator.kube.errors import KubeUnavailable

MAX_PAUSE_SECONDS = 30.0
"""However long a server asks to wait, we look again after this."""


class TokenBucket:
    """``rate`` requests a second, ``burst`` of them at once after a quiet time. ``now``: seconds of a monotonic clock."""

    def __init__(self, rate: float, burst: int, *, now: Callable[[], float] | None = None) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError("a token bucket needs a rate above 0 and a burst of at least 1")
        self._interval = 1 / rate
        self._tolerance = (burst - 1) / rate
        self._now = now or (lambda: asyncio.get_running_loop().time())
        # When the next token would fall due if they came evenly (GCRA: no counter, no refill task).
        self._due = float("-inf")
        self._paused_until = float("-inf")

    async def take(self, *, patience: float) -> None:
        """Waits for a token. Raises KubeUnavailable, taking none, if that would need more than ``patience`` seconds."""
        now = self._now()
        due = max(self._due, now)
        wait = max(due - self._tolerance, self._paused_until) - now
        if wait > patience:
            raise KubeUnavailable(f"this client may not ask the apiserver for another {wait:.1f} s", retry_after=wait)
        self._due = due + self._interval
        if wait > 0:
            await asyncio.sleep(wait)

    def pause(self, seconds: float) -> None:
        """Nobody asks for so long."""
        self._paused_until = max(self._paused_until, self._now() + min(seconds, MAX_PAUSE_SECONDS))
