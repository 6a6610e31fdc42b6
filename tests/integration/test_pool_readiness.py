"""What an AgentPool says of itself before anybody needs it, while its first pods come up, and when they do not.

The numbers in a status are looked at every ten seconds; here that is never, so what is said at once is said because of what happened.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from tests.harness.site import NS, POOL, Json, Site

from perdure_operator.controllers import agentpool
from perdure_operator.controllers.pods import SILENT_SECONDS
from perdure_operator.kube.client import AGENTPOOLS, PODS
from perdure_operator.services.conditions import rfc3339
from perdure_operator.store.store import Store

WARM = POOL | {"capacity": {"minIdle": 1, "maxIdle": 1}}


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(agentpool, "STATUS_SECONDS", 3600.0)
    return Site(store, pg)


async def ready(site: Site, status: str, reason: str) -> Json:
    """Waits for it; gives the condition."""

    async def look() -> Any:
        found = await site.kube.get(AGENTPOOLS, NS, "p") or {}
        said = [c for c in (found.get("status") or {}).get("conditions") or [] if c["type"] == "Ready"]
        return said[0] if said and (said[0]["status"], said[0]["reason"]) == (status, reason) else None

    found: Json = await site.until(look)
    return found


async def set_status(site: Site, pod: Json, **status: Any) -> None:
    await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": status}, subresource="status")


def agent(state: Json) -> list[Json]:
    return [{"name": "agent", "state": state}]


async def test_a_pool_that_nobody_needs_is_ready(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await ready(site, "True", "NoPodsWanted")
    found = await site.kube.get(AGENTPOOLS, NS, "p")
    assert found is not None
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"]


async def test_a_pool_with_warm_pods_is_ready_when_the_first_has_come_up_and_stays_it(site: Site) -> None:
    await site.pool(spec=WARM)
    async with site.operating():
        assert "warm" in (await ready(site, "Unknown", "Starting"))["message"]
        [pod] = await site.pods(1)
        await site.come_up()
        await ready(site, "True", "Ready")
        site.kube.remove_pod(NS, pod["metadata"]["name"])
        await site.pods(1, besides=pod["metadata"]["name"])
        await site.operator._pools.reconcile(NS, "p")  # type: ignore[union-attr]
        await ready(site, "True", "Ready")


async def test_a_missing_image_is_said_at_once_and_so_is_that_it_came(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await ready(site, "True", "NoPodsWanted")
        await site.create("report")
        [pod] = await site.pods(1)
        waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
        await set_status(site, pod, phase="Pending", containerStatuses=agent(waiting))
        assert (await ready(site, "False", "ErrImagePull"))["message"] == "no such image"
        [again] = await site.pods(1, besides=pod["metadata"]["name"])
        await site.lease(again)
        await ready(site, "True", "Ready")


async def test_the_last_words_of_an_agent_that_ends_are_those_of_its_pool_and_run(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        words = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'requests'\n"
        await set_status(site, pod, phase="Failed", containerStatuses=agent({"terminated": {"exitCode": 1, "message": words}}))
        said = (await ready(site, "False", "AgentExited"))["message"]
        assert said == "the agent's container ended with code 1: ModuleNotFoundError: No module named 'requests'"

        async def told() -> bool:
            conditions = ((await site.get("report")).get("status") or {}).get("conditions") or []
            return any(said in c["message"] for c in conditions)

        await site.until(told)


async def test_an_agent_that_runs_and_asks_for_nothing_is_said_to(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        # It has come up just now, and there is nothing to say yet.
        just_now = {"running": {"startedAt": rfc3339(datetime.now(UTC))}}
        await set_status(site, pod, phase="Running", containerStatuses=agent(just_now))
        await ready(site, "True", "NoPodsWanted")
        long_ago = {"running": {"startedAt": rfc3339(datetime.now(UTC) - timedelta(seconds=SILENT_SECONDS + 1))}}
        await set_status(site, pod, phase="Running", containerStatuses=agent(long_ago))
        said = await ready(site, "False", "AgentNotReady")
        assert "has not asked for a run" in said["message"]

        async def told() -> bool:
            return (await site.get("report")).get("status", {}).get("waitReason") == "PoolNotReady"

        await site.until(told)
        # It is slow, no more: the pod was left to it, and now it asks.
        await site.lease(pod)
        await ready(site, "True", "Ready")
