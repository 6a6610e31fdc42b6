"""A run is not suspended under a call that is under way: it would be nobody's, and its outcome unknown (W3, E1). The receipt and the
suspend may come at once; whoever gets the row's lock first, nothing becomes unknown, and what was refused left nothing behind."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import asyncpg
from tests.harness import runs
from tests.harness.postgres import in_order
from tests.harness.runs import Held

from perdure_operator.store.operations import Control
from perdure_operator.store.store import Store

KEY = "wait:go#0"


async def begun(store: Store) -> tuple[Held, str]:
    """A run whose call is under way, and the token of it."""
    held = await runs.running(store)
    call: dict[str, Any] = {
        "key": "k", "tool": "pay", "effect": "external", "policy": "ask", "fingerprint": "f", "occurrence": 0, "step": None,
        "timeoutSeconds": 30, "leaseSeconds": 15, "maxRetries": 3, "token": str(uuid4()),
    }  # fmt: skip
    begin = Control(held.run, "activity.begin", call, held.fence, uuid4(), payload=b"{}")
    return held, (await runs.apply(store, begin)).answer["token"]


def receipt(held: Held, token: str) -> Control:
    return runs.work(held, "activity.end", key="k", token=token, state="succeeded", payload=b"1")


async def rows(pg: asyncpg.Connection) -> list[int]:
    """How many events, waits, journal entries and stored answers there are."""
    return [await pg.fetchval(f"select count(*) from perdure.{table}") for table in ("events", "waits", "journal", "requests")]


async def test_suspend_first(database: str, store: Store, pg: asyncpg.Connection) -> None:
    held, token = await begun(store)
    suspend = runs.wait_for(held, KEY, runs.on_signal("go"))
    refused, ended = await in_order(database, held.run, lambda: runs.apply(store, suspend), lambda: runs.apply(store, receipt(held, token)))
    assert (refused.code, refused.state) == ("effect-running", "Running")
    assert "pay" in refused.detail
    assert (ended.code, ended.answer["state"], ended.answer["evidence"]) == ("ok", "SUCCEEDED", False)
    assert (await runs.apply(store, suspend)).answer["status"] == "suspended", "the same request, after the receipt"


async def test_receipt_first(database: str, store: Store, pg: asyncpg.Connection) -> None:
    held, token = await begun(store)
    ended, waited = await in_order(
        database, held.run, lambda: runs.apply(store, receipt(held, token)),
        lambda: runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("go"))),
    )  # fmt: skip
    assert (ended.answer["state"], waited.answer["status"]) == ("SUCCEEDED", "suspended")


async def test_what_is_refused_leaves_nothing_behind(store: Store, pg: asyncpg.Connection) -> None:
    held, _ = await begun(store)
    before = await rows(pg)
    assert (await runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("go")))).code == "effect-running"
    assert await rows(pg) == before
    assert (await runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("go"), suspend=False))).answer["status"] == "open"
    before = await rows(pg)
    assert (await runs.apply(store, runs.work(held, "suspend", waits=[KEY], abandoned=[]))).code == "effect-running"
    assert await rows(pg) == before
    assert await pg.fetchval("select state from perdure.ledger") == "RUNNING"


async def test_a_wait_that_is_decided_is_answered(store: Store) -> None:
    held, _ = await begun(store)
    await runs.apply(store, runs.signal(held.run, "go", "1"))
    assert (await runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("go")))).answer["status"] == "done"
    assert (await runs.apply(store, runs.work(held, "suspend", waits=[KEY], abandoned=[]))).answer["status"] == "done"


async def test_a_call_that_is_unknown_keeps_nothing(store: Store) -> None:
    """So a person can be waited for who says what became of it."""
    held, token = await begun(store)
    await runs.apply(store, runs.work(held, "activity.end", key="k", token=token, state="unknown", payload=b"null"))
    assert (await runs.apply(store, runs.wait_for(held, KEY, runs.on_signal("effect:k:1")))).answer["status"] == "suspended"
