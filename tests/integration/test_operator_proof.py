"""Pods that end under a run, and whether that proves that nothing they began can still happen (E5)."""

from __future__ import annotations

from uuid import uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.site import NS, Json, Site

from perdure_operator.kube.client import PODS
from perdure_operator.store.operations import Control
from perdure_operator.store.store import Store


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection) -> Site:
    return Site(store, pg)


CALL = {"key": "k", "tool": "pay", "effect": "external", "policy": "query", "fingerprint": "f", "occurrence": 0, "step": None,
        "timeoutSeconds": 300, "leaseSeconds": 15, "maxRetries": 3, "payload": b"{}"}  # fmt: skip


async def began(site: Site, pod: Json) -> runs.Held:
    """The pod's run, and a call of it under way."""
    held = await site.lease(pod)
    assert (await runs.apply(site.store, runs.work(held, "activity.begin", **CALL, token=str(uuid4())))).answer["decision"] == "execute"
    return held


async def granted(site: Site, held: runs.Held) -> bool:
    """Whether the provider's "not found" grants the call again."""
    assert (await runs.apply(site.store, runs.work(held, "activity.begin", **CALL, token=str(uuid4())))).answer["decision"] == "unknown"
    said = {"key": "k", "happened": False, "by": "query", "token": str(uuid4()), "leaseSeconds": 15}
    return (await runs.apply(site.store, runs.work(held, "activity.resolve", **said))).answer["decision"] == "retry"


async def test_a_pod_that_ends_under_its_run_is_replaced(site: Site, pg: asyncpg.Connection) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", retry={"backoffSeconds": 0})
        [pod] = await site.pods(1)
        held = await began(site, pod)
        status = {"phase": "Failed", "containerStatuses": [
            {"name": "agent", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}  # fmt: skip
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": status}, subresource="status")

        async def replaced() -> Json | None:
            found = [p for p in (await site.kube.list(PODS, NS))[0] if p["metadata"]["name"] != pod["metadata"]["name"]]
            return found[0] if found else None

        heir = await site.lease(await site.until(replaced))
        assert (heir.run, heir.fence.epoch > held.fence.epoch) == (held.run, True)
        assert await granted(site, heir), "that it was seen to end is proof"
        kinds = [row[0] for row in await pg.fetch("select kind from perdure.events order by seq")]
        assert "run.retrying" in kinds


async def test_a_pod_deleted_by_force_proves_nothing(site: Site, pg: asyncpg.Connection) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        held = await began(site, pod)
        site.kube.remove_pod(NS, pod["metadata"]["name"])

        async def lost() -> bool:
            return bool(await pg.fetchval("select epoch from perdure.runs where run_id = $1", held.run) > held.fence.epoch)

        await site.until(lost)
        assert await pg.fetchval("select gone_at is null from perdure.executors")


async def test_a_pod_that_lost_its_lease_is_ended_and_that_is_proof(site: Site, pg: asyncpg.Connection) -> None:
    """It stands still: nobody hears of it, and the kubelet kills it."""
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        held = await began(site, pod)
        name = pod["metadata"]["name"]
        await site.kube.merge_patch(PODS, NS, name, {"spec": {"nodeName": "one"}})
        await site.kube.merge_patch(PODS, NS, name, {"status": {"phase": "Running"}}, subresource="status")
        assert (await runs.apply(site.store, Control(held.run, "expire", held.lease))).answer["expired"]

        async def deleted() -> bool:
            found = await site.kube.get(PODS, NS, name)
            return found is not None and "deletionTimestamp" in found["metadata"]

        async def proven() -> bool:
            return bool(await pg.fetchval("select gone_at is not null from perdure.executors"))

        await site.until(deleted)
        assert not await proven()
        status = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": 137}}}]}
        await site.kube.merge_patch(PODS, NS, name, {"status": status}, subresource="status")
        site.kube.remove_pod(NS, name)
        await site.until(proven)
