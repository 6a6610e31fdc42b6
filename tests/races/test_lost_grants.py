"""The answer that grants an execution is lost, and its request is sent again (E5): whoever hears it then starts then, and may act that much
longer. What a later attempt may do counts from there, not from the first commit."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import asyncpg
from tests.harness import runs
from tests.harness.runs import Held

from perdure_operator.store.operations import Control, Outcome
from perdure_operator.store.store import Beat, Store

TIMEOUT, LEASE = 30.0, 15.0
CALL: dict[str, Any] = {
    "key": "k", "tool": "pay", "effect": "external", "policy": "retry-same-key", "fingerprint": "f", "occurrence": 0, "step": None,
    "timeoutSeconds": TIMEOUT, "leaseSeconds": LEASE, "maxRetries": 3,
}  # fmt: skip


class Request:
    """One request of a worker. Each time that it is sent a gateway puts another token to it, as gateways do."""

    def __init__(self, held: Held, kind: str, **body: Any) -> None:
        self._held, self._kind, self._body, self._id = held, kind, body, uuid4()

    async def sent(self, store: Store) -> Outcome:
        body = {**self._body, "token": str(uuid4())}
        return await runs.apply(store, Control(self._held.run, self._kind, body, self._held.fence, self._id, payload=b"{}"))


def begin(held: Held, **changed: Any) -> Request:
    return Request(held, "activity.begin", **{**CALL, **changed})


def end(held: Held, token: str, state: str) -> Control:
    return runs.work(held, "activity.end", key="k", token=token, state=state, payload=b"1")


async def passes(pg: asyncpg.Connection, seconds: float) -> None:
    await pg.execute("update perdure.clock set shift = shift + $1 * interval '1 second'", seconds)


async def safe_in(pg: asyncpg.Connection) -> float:
    """Seconds until the last executor cannot act any more."""
    return float(await pg.fetchval("select extract(epoch from safe_at - perdure.now())::float8 from perdure.ledger"))


async def test_a_call_that_starts_late_is_waited_for_from_its_start(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    request = begin(held)
    granted = (await request.sent(store)).answer
    await passes(pg, 60)  # the answer is lost: the database is away for a minute
    assert await store.heartbeat(runs.GATEWAY, [Beat(held.run, held.fence.epoch, held.fence.holder)], [])
    again = (await request.sent(store)).answer
    assert (again["decision"], again["token"]) == ("execute", granted["token"])
    await passes(pg, 16)  # the worker is cut off; what it does it may do for 30 s from when it heard
    assert (await runs.apply(store, Control(held.run, "expire", held.lease | {"silentSeconds": 15}))).answer["expired"]
    heir = await runs.lease_next(store)
    refused = (await begin(heir).sent(store)).answer
    assert (refused["decision"], refused.get("token")) == ("unknown", None)
    assert 20 < refused["retryAfterSeconds"] <= TIMEOUT + LEASE - 16
    await passes(pg, refused["retryAfterSeconds"])
    assert (await begin(heir).sent(store)).answer["decision"] == "execute"


async def test_a_resent_retry_is_waited_for_with_its_backoff(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store, backoff_seconds=20)
    first = (await begin(held).sent(store)).answer
    await runs.apply(store, end(held, first["token"], "failed"))
    request = begin(held)
    retry = (await request.sent(store)).answer
    assert (retry["decision"], retry["retryAfterSeconds"] >= 10) == ("retry", True)
    await passes(pg, 60)
    assert (await request.sent(store)).answer == retry
    assert abs(await safe_in(pg) - (retry["retryAfterSeconds"] + TIMEOUT + LEASE)) < 5


async def test_a_grant_that_is_over_is_not_given_again(store: Store, pg: asyncpg.Connection) -> None:
    """The lease is the same, the execution is not: it was closed meanwhile, by the sidecar in the name of an agent that had gone."""
    held = await runs.running(store)
    request = begin(held)
    granted = (await request.sent(store)).answer
    await runs.apply(store, end(held, granted["token"], "succeeded"))
    assert (await request.sent(store)).answer["decision"] == "receipt"


async def test_a_grant_that_another_took_is_not_given_again(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    lost = begin(held)
    first = (await lost.sent(store)).answer
    await runs.apply(store, end(held, first["token"], "failed"))
    second = (await begin(held).sent(store)).answer
    assert second["decision"] == "retry"
    assert (await lost.sent(store)).answer["decision"] == "busy"
    await runs.apply(store, end(held, second["token"], "failed"))
    # It may come from a gateway that the pod has left: nobody would hear of a third one.
    assert (await lost.sent(store)).answer["decision"] == "busy"
    assert await pg.fetchval("select attempts from perdure.ledger") == 2
    assert (await begin(held).sent(store)).answer["decision"] == "retry"


async def test_a_resolution_that_grants_is_replayed_by_the_same_rule(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store, backoff_seconds=0)
    first = (await begin(held).sent(store)).answer
    await runs.apply(store, end(held, first["token"], "unknown"))
    assert (await begin(held, policy="query").sent(store)).answer["decision"] == "unknown"
    request = Request(held, "activity.resolve", key="k", happened=False, by="query", leaseSeconds=LEASE)
    granted = (await request.sent(store)).answer
    assert granted["decision"] == "retry"
    await passes(pg, 60)
    assert (await request.sent(store)).answer["token"] == granted["token"]
    assert abs(await safe_in(pg) - (TIMEOUT + LEASE)) < 5
    await runs.apply(store, end(held, granted["token"], "succeeded"))
    assert (await request.sent(store)).answer["decision"] == "receipt"
