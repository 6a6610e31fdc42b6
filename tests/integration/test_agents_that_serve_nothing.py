"""A program that ends well without having asked for a run is no agent: its pool says so, instead of starting it for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.site import NS, Json, Site

from perdure_operator.controllers.pods import NOTHING_SERVED
from perdure_operator.kube.client import PODS
from perdure_operator.store.store import Store

ENDED: Json = {"phase": "Succeeded", "containerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": 0}}}]}


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection) -> Site:
    return Site(store, pg)


async def test_its_pool_says_so(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        await site.create("report")
        [pod] = await site.pods(1)
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": ENDED}, subresource="status")

        async def trouble() -> Any:
            return operator._fleet.troubles.get(f"{NS}/p")

        found = await site.until(trouble)
        assert (found.reason, found.message) == ("AgentExited", NOTHING_SERVED)

        async def said() -> bool:
            return (await site.get("report")).get("status", {}).get("waitReason") == "PoolNotReady"

        await site.until(said)


@pytest.mark.parametrize("how", ["it has served", "it was told to end"])
async def test_another_that_ends_well_is_no_trouble(site: Site, how: str) -> None:
    await site.pool()
    async with site.operating() as operator:
        await site.create("report")
        [pod] = await site.pods(1)
        if how == "it has served":
            held = await site.lease(pod)
            await runs.apply(site.store, runs.work(held, "finish", outcome="succeeded", output=b"null"))
            await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": ENDED}, subresource="status")
        else:
            patch = {"metadata": {"finalizers": ["test/hold"]}}
            await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], patch)
            await site.kube.delete(PODS, NS, pod["metadata"]["name"], uid=pod["metadata"]["uid"])
            await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": ENDED}, subresource="status")

        async def gone() -> bool:
            return not [row for row in await site.resources.pods() if str(row.kube_uid) == pod["metadata"]["uid"]]

        await site.until(gone)
        await asyncio.sleep(0.3)
        assert operator._fleet.troubles == {}
