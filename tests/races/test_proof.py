"""A second execution of an external effect needs proof that the first executor is gone, or somebody's decision (E5). That time has passed
proves nothing: what was frozen thaws. The proof is that of a lease, and is found whichever comes first, it or the entry that needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.postgres import waiters
from tests.harness.runs import GATEWAY, Held

from perdure_operator.store import batch
from perdure_operator.store.operations import Control
from perdure_operator.store.store import Store

DAY = 86_400.0


def call(policy: str, **changed: Any) -> dict[str, Any]:
    return {
        "key": "k", "tool": "pay", "effect": "external", "policy": policy, "fingerprint": "f", "occurrence": 0, "step": None,
        "timeoutSeconds": 3, "leaseSeconds": 2, "maxRetries": 5, "token": str(uuid4()), **changed,
    }  # fmt: skip


async def begin(store: Store, held: Held, policy: str = "query", **changed: Any) -> dict[str, Any]:
    outcome = await runs.apply(store, Control(held.run, "activity.begin", call(policy, **changed), held.fence, uuid4(), payload=b"{}"))
    assert outcome.code == "ok"
    return outcome.answer


async def resolve(store: Store, held: Held, by: str = "query", **changed: Any) -> dict[str, Any]:
    body = {"key": "k", "happened": False, "by": by, "token": str(uuid4()), "leaseSeconds": 2, **changed}
    outcome = await runs.apply(store, Control(held.run, "activity.resolve", body, held.fence, uuid4(), payload=b"1"))
    assert outcome.code == "ok"
    return outcome.answer


async def passes(pg: asyncpg.Connection, seconds: float) -> None:
    await pg.execute("update perdure.clock set shift = shift + $1 * interval '1 second'", seconds)


async def executors(pg: asyncpg.Connection) -> int:
    return int(await pg.fetchval("select count(*) from perdure.executors"))


async def expire(store: Store, held: Held) -> None:
    """Its heartbeats have ceased."""
    assert (await runs.apply(store, Control(held.run, "expire", held.lease))).answer["expired"]


async def lost(store: Store, policy: str = "query", *, reuse: bool = False) -> tuple[Held, Held]:
    """A worker began a call and fell silent; and the one that has the run now."""
    run = await runs.pending(store)
    pod = await runs.idle_pod(store, reuse=reuse)
    [grant] = await store.dispatch(GATEWAY, [pod])
    first = Held(run, runs.Fence(grant.epoch, pod))
    assert (await begin(store, first, policy))["decision"] == "execute"
    await expire(store, first)
    return first, await runs.lease_next(store)


async def granted(store: Store, held: Held, policy: str) -> bool:
    """Whether the provider's "not found", or the policy, grants another execution now."""
    answer = await begin(store, held, policy)
    if policy == "query" and answer["decision"] == "unknown" and answer["policy"] == "query":
        answer = await resolve(store, held)
    return answer["decision"] in ("execute", "retry")


@pytest.mark.parametrize("policy", ["query", "assume-not-done"])
async def test_time_proves_nothing(store: Store, pg: asyncpg.Connection, policy: str) -> None:
    first, heir = await lost(store, policy)
    answer = await begin(store, heir, policy)
    assert (answer["decision"], answer["retryAfterSeconds"] > 0) == ("unknown", True), "a proof may come yet"
    await passes(pg, DAY)
    assert not await granted(store, heir, policy)
    answer = await begin(store, heir, policy)
    assert (answer["decision"], answer["policy"], answer.get("retryAfterSeconds", 0)) == ("unknown", "ask", 0), "nobody asks for ever"
    assert await executors(pg) == 1
    await store.pod_gone(first.fence.holder, "PodDeleted")
    assert await granted(store, heir, policy), "a proof that came late is a proof"
    assert await executors(pg) == 0


async def test_a_provider_is_asked_before_a_person_is(store: Store, pg: asyncpg.Connection) -> None:
    _, heir = await lost(store)
    await passes(pg, DAY)
    answer = await begin(store, heir)
    assert (answer["decision"], answer["policy"], answer.get("retryAfterSeconds", 0)) == ("unknown", "query", 0)
    answer = await resolve(store, heir)
    assert (answer["decision"], answer["policy"]) == ("unknown", "ask")
    assert "a person must decide" in answer["message"]
    assert (await begin(store, heir))["policy"] == "ask"
    assert (await resolve(store, heir, happened=True))["decision"] == "receipt"
    assert await executors(pg) == 0


async def test_where_the_provider_ignores_a_second_call_time_is_enough(store: Store, pg: asyncpg.Connection) -> None:
    _, heir = await lost(store, "retry-same-key")
    assert (await begin(store, heir, "retry-same-key"))["decision"] == "unknown"
    await passes(pg, 5)
    assert (await begin(store, heir, "retry-same-key"))["decision"] == "execute"


async def test_a_person_decides_at_once_and_is_told_what_may_still_act(store: Store, pg: asyncpg.Connection) -> None:
    first, heir = await lost(store, "ask")
    answer = await resolve(store, heir, "person")
    assert answer["decision"] == "retry"
    assert str(first.fence.holder) in answer["message"]
    event = await pg.fetchval("select data ->> 'mayStillAct' from perdure.events where kind = 'activity.resolved'")
    assert str(first.fence.holder) in event


async def test_a_person_who_disregards_nothing_is_told_nothing(store: Store, pg: asyncpg.Connection) -> None:
    first, heir = await lost(store, "ask")
    await store.pod_gone(first.fence.holder, "PodDeleted")
    assert "still act" not in (await resolve(store, heir, "person"))["message"]
    assert await pg.fetchval("select data ->> 'mayStillAct' from perdure.events where kind = 'activity.resolved'") is None


@pytest.mark.parametrize("policy", ["query", "assume-not-done"])
async def test_the_proof_comes_before_the_entry_is_unknown(store: Store, pg: asyncpg.Connection, policy: str) -> None:
    held = await runs.running(store)
    await begin(store, held, policy)
    assert await store.pod_gone(held.fence.holder, "PodDeleted") == [held.run]
    assert await granted(store, await runs.lease_next(store), policy)


async def test_the_proof_comes_before_the_entry(database: str, store: Store, pg: asyncpg.Connection) -> None:
    """The pod is gone, what it began last is still on its way into the store, and its lease ends after that."""
    held = await runs.running(store)
    assert len(await pg.fetch("select * from perdure.pod_gone($1)", held.fence.holder)) == 1
    assert (await begin(store, held))["decision"] == "execute"
    await expire(store, held)
    assert await granted(store, await runs.lease_next(store), "query")


async def test_a_lease_that_left_nothing_leaves_no_proof(store: Store, pg: asyncpg.Connection) -> None:
    held = await runs.running(store)
    await store.pod_gone(held.fence.holder, "PodDeleted")
    heir = await runs.lease_next(store)
    await runs.apply(store, runs.work(heir, "finish", outcome="succeeded"))
    assert await executors(pg) == 0


async def test_a_run_that_ends_keeps_what_an_unknown_effect_refers_to(store: Store, pg: asyncpg.Connection) -> None:
    _, heir = await lost(store)
    await runs.apply(store, runs.work(heir, "finish", outcome="failed"))
    assert await pg.fetchval("select state from perdure.ledger") == "UNKNOWN"
    assert await executors(pg) == 1


async def test_the_pod_ends_while_its_lease_does(database: str, store: Store, pg: asyncpg.Connection) -> None:
    """The reaper's commit leaves the entry UNKNOWN; the pod's end waits for it, and looks after it."""
    held = await runs.running(store)
    await begin(store, held)
    reaper = await asyncpg.connect(database)
    async with reaper.transaction():
        await batch.control(reaper, [Control(held.run, "expire", held.lease)], wait=True)
        gone = asyncio.create_task(store.pod_gone(held.fence.holder, "PodDeleted"))
        await waiters(database, 1)
    assert await gone == []
    await reaper.close()
    assert await granted(store, await runs.lease_next(store), "query")


async def test_one_that_was_deleted_by_force_and_then_seen_to_end(store: Store, pg: asyncpg.Connection) -> None:
    first, heir = await lost(store)
    await store.pod_gone(first.fence.holder, "PodDeleted", proven=False)
    assert not await granted(store, heir, "query")
    await store.pod_gone(first.fence.holder, "PodDeleted", proven=True)
    assert await granted(store, heir, "query")


def _no(first: Held) -> tuple[UUID, int] | None:
    return None


def _other_epoch(first: Held) -> tuple[UUID, int] | None:
    return first.run, first.fence.epoch + 1


def _own(first: Held) -> tuple[UUID, int] | None:
    return first.run, first.fence.epoch


@pytest.mark.parametrize(("ended", "proves"), [(_own, True), (_no, False), (_other_epoch, False)], ids=["own", "none", "other"])
async def test_a_reusing_pod_says_of_which_lease_nothing_is_left(
    store: Store, ended: Callable[[Held], tuple[UUID, int] | None], proves: bool
) -> None:
    first, heir = await lost(store, reuse=True)
    assert await store.pod_idle(first.fence.holder, GATEWAY, ended=ended(first))
    assert await granted(store, heir, "query") == proves


async def test_no_pod_speaks_for_another(store: Store) -> None:
    first, heir = await lost(store, reuse=True)
    stranger = await runs.idle_pod(store, reuse=True)
    await store.pod_idle(stranger, GATEWAY, ended=(first.run, first.fence.epoch))
    assert not await granted(store, heir, "query")


async def test_a_pod_that_has_gone_on_to_another_run_is_proof_of_the_first_by_its_end(store: Store) -> None:
    first, heir = await lost(store, reuse=True)
    assert await store.pod_idle(first.fence.holder, GATEWAY)  # an earlier version of the sidecar: it names no lease
    other = await runs.pending(store)
    [grant] = await store.dispatch(GATEWAY, [first.fence.holder])
    assert grant.run == other
    await store.pod_gone(first.fence.holder, "PodDeleted")
    assert await granted(store, heir, "query")


async def test_a_no_that_is_older_than_the_proof_is_none(store: Store, pg: asyncpg.Connection) -> None:
    """The provider is asked, then the first worker acts, then it is seen to end; and only then the answer to the question is told."""
    first, heir = await lost(store)
    assert (await begin(store, heir))["retryAfterSeconds"] > 0
    await store.pod_gone(first.fence.holder, "PodDeleted")
    answer = await resolve(store, heir)
    assert (answer["decision"], answer["policy"], answer["retryAfterSeconds"] > 0) == ("unknown", "query", True)
    assert (await resolve(store, heir))["decision"] == "unknown", "however often it is told"
    assert (await begin(store, heir)).get("retryAfterSeconds", 0) == 0
    assert (await resolve(store, heir))["decision"] == "retry"


async def test_a_thread_that_goes_on_is_its_own_witness(store: Store, pg: asyncpg.Connection) -> None:
    """It was given up in a process that lives on under its lease: only its own end proves anything."""
    held = await runs.running(store)
    token = (await begin(store, held))["token"]
    end = {"key": "k", "token": token, "state": "unknown", "payload": b"null"}
    await runs.apply(store, runs.work(held, "activity.end", **end, stillRunning=True))
    await passes(pg, DAY)
    assert not await granted(store, held, "query")
    await runs.apply(store, runs.work(held, "activity.end", **end))
    assert await granted(store, held, "query")


async def test_who_did_not_execute_says_so_late(store: Store, pg: asyncpg.Connection) -> None:
    """It thawed, saw that it was too late, and did nothing: its word under an old epoch is evidence, and settles the question."""
    first, heir = await lost(store)
    token = await pg.fetchval("select token from perdure.ledger")
    ended = await runs.apply(store, runs.work(first, "activity.end", key="k", token=str(token), state="failed", payload=b"null"))
    assert (ended.answer["state"], ended.answer["evidence"]) == ("FAILED", True)
    assert (await begin(store, heir))["decision"] == "retry"
    assert await executors(pg) == 0


async def test_a_pod_whose_run_was_taken_from_it_is_told_of_to_whoever_ends_pods(store: Store) -> None:
    first, heir = await lost(store)
    [pool] = await store.pool_demand()
    assert (pool.retiring, pool.lost) == ([first.fence.holder], [first.fence.holder])
    await runs.apply(store, runs.work(heir, "finish", outcome="succeeded"))
    [pool] = await store.pool_demand()
    assert set(pool.retiring) == {first.fence.holder, heir.fence.holder}
    assert pool.lost == [first.fence.holder], "the other has ended by its own word"


async def test_what_a_pod_says_has_ended_proves_nothing_while_it_has_the_lease(store: Store, pg: asyncpg.Connection) -> None:
    """It may be given the same lease again, and begin more under it."""
    run = await runs.pending(store)
    pod = await runs.idle_pod(store, reuse=True)
    [grant] = await store.dispatch(GATEWAY, [pod])
    held = Held(run, runs.Fence(grant.epoch, pod))
    begun = await begin(store, held)
    end = runs.work(held, "activity.end", payload=b"null", key=begun["key"], token=begun["token"], state="unknown", stillRunning=True)
    assert (await runs.apply(store, end)).code == "ok"
    await store.processes_ended(pod, (run, grant.epoch))
    assert await pg.fetchval("select gone_at from perdure.executors") is None
    await expire(store, held)
    await store.processes_ended(pod, (run, grant.epoch))
    assert await pg.fetchval("select proof from perdure.executors") == "processes-ended"
