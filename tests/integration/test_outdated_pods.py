"""Idle pods that would be made differently today: those of another template go at once, those of an earlier installation bit by bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.site import GATEWAY, NS, POOL, SETTINGS, Json, Site

from perdure_operator.kube.client import AGENTPOOLS, PODS
from perdure_operator.store.store import Store

WARM = 8
UPGRADED = replace(SETTINGS, pods=replace(SETTINGS.pods, sidecar_image="sidecar:2"))


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection) -> Site:
    site = Site(store, pg)
    await site.pool(spec=POOL | {"capacity": {"minIdle": WARM, "maxIdle": WARM, "maxPods": 20}})
    return site


async def connect(site: Site, *pods: Json) -> None:
    for pod in pods:
        known = await site.until(lambda pod=pod: site.store.worker_pod(pod["metadata"]["uid"]))
        await site.store.pod_hello(known[0], known[1], GATEWAY, reuse=False)


async def of_sidecar(site: Site, image: str) -> list[Json]:
    return [pod for pod in (await site.kube.list(PODS, NS))[0] if pod["spec"]["initContainers"][0]["image"] == image]


async def sidecars(site: Site, old: int, new: int) -> list[Json]:
    async def look() -> bool:
        return (len(await of_sidecar(site, "sidecar")), len(await of_sidecar(site, "sidecar:2"))) == (old, new)

    await site.until(look)
    await asyncio.sleep(0.4)
    assert await look(), "nothing more happens before these are up"
    return await of_sidecar(site, "sidecar:2")


async def test_an_upgrade_replaces_warm_pods_bit_by_bit_and_leaves_those_that_work(site: Site) -> None:
    async with site.operating():
        await connect(site, *await site.pods(WARM))
        await site.create("report")
        pods = await site.pods(WARM + 1)
        await connect(site, *pods)
        held = await site.lease(pods[0])
    async with site.operating(UPGRADED):
        for replaced in (2, 4, 6, 8):
            await connect(site, *await sidecars(site, 1 + WARM - replaced, replaced))
        assert await site.pg.fetchval("select run_id from perdure.pods where state = 'leased'") == held.run
    async with site.operating(UPGRADED):
        await sidecars(site, 1, WARM)


async def test_pods_of_another_template_go_at_once(site: Site) -> None:
    async with site.operating():
        before = await site.pods(WARM)
        await connect(site, *before)
        changed = {"template": {"spec": {"containers": [{"name": "agent", "image": "agent:mended"}]}}}
        await site.kube.merge_patch(AGENTPOOLS, NS, "p", {"spec": changed})

        async def retired() -> bool:
            return not await site.pg.fetchval("select exists (select from perdure.pods where state = 'idle')")

        await site.until(retired)
        names = {pod["metadata"]["name"] for pod in before}
        await site.until(lambda: gone(site, names))


async def gone(site: Site, names: set[str]) -> bool:
    return not any(pod["metadata"]["name"] in names for pod in (await site.kube.list(PODS, NS))[0])


async def test_each_attempt_says_of_which_revision_its_pod_is(site: Site) -> None:
    capacity = {"minIdle": 0, "maxIdle": 0}
    await site.kube.merge_patch(AGENTPOOLS, NS, "p", {"spec": {"capacity": capacity}})
    async with site.operating():
        await site.create("report", retry={"backoffSeconds": 0})
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        first = (await site.phase("report", "Running"))["status"]["revision"]
        await site.until(lambda: pool_says(site, first))
        changed = {"template": {"spec": {"containers": [{"name": "agent", "image": "agent:mended"}]}}}
        await site.kube.merge_patch(AGENTPOOLS, NS, "p", {"spec": changed})
        await runs.apply(site.store, runs.work(held, "finish", outcome="retry", error={"type": "T", "message": "m"}))
        [pod] = await site.pods(1, besides=pod["metadata"]["name"])
        await site.lease(pod)

        async def second() -> str | None:
            found = (await site.get("report"))["status"]["revision"]
            return found if found != first else None

        again = await site.until(second)
        await site.until(lambda: pool_says(site, again))
    told = await site.pg.fetch("select data ->> 'revision' from perdure.events where kind = 'run.leased' order by seq")
    assert [row[0] for row in told] == [first, again]


async def pool_says(site: Site, revision: str) -> bool:
    pool = await site.kube.get(AGENTPOOLS, NS, "p")
    return ((pool or {}).get("status") or {}).get("revision") == revision
