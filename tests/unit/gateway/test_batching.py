"""What the batcher does with a store that refuses, is down, or answers late: order, and nothing decided twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from perdure_operator.domain.errors import Busy, PerdureError, StoreError, Unavailable
from perdure_operator.gateway.batching import Batcher
from perdure_operator.store.operations import Control, Fence, Operation, Outcome
from perdure_operator.store.store import Store

FENCE = Fence(1, uuid4())


class ScriptedStore:
    """Answers ``ok``, but for operations of these kinds, and for calls with more than one operation when ``whole`` is an error."""

    def __init__(self, *, whole: PerdureError | None = None, **errors: PerdureError) -> None:
        self.whole, self.errors = whole, errors
        self.committed: list[str] = []

    async def control(self, operations: Sequence[Control], **_: Any) -> list[Outcome]:
        if self.whole is not None and len(operations) > 1:
            raise self.whole
        for operation in operations:
            if error := self.errors.get(operation.kind):
                raise error
        self.committed += [operation.kind for operation in operations]
        return [Outcome("ok", {}) for _ in operations]


@asynccontextmanager
async def batching(store: ScriptedStore) -> AsyncIterator[Batcher]:
    batcher = Batcher(cast(Store, store), "g", list, lambda operation, outcome: None)
    running = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def of(run: UUID, kind: str, fence: Fence | None = FENCE) -> Control:
    return Control(run, kind, {}, fence, uuid4())


async def outcomes(batcher: Batcher, operations: Sequence[Operation]) -> list[str]:
    found = await asyncio.gather(*(batcher.apply(operation) for operation in operations), return_exceptions=True)
    return ["ok" if isinstance(one, Outcome) else type(one).__name__ for one in found]


async def test_one_by_one_nothing_overtakes_what_is_not_decided() -> None:
    """The batch fails as a whole; tried alone, the first of a run gets no lock. What came after it must not be committed before it."""
    a, b = uuid4(), uuid4()
    store = ScriptedStore(whole=StoreError("a bad one among them"), first=Busy())
    async with batching(store) as batcher:
        assert await outcomes(batcher, [of(a, "first"), of(a, "second"), of(b, "other")]) == ["Busy", "Busy", "ok"]
    assert store.committed == ["other"]


async def test_a_bad_operation_harms_only_itself() -> None:
    a, b = uuid4(), uuid4()
    store = ScriptedStore(whole=StoreError("a bad one among them"), bad=StoreError("bad"))
    async with batching(store) as batcher:
        assert await outcomes(batcher, [of(a, "bad"), of(a, "next"), of(b, "other")]) == ["StoreError", "ok", "ok"]
    assert store.committed == ["next", "other"]


async def test_a_new_connection_owes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused operation holds back the younger ones of its lease until it is sent again; a pod that has connected anew sends what it
    still has in order, and the refused one may not be among that."""
    monkeypatch.setattr("perdure_operator.gateway.batching.GIVE_UP_SECONDS", 0)
    run, store = uuid4(), ScriptedStore(first=Unavailable("down"))
    async with batching(store) as batcher:
        assert await outcomes(batcher, [of(run, "first")]) == ["Unavailable"]
        assert await outcomes(batcher, [of(run, "younger")]) == ["Unavailable"]
        batcher.connected(run)
        assert await outcomes(batcher, [of(run, "younger")]) == ["ok"]
    assert store.committed == ["younger"]


async def test_a_refused_operation_that_comes_back_lets_the_others_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure_operator.gateway.batching.GIVE_UP_SECONDS", 0)
    run, store = uuid4(), ScriptedStore(first=Unavailable("down"))
    first, younger = of(run, "first"), of(run, "younger")
    async with batching(store) as batcher:
        assert await outcomes(batcher, [first]) == ["Unavailable"]
        assert await outcomes(batcher, [younger]) == ["Unavailable"]
        assert await outcomes(batcher, [of(run, "a person's", fence=None)]) == ["ok"]
        store.errors.clear()
        assert await outcomes(batcher, [first, younger]) == ["ok", "ok"]
    assert store.committed == ["a person's", "first", "younger"]
