"""Synchronous agents, steps and tools: threads on one side, the event loop on the other.

A synchronous body runs in a daemon thread (one that hangs must not keep the process alive), with its caller's context. When such a body
calls a durable operation, its thread blocks in :meth:`Threads.block_on` while the loop does the work; a synchronous step that is called
from there runs in that same waiting thread, so a whole synchronous agent stays in one thread, as its database handles expect.

``running`` counts threads that are in agent code: those started here, less all that wait for the loop. It is changed on the loop's thread
only, and is there for tests, whose time must not pass while a thread is at work.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")


class _Job:
    """A call to make in a waiting thread."""

    __slots__ = ("context", "done", "fn")

    def __init__(self, fn: Callable[[], Any], context: contextvars.Context, done: Callable[[Callable[[], Any]], None]) -> None:
        self.fn = fn
        self.context = context
        self.done = done


class _Waiting:
    """A thread that waits for ``task`` and can make calls in the meantime."""

    __slots__ = ("inbox", "task")

    def __init__(self) -> None:
        self.inbox: SimpleQueue[_Job | Callable[[], Any]] = SimpleQueue()
        self.task: asyncio.Task[Any] | None = None


_WAITING: ContextVar[_Waiting | None] = ContextVar("perdure.waiting-thread", default=None)


class Threads:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.running = 0
        self._ident = threading.get_ident()

    def on_loop(self) -> bool:
        return threading.get_ident() == self._ident

    def call(self, fn: Callable[[], T], *, own_thread: bool = False) -> asyncio.Future[T]:
        """Calls ``fn`` in a thread, in a copy of the caller's context. ``own_thread``: never in the waiting thread of the caller,
        so that giving up on it is possible. The call cannot be interrupted; the future may be."""
        future: asyncio.Future[T] = self.loop.create_future()
        context = contextvars.copy_context()

        def done(outcome: Callable[[], T]) -> None:
            try:
                self.loop.call_soon_threadsafe(self._settle, future, outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

        self.running += 1
        waiting = _WAITING.get()
        if waiting is not None and not own_thread and asyncio.current_task() is waiting.task:
            waiting.inbox.put(_Job(fn, context, done))
        else:
            threading.Thread(target=_work, args=(_Job(fn, context, done),), name="perdure-sync", daemon=True).start()
        return future

    def _settle(self, future: asyncio.Future[T], outcome: Callable[[], T]) -> None:
        self.running -= 1
        if future.done():
            return
        try:
            future.set_result(outcome())
        except StopIteration as error:
            future.set_exception(RuntimeError(f"a synchronous function raised StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001  # handed on to whoever awaits
            future.set_exception(error)

    def block_on(self, make: Callable[[], Awaitable[T]]) -> T:
        """Awaits ``make()`` on the loop, from a thread of agent code, and gives its result. ``make`` is called on the loop."""
        waiting = _Waiting()
        context = contextvars.copy_context()
        context.run(_WAITING.set, waiting)

        async def run() -> T:
            return await make()

        def finish(task: asyncio.Task[T]) -> None:
            self.running += 1
            if task.cancelled():
                waiting.inbox.put(_raiser(asyncio.CancelledError()))
            elif (error := task.exception()) is not None:
                waiting.inbox.put(_raiser(error))
            else:
                waiting.inbox.put(task.result)

        def start() -> None:
            self.running -= 1
            waiting.task = self.loop.create_task(run(), context=context)
            waiting.task.add_done_callback(finish)

        try:
            self.loop.call_soon_threadsafe(start)
        except RuntimeError:
            threading.Event().wait()  # the attempt is over and its loop closed: this thread may not go on either
        while isinstance(item := waiting.inbox.get(), _Job):
            _work(item)
        return cast("T", item())


def _work(job: _Job) -> None:
    try:
        value = job.context.run(job.fn)
    except BaseException as error:  # noqa: BLE001  # handed on to whoever awaits
        job.done(_raiser(error))
    else:
        job.done(lambda: value)


def _raiser(error: BaseException) -> Callable[[], Any]:
    def outcome() -> Any:
        raise error

    return outcome
