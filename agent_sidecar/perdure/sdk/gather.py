"""``gather``: several things at once, so that a restart can tell them apart and a wait among them does not hold the others up.

When one fails, the others begin nothing new and their waits end; what is at work is let finish, because to interrupt a tool is to make
its effect unknown. Then the first failure (by position) is raised. A branch that was stopped so may get further after a restart, where
what is done takes no time; it does nothing twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any, Literal, TypeVar, overload

from perdure.sdk.here import HERE, Here
from perdure.sdk.strands import Group, Strand

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
T = TypeVar("T")

_numbers = itertools.count(1)


@overload
async def gather(a: Awaitable[T1], b: Awaitable[T2], /) -> tuple[T1, T2]: ...
@overload
async def gather(a: Awaitable[T1], b: Awaitable[T2], c: Awaitable[T3], /) -> tuple[T1, T2, T3]: ...
@overload
async def gather(a: Awaitable[T1], b: Awaitable[T2], c: Awaitable[T3], d: Awaitable[T4], /) -> tuple[T1, T2, T3, T4]: ...
@overload
async def gather(
    a: Awaitable[T1], b: Awaitable[T2], c: Awaitable[T3], d: Awaitable[T4], e: Awaitable[T5], /
) -> tuple[T1, T2, T3, T4, T5]: ...
@overload
async def gather(*awaitables: Awaitable[T], return_exceptions: Literal[False] = False) -> tuple[T, ...]: ...
@overload
async def gather(*awaitables: Awaitable[T], return_exceptions: Literal[True]) -> tuple[T | Exception, ...]: ...
async def gather(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> tuple[Any, ...]:
    """Awaits all and gives their results in order. ``return_exceptions``: failures are results too, and stop nobody.

    Outside a run it is ``asyncio.gather``. Raises what the first failed one raised; RunCancelled before anything else.
    """
    here = HERE.get()
    if here is None:
        return tuple(await asyncio.gather(*awaitables, return_exceptions=return_exceptions))
    group = Group(next(_numbers))
    tasks = []
    here.strand.enter()
    try:
        for number, awaitable in enumerate(awaitables):
            lane = (*here.strand.lane, (group.number, number))
            strand = here.execution.strands.begin(lane, group, here.strand)
            tasks.append(asyncio.create_task(_branch(here, strand, awaitable, stop=not return_exceptions)))
        outcomes = await _all(tasks)
    finally:
        here.strand.leave()
    return _results(outcomes, return_exceptions)


async def _branch(here: Here, strand: Strand, awaitable: Awaitable[T], *, stop: bool) -> T:
    try:
        with here.execution.here(here.scope, strand, here.step):
            return await awaitable
    except BaseException:
        if stop and strand.group is not None:
            strand.group.stopped = True
            here.execution.waits.stop(strand.group)
        raise
    finally:
        strand.end()


async def _all(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Results and exceptions, when all have ended. A cancellation of this task cancels them, waits for them, and is passed on."""
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()
        raise
    return [asyncio.CancelledError() if task.cancelled() else task.exception() or task.result() for task in tasks]


def _results(outcomes: list[Any], return_exceptions: bool) -> tuple[Any, ...]:
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    urgent = [error for error in failures if not isinstance(error, Exception | asyncio.CancelledError)]
    if urgent:
        raise urgent[0]
    if failures and not return_exceptions:
        raise next((error for error in failures if isinstance(error, Exception)), failures[0])
    return tuple(outcomes)
