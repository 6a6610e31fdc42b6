"""A queue of keys to reconcile: level-triggered, so a key says only "look at this", and many additions are one round of work.

A key is worked on by one worker at a time; added again meanwhile, it gets one more round after. A round that fails comes again after a
back-off of its own; the back-off ends with the first success. All methods belong to the loop that runs the queue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.metrics import QUEUE_DEPTH, QUEUE_ERRORS, QUEUE_WAIT, QUEUE_WORK

log = structlog.get_logger(__name__)

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Backoff:
    """Seconds: ``first`` after the first failure, doubled for each further one up to ``longest``; a random half of it is left out.

    An error that no retry helps goes to ``longest`` at once: what is wrong may still be put right, by somebody else.
    """

    first: float = 0.1
    longest: float = 60.0

    def delay(self, failures: int, error: BaseException, dice: random.Random) -> float:
        hopeless = isinstance(error, PerdureError) and not error.retryable
        whole = self.longest if hopeless else min(self.longest, self.first * 2.0 ** min(failures - 1, 60))
        return max(whole * dice.uniform(0.5, 1.0), getattr(error, "retry_after", None) or 0.0)


class WorkQueue(Generic[Key]):
    """``work`` is given a key, and answers None, or after how many seconds it wants to see the key again."""

    def __init__(
        self, name: str, work: Callable[[Key], Awaitable[float | None]], *,
        workers: int = 4, backoff: Backoff = Backoff(), dice: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._name, self._work, self._workers, self._backoff = name, work, workers, backoff
        self._dice = dice or random.Random()
        self._ready: asyncio.Queue[Key | None] = asyncio.Queue()
        self._added: dict[Key, float] = {}
        """When each key that needs a round was first added; it waits in ``_ready``, unless it is worked on now."""
        self._working: set[Key] = set()
        self._later: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._stopped = False

    def add(self, key: Key) -> None:
        """One round of work from now on; nothing new if the key waits for one already."""
        if key in self._added or self._stopped:
            return
        self._added[key] = asyncio.get_running_loop().time()
        if key not in self._working:
            self._ready.put_nowait(key)
        QUEUE_DEPTH.labels(self._name).set(len(self._added))

    def requeue_after(self, key: Key, seconds: float) -> None:
        """Adds the key then. Of several such wishes for a key the earliest holds."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        pending = self._later.get(key)
        if self._stopped or (pending is not None and pending.when() <= when):
            return
        if pending is not None:
            pending.cancel()
        self._later[key] = loop.call_at(when, self._due, key)

    def failures(self, key: Key) -> int:
        """How many rounds in a row failed."""
        return self._failures.get(key, 0)

    async def run(self) -> None:
        """Works until ``stop``. Cancelled, it cancels the rounds in progress."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._worker())

    def stop(self) -> None:
        """Takes up no key any more; ``run`` ends with the rounds in progress."""
        self._stopped = True
        for timer in self._later.values():
            timer.cancel()
        self._later.clear()
        self._added.clear()
        while not self._ready.empty():
            self._ready.get_nowait()
            self._ready.task_done()
        for _ in range(self._workers):
            self._ready.put_nowait(None)
        QUEUE_DEPTH.labels(self._name).set(0)

    async def settled(self) -> None:
        """No key is worked on or waits for it; keys of later times do not count."""
        await self._ready.join()

    def _due(self, key: Key) -> None:
        del self._later[key]
        self.add(key)

    async def _worker(self) -> None:
        while (key := await self._ready.get()) is not None:
            self._working.add(key)
            QUEUE_WAIT.labels(self._name).observe(asyncio.get_running_loop().time() - self._added.pop(key))
            QUEUE_DEPTH.labels(self._name).set(len(self._added))
            try:
                await self._round(key)
            finally:
                self._working.discard(key)
                if key in self._added:
                    # Before the round is marked as done, or `settled` would see a gap.
                    self._ready.put_nowait(key)
                self._ready.task_done()
        self._ready.task_done()

    async def _round(self, key: Key) -> None:
        try:
            with QUEUE_WORK.labels(self._name).time():
                again = await self._work(key)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = self._backoff.delay(failures, error, self._dice)
            typed = isinstance(error, PerdureError)
            QUEUE_ERRORS.labels(self._name, error.code if isinstance(error, PerdureError) else "unexpected").inc()
            log.log(30 if typed else 40, "a round failed", queue=self._name, key=str(key), failures=failures, again_in=round(delay, 1),
                    error=str(error), exc_info=not typed)  # fmt: skip
            self.requeue_after(key, delay)
        else:
            self._failures.pop(key, None)
            if again is not None:
                self.requeue_after(key, again)
