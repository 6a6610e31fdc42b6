"""How a call of a decorated function becomes an operation of the run, whoever makes it.

On the run's own loop a call gives a coroutine. From a thread of synchronous agent code a synchronous function gives its result, the
thread blocking meanwhile. A coroutine that is awaited on some other loop hops over to the run's loop. Outside a run the function is
called as it is.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Generic, ParamSpec, TypeVar, cast

from perdure.sdk.execution import Execution
from perdure.sdk.here import HERE, Here
from perdure.sdk.signature import Signature

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class Durable(ABC, Generic[P, C, R]):
    """A decorated function. ``C`` is what a call gives (a coroutine, or for a synchronous function the result), ``R`` the result."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        functools.update_wrapper(cast("Any", self), signature.fn)
        if signature.is_async:
            _mark_async(self)

    @abstractmethod
    def _prepared(self, here: Here, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work[R]:
        """The operation, its identity claimed now: in the order of the calls, not when the coroutine happens to start."""

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call outside a run."""
        return self._signature.fn(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """In an asynchronous agent a synchronous function gives a coroutine too; type checkers prefer :meth:`aio` there."""
        here = HERE.get()
        if here is None:
            return cast("C", self._plain(args, kwargs))
        return cast("C", dispatch(here.execution, self._prepared(here, args, kwargs), blocking=not self._signature.is_async))

    def aio(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """The call as a coroutine, whether the function is synchronous or not."""
        here = HERE.get()
        if here is None:
            return self._plain_aio(args, kwargs)
        return cast("Coroutine[Any, Any, R]", dispatch(here.execution, self._prepared(here, args, kwargs), blocking=False))

    async def _plain_aio(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        value = self._plain(args, kwargs)
        return cast("R", await value if self._signature.is_async else value)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _mark_async(decorated: object) -> None:
    """Frameworks ask the standard library whether a call gives a coroutine; of an object that is no function it must be told."""
    mark = getattr(inspect, "markcoroutinefunction", None)  # from Python 3.12 on
    if mark is not None:
        mark(decorated)
    else:
        cast("Any", decorated)._is_coroutine = getattr(asyncio.coroutines, "_is_coroutine", None)


def dispatch(execution: Execution, work: Work[T], *, blocking: bool) -> Any:
    """``work`` as a coroutine, or its result if ``blocking`` and this is a thread without the run's loop."""
    if execution.threads.on_loop():
        return work()
    return execution.threads.block_on(work) if blocking else _anywhere(execution, work)


async def _anywhere(execution: Execution, work: Work[T]) -> T:
    if asyncio.get_running_loop() is execution.loop:
        return await work()
    context = contextvars.copy_context()

    async def hop() -> T:
        execution.threads.running -= 1
        try:
            return await execution.loop.create_task(work(), context=context)
        finally:
            execution.threads.running += 1

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(hop(), execution.loop))
