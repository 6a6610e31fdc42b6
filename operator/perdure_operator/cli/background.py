"""An event loop beside the command: commands are plain functions, what talks to an apiserver is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Its thread ends with the process, or by :meth:`close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the result. Raises what ``work`` raises; a Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T], poll_seconds: float) -> Iterator[T | None]:
        """The items as they come, and None whenever none came for so long."""
        queue: SimpleQueue[tuple[str, Any]] = SimpleQueue()

        async def feed() -> None:
            try:
                async for item in items:
                    queue.put(("item", item))
                queue.put(("end", None))
            except Exception as error:  # noqa: BLE001 (raised again where the items are read)
                queue.put(("error", error))

        future = asyncio.run_coroutine_threadsafe(feed(), self._loop)
        try:
            while True:
                try:
                    kind, item = queue.get(timeout=poll_seconds)
                except Empty:
                    yield None
                    continue
                if kind == "end":
                    return
                if kind == "error":
                    raise item
                yield item
        finally:
            future.cancel()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
