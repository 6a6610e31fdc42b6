"""Runs that bring a template of their own: it is a pool like others while somebody needs it, and goes then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.site import NS, POOL, SETTINGS, Json, Site

from perdure_operator.controllers import agentpool, implicit_pools
from perdure_operator.kube.api.podtemplate import PodTemplate
from perdure_operator.kube.api.v1alpha1 import implicit_pool
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, TRIGGERS
from perdure_operator.kube.errors import KubeForbidden
from perdure_operator.kube.names import IMPLICIT_LABEL
from perdure_operator.store.store import Store

INLINE = replace(SETTINGS, inline="all")
TEMPLATE = POOL["template"]
NAME, SPEC = implicit_pool(PodTemplate.model_validate(TEMPLATE))


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Where what is unused goes at once."""
    monkeypatch.setattr(agentpool, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(implicit_pools, "UNUSED_SECONDS", 0.0)
    return Site(store, pg)


async def create(site: Site, name: str = "report") -> None:
    await site.kube.create(AGENTRUNS, NS, {"metadata": {"name": name}, "spec": {"agent": {"template": TEMPLATE}}})


async def pool(site: Site) -> Json | None:
    return await site.kube.get(AGENTPOOLS, NS, NAME)


async def gone(site: Site) -> None:
    async def look() -> bool:
        return await pool(site) is None and not await site.store.pools()

    await site.until(look)


async def test_an_inline_template_is_a_pool_that_owns_its_pods_and_goes_with_its_last_run(site: Site) -> None:
    async with site.operating(INLINE):
        await create(site)
        [pod] = await site.pods(1)
        made = await pool(site)
        assert made is not None
        assert (made["metadata"]["labels"], made["spec"]) == ({IMPLICIT_LABEL: "true"}, SPEC.to_json())
        assert [owner["uid"] for owner in pod["metadata"]["ownerReferences"]] == [made["metadata"]["uid"]]
        held = await site.lease(pod)
        await runs.apply(site.store, runs.work(held, "finish", outcome="succeeded"))
        await site.phase("report", "Succeeded")
        await gone(site)
        await site.pods(0)
        await create(site, "again")
        await site.pods(1)


async def test_one_that_somebody_deletes_under_its_run_is_there_again(site: Site) -> None:
    async with site.operating(INLINE):
        await create(site)
        [old] = await site.pods(1)
        held = await site.lease(old)
        before = await pool(site)
        assert before is not None
        await site.kube.delete(AGENTPOOLS, NS, NAME, uid=before["metadata"]["uid"], propagation="Foreground")
        [new] = await site.pods(1, besides=old["metadata"]["name"])
        assert (await site.lease(new)).run == held.run
        after = await pool(site)
        assert after is not None
        assert after["metadata"]["uid"] == new["metadata"]["ownerReferences"][0]["uid"] != before["metadata"]["uid"]
    assert tuple(await site.pg.fetchrow("select failures, losses from perdure.runs")) == (0, 0)


async def test_those_of_the_version_before_get_a_resource_or_go(site: Site) -> None:
    other = "inline-0123456789abcdef"
    for name in (NAME, other):
        await site.store.upsert_pool(NS, name, SPEC.to_json(), None)
    await runs.pending(site.store, pool=f"{NS}/{NAME}")
    async with site.operating(INLINE):

        async def look() -> bool:
            return await pool(site) is not None and [*await site.store.pools()] == [f"{NS}/{NAME}"]

        await site.until(look)


async def test_a_trigger_keeps_the_pool_of_its_template(site: Site) -> None:
    spec: Any = {"source": {"manual": {}}, "runTemplate": {"spec": {"agent": {"template": TEMPLATE}}}}
    async with site.operating(INLINE) as operator:
        made = await site.kube.create(TRIGGERS, NS, {"metadata": {"name": "t"}, "spec": spec})
        await site.until(lambda: pool(site))
        assert not await operator._implicit.remove_unused(await pool(site) or {})
        await site.kube.delete(TRIGGERS, NS, "t", uid=made["metadata"]["uid"])
        await gone(site)


async def test_a_pool_that_a_person_made_under_such_a_name_stays(site: Site) -> None:
    await site.pool(NAME)
    async with site.operating(INLINE) as operator:
        await site.until(site.store.pools)
        assert not await operator._implicit.remove_unused(await pool(site) or {})


async def test_where_no_pool_can_be_made_the_run_goes_on_without(site: Site) -> None:
    site.kube.fail(KubeForbidden("no rights"), "create", AGENTPOOLS, times=9)
    async with site.operating(INLINE):
        await create(site)
        [pod] = await site.pods(1)
        assert "ownerReferences" not in pod["metadata"]
        await site.lease(pod)
