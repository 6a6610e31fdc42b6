"""The token bucket, on a clock that is moved."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure_operator.kube.errors import KubeUnavailable
from perdure_operator.kube.limits import MAX_PAUSE_SECONDS, TokenBucket


class Slept:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float, *_: Any) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Slept:
    return Slept(monkeypatch)


async def test_a_burst_passes_at_once_then_the_rate_holds(clock: Slept) -> None:
    bucket = TokenBucket(10, 5, now=lambda: clock.now)
    times = []
    for _ in range(8):
        await bucket.take(patience=60)
        times.append(round(clock.now, 6))
    assert times == [0, 0, 0, 0, 0, 0.1, 0.2, 0.3]
    clock.now += 100
    for _ in range(5):
        await bucket.take(patience=0)


async def test_a_pause_holds_everybody(clock: Slept) -> None:
    bucket = TokenBucket(10, 5, now=lambda: clock.now)
    bucket.pause(3)
    await bucket.take(patience=60)
    assert clock.now == 3
    bucket.pause(3600)
    await bucket.take(patience=60)
    assert clock.now == 3 + MAX_PAUSE_SECONDS


async def test_who_cannot_wait_is_told_and_takes_no_token(clock: Slept) -> None:
    bucket = TokenBucket(1, 1, now=lambda: clock.now)
    await bucket.take(patience=0)
    for _ in range(3):
        with pytest.raises(KubeUnavailable) as caught:
            await bucket.take(patience=0.5)
        assert caught.value.retry_after == 1.0
    clock.now += 1
    await bucket.take(patience=0)
