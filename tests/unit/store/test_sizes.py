"""How much a run may write: what counts, what is refused, what is told before, and what is taken in any case."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from tests.harness.runs import Held, apply, on_signal, running, settle, signal, spawn, step, verb, wait_for, work

from perdure_operator.domain.errors import LeaseTooLarge
from perdure_operator.store.context import LEAN, WHOLE
from perdure_operator.store.operations import Control, JournalStep, Limits, SliceWrite
from perdure_operator.store.store import Store

SIZES = "select raw_bytes, stored_bytes from perdure.runs where run_id = $1"


def json(size: int) -> bytes:
    return b'"' + b"x" * (size - 2) + b'"'


@pytest.fixture
async def limited(store: Store) -> AsyncIterator[Store]:
    """Ten thousand bytes of JSON a run."""
    store.limits = Limits(raw=10_000)
    yield store
    store.limits = Limits()


async def refused(store: Store, operation: Control) -> str:
    outcome = await apply(store, operation)
    assert outcome.code == "run-too-large", (operation.kind, outcome)
    return outcome.detail


async def wrote(pg: asyncpg.Connection, held: Held) -> tuple[int, int]:
    row = await pg.fetchrow(SIZES, held.run)
    assert row is not None
    return row["raw_bytes"], row["stored_bytes"]


async def kinds(pg: asyncpg.Connection, held: Held) -> list[str]:
    return [row["kind"] for row in await pg.fetch("select kind from perdure.events where run_id = $1 order by seq", held.run)]


async def test_what_a_worker_writes_counts(store: Store, pg: asyncpg.Connection) -> None:
    held = await running(store)
    await store.journal([step(held, "small", json(100))])
    assert await wrote(pg, held) == (100, 101)
    small_slice = SliceWrite("a", json(20))
    big = JournalStep(held.run, held.fence, uuid4(), "big", "s", "succeeded", json(2000), slices=(small_slice,))
    assert [outcome.code for outcome in await store.journal([big, big])] == ["ok", "busy"]
    raw, stored = await wrote(pg, held)
    assert raw == 2120
    in_blobs = await pg.fetchval("select sum(octet_length(data)) from perdure.blobs where run_id = $1", held.run)
    assert stored == 101 + 49 + in_blobs + 21
    before = raw
    for operation, size in (
        (work(held, "event", kind="x", payload=json(10)), 10),
        (work(held, "checkpoint", type="step", coversSeq=0, payload=json(11)), 11),
        (replace(work(held, "checkpoint", type="step", coversSeq=0, payload=json(2)), slices=(SliceWrite("s", json(10)),)), 12),
        (wait_for(held, "wait:w", on_signal("go"), suspend=False), 0),
        (signal(held.run, "go", "1", json(500)), 0),  # not what it wrote itself
        (verb(held.run, "pause"), 0),
        (verb(held.run, "resume"), 0),
    ):  # fmt: skip
        assert (await apply(store, operation)).code == "ok", operation.kind
        raw, _ = await wrote(pg, held)
        assert raw - before == size, operation.kind
        again = await apply(store, operation)
        assert (again.code, (await wrote(pg, held))[0]) == ("ok", raw), "a resend"
        before = raw


def activity(key: str, payload: bytes | None = None) -> dict[str, Any]:
    return {
        "key": key, "tool": "t", "effect": "external", "policy": "ask", "fingerprint": "f", "occurrence": 0, "token": str(uuid4()),
        "timeoutSeconds": 1, "leaseSeconds": 1, "payload": payload,
    }  # fmt: skip


async def test_an_operation_that_would_pass_the_limit_is_refused_and_the_run_can_still_end(limited: Store, pg: asyncpg.Connection) -> None:
    held = await running(limited)
    begun = activity("k")
    assert (await apply(limited, work(held, "activity.begin", **begun))).code == "ok"
    [outcome] = await limited.journal([step(held, "a", json(7000))])
    assert outcome.code == "ok"
    [outcome] = await limited.journal([step(held, "b", json(3001))])
    assert outcome.code == "run-too-large"
    stored = (await wrote(pg, held))[1]
    assert outcome.detail == (
        f"the run has written 7000 bytes ({stored} as stored), and this would be 3001 more (73); it may write 10000 (any number)"
    )
    [outcome] = await limited.journal([step(held, "b", json(3000))])
    assert outcome.code == "ok"

    child, _ = spawn(held, "c")
    for operation in (
        work(held, "event", kind="x", payload=b"1"),
        work(held, "checkpoint", type="step", coversSeq=0, payload=b"1"),
        work(held, "activity.begin", **activity("other", b"1")),
        child,
        Control(held.run, "suspend", {"waits": ["w"]}, held.fence, uuid4(), slices=(SliceWrite("s", b"1"),)),
    ):
        assert "it may write 10000" in await refused(limited, operation)
    assert await wrote(pg, held) == (10_000, (await wrote(pg, held))[1])

    # Never a receipt, in whatever form.
    receipt = {"key": "k", "token": begun["token"], "state": "succeeded", "payload": json(5000)}
    assert (await apply(limited, work(held, "activity.end", **receipt))).answer["state"] == "SUCCEEDED"
    assert (await wrote(pg, held))[0] == 15_000
    assert (await apply(limited, wait_for(held, "wait:w", on_signal("go"), suspend=False))).code == "ok"
    assert (await apply(limited, work(held, "finish", outcome="succeeded", payload=json(4000)))).answer == {"state": "Succeeded"}


@pytest.mark.parametrize("outcome", ["failed", "retry", "yielded"])
async def test_a_run_at_its_limit_may_end_in_every_way(limited: Store, outcome: str) -> None:
    held = await running(limited)
    await limited.journal([step(held, "a", json(10_000))])
    end = work(held, "finish", outcome=outcome, error={"type": "X", "message": "y"}, payload=b"null")
    assert (await apply(limited, end)).code == "ok"


async def test_a_batch_near_the_limit_decides_as_its_operations_would_alone(limited: Store, pg: asyncpg.Connection) -> None:
    held, other = await running(limited), await running(limited)
    batch = [step(held, "a", json(6000)), step(other, "a", json(6000)), step(held, "b", json(6000)), step(held, "c", json(900))]
    outcomes = [outcome.code for outcome in await limited.journal(batch)]
    assert outcomes == ["busy"] * 4, "together they might be too much for one of them"
    assert [(await limited.journal([one], wait=True))[0].code for one in batch] == ["ok", "ok", "run-too-large", "ok"]
    assert (await wrote(pg, held))[0] == 6900


async def test_the_error_of_a_step_counts(limited: Store, pg: asyncpg.Connection) -> None:
    held = await running(limited)
    error = '{"type": "X", "message": "' + "\u00e9" * 2000 + '", "retryable": false}'
    size = len(error.encode())
    assert size > 4000

    def failed(key: str) -> JournalStep:
        return JournalStep(held.run, held.fence, uuid4(), key, "s", "failed", b"null", error=error)

    assert [outcome.code for outcome in await limited.journal([failed("a"), step(held, "b", json(100))])] == ["ok", "ok"]
    assert await wrote(pg, held) == (size + 4 + 100, size + 5 + 101)
    assert [(await limited.journal([failed(key)]))[0].code for key in ("c", "d")] == ["ok", "run-too-large"]


async def test_errors_that_do_not_fit_into_a_lease_are_cut(store: Store) -> None:
    held = await running(store)
    message = "x" * 20_000
    error = '{"type": "X", "message": "' + message + '", "retryable": false}'
    for n in range(3):
        keys = [f"k{n}-{m:03}" for m in range(100)]
        await store.journal([JournalStep(held.run, held.fence, uuid4(), key, "s", "failed", b"null", error=error) for key in keys])
    errors = [row.error for row in (await store.context(held.run, LEAN)).journal]
    assert {error["type"] for error in errors if error} == {"X"}
    lengths = [len(error["message"]) for error in errors if error]
    assert (len(lengths), set(lengths)) == (300, {20_000, 500})
    assert sum(lengths) < 3 * 1024 * 1024
    with pytest.raises(LeaseTooLarge):
        await store.context(held.run, replace(WHOLE, journal=5_000_000))


async def test_the_log_says_once_that_the_limit_is_near(limited: Store, pg: asyncpg.Connection) -> None:
    held = await running(limited)
    [first] = await limited.journal([step(held, "a", json(7999))])
    [second] = await limited.journal([step(held, "b", b"1")])
    assert (first.nearly_full, second.nearly_full) == (False, True)
    for _ in range(2):
        await apply(limited, settle(held.run))
    [third] = await limited.journal([step(held, "c", b"1")])
    assert not third.nearly_full
    await apply(limited, work(held, "event", kind="x", payload=b"1"))
    assert (await kinds(pg, held)).count("run.nearly_full") == 1
    data = await pg.fetchval("select data from perdure.events where run_id = $1 and kind = 'run.nearly_full'", held.run)
    assert '"bytes": 8000' in data
    assert '"maxBytes": 10000' in data

    by_control = await running(limited)
    await apply(limited, work(by_control, "event", kind="x", payload=json(9000)))
    assert (await kinds(pg, by_control))[-2:] == ["agent.x", "run.nearly_full"]


async def test_stored_bytes_have_a_limit_of_their_own(limited: Store) -> None:
    """What hardly compresses, and what compresses to nothing."""
    limited.limits = Limits(stored=1000)
    held = await running(limited)
    assert (await limited.journal([step(held, "a", json(1_000_000))]))[0].code == "ok"
    assert (await limited.journal([step(held, "b", json(990))]))[0].code == "run-too-large"
