"""What the end of an attempt, or of a call, is taken to prove."""

from __future__ import annotations

from uuid import uuid4

import asyncpg
import pytest
from tests.harness import runs

from perdure_operator.store.store import Store


async def test_a_run_that_only_ever_yields_is_parked(store: Store, pg: asyncpg.Connection) -> None:
    """To give a run back is no progress; whoever ends its workers over and over has to be looked for by a person."""
    held = await runs.running(store, max_losses=3, max_retries=0)
    for _ in range(3):
        assert (await runs.apply(store, runs.work(held, "finish", outcome="yielded"))).state == "Pending"
        held = await runs.lease_next(store)
    assert (await runs.apply(store, runs.work(held, "finish", outcome="yielded"))).state == "Suspended"
    assert await pg.fetchval("select reason from perdure.runs") == "LossesExhausted"


async def test_a_run_that_gets_on_may_be_given_back_as_often_as_one_likes(store: Store) -> None:
    held = await runs.running(store, max_losses=3, max_retries=0)
    for n in range(8):
        await store.journal([runs.step(held, f"step:{n}#0")], wait=True)
        assert (await runs.apply(store, runs.work(held, "finish", outcome="yielded"))).state == "Pending"
        held = await runs.lease_next(store)


@pytest.mark.parametrize("still_running", [True, False])
async def test_a_call_that_was_given_up_and_still_runs_holds_back_the_next(store: Store, still_running: bool) -> None:
    held = await runs.running(store)
    token = str(uuid4())
    call = {
        "key": "k", "tool": "t", "effect": "external", "policy": "query", "fingerprint": "f", "occurrence": 0, "step": None,
        "timeoutSeconds": 60.0, "leaseSeconds": 30.0, "maxRetries": 3, "token": token,
    }  # fmt: skip
    await runs.apply(store, runs.work(held, "activity.begin", **call))
    end = {"key": "k", "token": token, "state": "unknown", "error": None, "stillRunning": still_running}
    await runs.apply(store, runs.work(held, "activity.end", **end))
    resolve = {"key": "k", "happened": False, "leaseSeconds": 30.0}
    answer = (await runs.apply(store, runs.work(held, "activity.resolve", **resolve, token=str(uuid4())))).answer
    assert answer["decision"] == ("unknown" if still_running else "retry")
    if still_running:
        assert 60 < answer["retryAfterSeconds"] <= 90
        # It has ended after all, and nobody knows how.
        await runs.apply(store, runs.work(held, "activity.end", **end | {"stillRunning": False}))
        await runs.apply(store, runs.work(held, "activity.begin", **call))  # whoever asks the provider from now on asks after that
        answer = (await runs.apply(store, runs.work(held, "activity.resolve", **resolve, token=str(uuid4())))).answer
        assert answer["decision"] == "retry"


async def test_a_receipt_without_its_result_says_why(store: Store) -> None:
    """The agent has had that error, and is to have it again when the call is replayed."""
    held = await runs.running(store)
    error = {"type": "payload-too-large", "message": "3 MB", "retryable": False}
    call = {
        "key": "k", "tool": "t", "effect": "external", "policy": "ask", "fingerprint": "f", "occurrence": 0, "step": None,
        "timeoutSeconds": 60.0, "leaseSeconds": 30.0, "maxRetries": 3, "token": str(uuid4()),
    }  # fmt: skip
    await runs.apply(store, runs.work(held, "activity.begin", **call))
    end = runs.work(held, "activity.end", key="k", token=call["token"], state="succeeded", error=error, payload=b"null")
    assert (await runs.apply(store, end)).answer["state"] == "SUCCEEDED"
    answer = (await runs.apply(store, runs.work(held, "activity.begin", **call | {"token": str(uuid4())}))).answer
    assert (answer["decision"], answer["error"]) == ("receipt", error)
