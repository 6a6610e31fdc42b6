"""Pods that the scheduler finds no node for: it is said, it is no failure, and it is over with the node."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from tests.harness.postgres import move_clock
from tests.harness.site import NS, Json, Site

from perdure_operator.kube.client import AGENTRUNS, PODS
from perdure_operator.services.fleet import SLOW_START_SECONDS, START_SECONDS
from perdure_operator.services.why import in_words
from perdure_operator.store.store import Store


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection) -> Site:
    return Site(store, pg)


def unschedulable(message: str, *, since: float) -> Json:
    """The status of a pod that the scheduler has found no node for since so many seconds ago."""
    at = (datetime.now(UTC) - timedelta(seconds=since)).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message, "lastTransitionTime": at}
    return {"phase": "Pending", "conditions": [said]}


SCHEDULED = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}


async def test_a_pod_without_a_node_says_so_and_is_no_failure(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        for name in ("report", "other"):
            await site.create(name)
        pods = await site.pods(2)

        async def say(status: Json, *which: Json) -> None:
            for pod in which or pods:
                await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": status}, subresource="status")

        async def told() -> Any:
            return (await site.store.pool_demand())[0].trouble

        await say(unschedulable("0/1 nodes are available: 1 Insufficient cpu.", since=0))
        await asyncio.sleep(0.3)
        assert await told() is None, "a node may come any moment"
        await say(unschedulable("0/1 nodes are available: 1 Insufficient cpu.", since=SLOW_START_SECONDS - 1))
        trouble = await site.until(told)
        assert (trouble["reason"], trouble["failures"]) == ("Unschedulable", 0)
        assert trouble["message"] == "0/1 nodes are available: 1 Insufficient cpu."
        assert operator._fleet.troubles[f"{NS}/p"].reason == "Unschedulable", "the pool's Ready says it too"

        async def said() -> Any:
            status = (await site.get("report")).get("status", {})
            return status if status.get("waitReason") == "PoolNotReady" else None

        [message] = {c["message"] for c in (await site.until(said))["conditions"]}
        assert message == "queued, but pods of pool default/p are Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."
        async with site.store.reader() as reader:
            rows = await reader.runs(namespace=NS, state=None, pool=None, parent=None, after=None, limit=1)
        assert in_words(next(iter(rows))) == ("PoolNotReady", message), "there is no next try"
        # No back-off: who waits too gets a pod at once. None is given up: an autoscaler may bring a node.
        await site.create("third")
        assert {pod["metadata"]["name"] for pod in pods} < {pod["metadata"]["name"] for pod in await site.pods(3)}
        await move_clock(site.pg, START_SECONDS + 100)
        await asyncio.sleep(0.3)
        assert {pod["metadata"]["name"] for pod in pods} <= {pod["metadata"]["name"] for pod in (await site.kube.list(PODS, NS))[0]}
        await say(SCHEDULED, pods[0])
        await asyncio.sleep(0.3)
        assert await told() is not None, "the other has no node yet"
        await say(SCHEDULED, pods[1])

        async def over() -> bool:
            return await told() is None or (await told())["reason"] != "Unschedulable"

        await site.until(over)
        await asyncio.sleep(0.3)
        # Their time to start begins with the node.
        assert {pod["metadata"]["name"] for pod in pods} <= {pod["metadata"]["name"] for pod in (await site.kube.list(PODS, NS))[0]}
        await site.lease(pods[0])


async def test_a_pod_without_a_node_that_nobody_needs_any_more_is_let_go(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        made = await site.create("report")
        [pod] = await site.pods(1)
        status = unschedulable("no node", since=60)
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": status}, subresource="status")

        async def told() -> bool:
            return f"{NS}/p" in operator._fleet.troubles

        await site.until(told)
        await site.kube.delete(AGENTRUNS, NS, "report", uid=made["metadata"]["uid"])
        await move_clock(site.pg, START_SECONDS + 100)
        await site.pods(0)

        async def over() -> bool:
            return operator._fleet.troubles == {}

        await site.until(over)


async def test_the_next_leader_does_not_give_up_a_pod_without_a_node(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        status = unschedulable("no node", since=START_SECONDS + 100)
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": status}, subresource="status")
    await move_clock(site.pg, START_SECONDS + 100)
    async with site.operating() as operator:
        # Nothing of the watch has come through yet.
        operator._fleet._unplaced.clear()
        await operator._fleet._give_up_on_starts(await site.resources.pods(), await site.store.pool_demand())
        assert operator._fleet.troubles[f"{NS}/p"].reason == "Unschedulable"
        await asyncio.sleep(0.3)
        assert await site.pods(1) == [await site.kube.get(PODS, NS, pod["metadata"]["name"])]
