"""Pods belong to their pool: what drains a node may end them, and the end of the pool is theirs, without a mark against any run."""

from __future__ import annotations

import contextlib
from typing import Any

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.site import NS, POOL, Json, Site

from perdure_operator.kube.client import AGENTPOOLS, PODS
from perdure_operator.store.store import Store


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection) -> Site:
    return Site(store, pg)


async def pool_of(site: Site) -> Json:
    found = await site.kube.get(AGENTPOOLS, NS, "p")
    assert found is not None
    return found


async def delete_pool(site: Site) -> None:
    assert await site.kube.delete(AGENTPOOLS, NS, "p", uid=(await pool_of(site))["metadata"]["uid"])


async def counted(site: Site) -> tuple[int, int]:
    """Failures and losses of the only run."""
    return tuple(await site.pg.fetchrow("select failures, losses from perdure.runs"))


def conditions(run: Json) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in (run.get("status") or {}).get("conditions") or []}


async def says(site: Site, name: str, kind: str, expected: tuple[str, str]) -> None:
    async def look() -> bool:
        return conditions(await site.get(name)).get(kind) == expected

    await site.until(look)


async def test_a_pod_is_controlled_by_its_pool_which_does_not_wait_for_it(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
    [owner] = pod["metadata"]["ownerReferences"]
    uid = (await pool_of(site))["metadata"]["uid"]
    assert owner == {
        "apiVersion": "perdure.dev/v1alpha1", "kind": "AgentPool", "name": "p", "uid": uid, "controller": True, "blockOwnerDeletion": False,
    }  # fmt: skip
    assert not (await pool_of(site))["metadata"].get("finalizers")


async def test_the_end_of_a_pool_takes_its_pods_along_and_its_runs_wait_for_another(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        await site.phase("report", "Running")
        await delete_pool(site)
        await site.pods(0)
        await says(site, "report", "Stalled", ("True", "PoolNotFound"))
        assert await counted(site) == (0, 0)
        await site.pool()
        [other] = await site.pods(1)
        again = await site.lease(other)
        assert (again.run, again.fence.epoch > held.fence.epoch) == (held.run, True)
        await site.phase("report", "Running")
        assert conditions(await site.get("report"))["Stalled"][0] == "False"
    assert await counted(site) == (0, 0)


async def test_a_queued_run_says_at_once_that_its_pool_is_gone_and_that_it_is_back(site: Site) -> None:
    await site.pool(spec=POOL | {"capacity": {"maxPods": 0}})
    async with site.operating():
        await site.create("report")
        await site.phase("report", "Pending")
        await delete_pool(site)
        await says(site, "report", "Stalled", ("True", "PoolNotFound"))
        await site.pool(spec=POOL | {"capacity": {"maxPods": 0}})

        async def waits() -> bool:
            return conditions(await site.get("report"))["Stalled"][0] == "False"

        await site.until(waits)


async def test_a_pool_that_was_made_anew_while_the_operator_was_away_has_pods_of_its_own(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [old] = await site.pods(1)
        held = await site.lease(old)
    await delete_pool(site)
    await runs.apply(site.store, runs.work(held, "finish", outcome="yielded"))
    await site.pool()
    await site.pods(0)
    async with site.operating():
        [new] = await site.pods(1)
        assert new["metadata"]["ownerReferences"][0]["uid"] == (await pool_of(site))["metadata"]["uid"]
        assert (await site.lease(new)).run == held.run
    assert await counted(site) == (0, 0)


@pytest.mark.parametrize("drained", [True, False])
async def test_a_run_that_was_given_back_before_anybody_said_why_is_judged_by_what_the_cluster_says(site: Site, drained: bool) -> None:
    """The agent hears of a drain when the operator does, and sooner where that is drained as well."""
    await site.pool()
    async with site.operating():
        await site.create("report", retry={"maxLosses": 1})
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"spec": {"nodeName": "n"}})
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": {"phase": "Running"}}, subresource="status")
        assert site.watch is not None
        site.watch.cut()
        if drained:
            site.kube.end(PODS, site.kube.objects[PODS][NS, pod["metadata"]["name"]], grace_seconds=30)
        # The second in a row, which is one too many.
        await site.pg.execute("update perdure.runs set losses = 1, loss_seq = worker_seq")
        await runs.apply(site.store, runs.work(held, "finish", outcome="yielded"))
        assert await counted(site) == (0, 2)
        assert await site.pg.fetchval("select state from perdure.runs") == "Suspended"

        async def deleted() -> bool:
            found = await site.kube.get(PODS, NS, pod["metadata"]["name"])
            return found is None or "deletionTimestamp" in found["metadata"]

        await site.until(deleted)

        async def judged() -> bool:
            return not drained and await site.pg.fetchval("select charged_run is null from perdure.pods")

        if not drained:
            await site.until(judged)
        with contextlib.suppress(KeyError):
            site.kube.remove_pod(NS, pod["metadata"]["name"])
        await site.watch.resume()
    async with site.operating():  # it finds the pod gone
        await site.until(lambda: site.pg.fetchval("select not exists (select from perdure.pods where pod_id = $1)", held.fence.holder))
        if drained:
            [other] = await site.pods(1)
            assert (await site.lease(other)).run == held.run
    assert await counted(site) == ((0, 1) if drained else (0, 2))
    assert await site.pg.fetchval("select state from perdure.runs") == ("Running" if drained else "Suspended")
    assert await site.store.verify() == []


@pytest.mark.parametrize("proof", ["evicted", "deleted", "by force", "in good order"])
async def test_a_pod_that_somebody_takes_away_counts_for_nothing(site: Site, proof: str) -> None:
    """Even if its agent says no word of it, and whatever the operator came to see of its end."""
    await site.pool()
    async with site.operating():
        await site.create("report", retry={"maxRetries": 0})
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        name = pod["metadata"]["name"]
        await site.kube.merge_patch(PODS, NS, name, {"spec": {"nodeName": "n"}})
        await site.kube.merge_patch(PODS, NS, name, {"status": {"phase": "Running"}}, subresource="status")
        status: dict[str, Any] = {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}
        if proof in ("evicted", "by force"):
            await site.kube.merge_patch(PODS, NS, name, {"status": status}, subresource="status")
        if proof != "by force":
            code = 0 if proof == "in good order" else 137
            ended = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": code}}}]}
            site.kube.end(PODS, site.kube.objects[PODS][NS, name], grace_seconds=30)
            await site.kube.merge_patch(PODS, NS, name, {"status": status | ended if proof == "evicted" else ended}, subresource="status")
        site.kube.remove_pod(NS, name)
        [other] = await site.pods(1, besides=name)
        assert (await site.lease(other)).run == held.run
    assert await counted(site) == (0, 0)
