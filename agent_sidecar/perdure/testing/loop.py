"""An event loop whose time is the simulation's. It never sleeps: when it has nothing to do it stops, and says until when.

Agent code can use ``asyncio.sleep``, timeouts and anything else that asks the loop for the time; it all passes at once. Threads are
waited for in real time, since only they know when they are done.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from perdure.testing.clock import Clock

_THREAD_POLL_SECONDS = 0.005


class _Selector(selectors.DefaultSelector):
    """Tells its owner instead of blocking."""

    idle: Callable[[float | None], bool]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        while not ready and self.idle(timeout):
            ready = super().select(_THREAD_POLL_SECONDS)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``idle_until``: the clock's time of its next timer after a turn that ended idle, None when it waits for others only."""

    def __init__(self, clock: Clock, threads: Callable[[], int]) -> None:
        selector = _Selector()
        selector.idle = self._on_idle
        self._clock = clock
        self._threads = threads
        self._executing = 0
        self.idle_until: float | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        super().__init__(selector)

    def time(self) -> float:
        return self._clock.now

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """The loop keeps its tasks: the collector would run the ``finally`` blocks of those that nobody else knows."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def turn(self) -> None:
        """Runs until there is nothing to do without time passing, or until stopped."""
        self.idle_until = None
        self.run_forever()

    def _on_idle(self, timeout: float | None) -> bool:
        """True to look again: a thread is at work."""
        if self._threads() + self._executing > 0:
            return True
        self.idle_until = None if timeout is None else self._clock.now + timeout
        self.stop()
        return False

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._executing += 1
        future.add_done_callback(self._executed)
        return future

    def _executed(self, _: asyncio.Future[Any]) -> None:
        self._executing -= 1
