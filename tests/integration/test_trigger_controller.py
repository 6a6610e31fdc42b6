"""Triggers as resources: the store follows them, their status follows the store, and their runs' resources come and go with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.fake_kube import FakeKube
from tests.harness.fake_watch import FakeWatch
from tests.harness.postgres import move_clock
from tests.harness.triggers import MANUAL, Bench, every, spec

from perdure_operator.controllers.implicit_pools import ImplicitPools
from perdure_operator.controllers.operator import Operator, OperatorSettings
from perdure_operator.controllers.trigger import TriggerController
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, EVENTS, TRIGGERS
from perdure_operator.kube.specs.pod import PodSettings
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store

Json = dict[str, Any]
NS = "default"
SETTINGS = OperatorSettings(
    PodSettings(sidecar_image="sidecar", gateway_urls=("https://gateway",), installation="here"), resync_seconds=3600
)
POOL = {"template": {"spec": {"containers": [{"name": "agent", "image": "agent"}]}}, "capacity": {"minIdle": 0, "maxIdle": 0, "maxPods": 0}}
HOOK = {"webhook": {"auth": {"bearer": {"secretRef": {"name": "hook", "key": "key"}}}}}


class Site(Bench):
    """A cluster in memory whose triggers one controller follows, called by hand."""

    kube: FakeKube
    cache: FakeWatch
    controller: TriggerController
    inline = False

    async def apply(self, name: str, body: Json) -> Json:
        found = await self.kube.get(TRIGGERS, NS, name)
        if found is None:
            await self.kube.create(TRIGGERS, NS, {"metadata": {"name": name}, "spec": body})
        else:
            await self.kube.merge_patch(TRIGGERS, NS, name, {"spec": body})
        return await self.look(name)

    async def look(self, name: str) -> Json:
        """Reconciles, and gives the status."""
        await self.controller.reconcile(NS, name)
        status: Json = (await self.kube.get(TRIGGERS, NS, name) or {})["status"]
        return status

    async def delete(self, name: str) -> Json:
        found = await self.kube.get(TRIGGERS, NS, name)
        assert found is not None
        await self.kube.delete(TRIGGERS, NS, name, uid=found["metadata"]["uid"])
        return found

    def writes(self) -> int:
        return len(self.kube.writes(TRIGGERS))


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection) -> AsyncIterator[Site]:
    site = Site(store, pg)
    await site.setup()
    site.kube = FakeKube()
    site.cache = FakeWatch(site.kube, (TRIGGERS, AGENTRUNS), lambda *_: None, {})
    implicit = ImplicitPools(store, Resources(store), site.kube, site.cache)
    site.controller = TriggerController(
        store, site.triggers, site.kube, site.cache, implicit, (), inline=lambda _: site.inline, hooks_url="https://gateway/"
    )
    task = asyncio.create_task(site.cache.run())
    await site.cache.synced.wait()
    yield site
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def ready(status: Json) -> tuple[str, str]:
    [condition] = status["conditions"]
    return condition["status"], condition["reason"]


async def test_a_status_says_what_fired_and_what_comes(site: Site) -> None:
    status = await site.apply("beat", spec(every(3600)))
    assert ready(status) == ("True", "Ready")
    assert status["observedGeneration"] == 1
    assert (status["active"], status["pending"], status["dead"]) == (0, 0, 0)
    next_at = datetime.fromisoformat(status["nextScheduleTime"])
    assert "lastScheduleTime" not in status
    written = site.writes()
    assert await site.look("beat") == status
    assert site.writes() == written, "a trigger that stands still costs nothing"
    await move_clock(site.pg, 3601)
    await site.round()
    status = await site.look("beat")
    assert datetime.fromisoformat(status["lastScheduleTime"]) == next_at
    assert datetime.fromisoformat(status["nextScheduleTime"]) == next_at + timedelta(hours=1)
    assert status["active"] == 1
    last = status["lastDelivery"]
    assert (last["state"], last["run"]) == ("Done", (await site.runs())[0])
    assert last["id"].startswith("scheduled:default/beat:")
    written = site.writes()
    assert await site.look("beat") == status
    assert site.writes() == written


async def test_what_is_over_does_not_stay_in_the_status(site: Site) -> None:
    await site.apply("hook", spec(HOOK, retry={"maxAttempts": 1}))
    status = await site.look("hook")
    assert status["url"] == "https://gateway/v1/hooks/default/hook"
    await site.emit("hook")
    await site.round()
    assert "message" not in (await site.look("hook"))["lastDelivery"]
    await site.pg.execute("delete from perdure.pools")
    site.gateway = type(site.gateway)(site.store, "b")
    await site.emit("hook")
    await site.round()
    status = await site.look("hook")
    assert (status["dead"], status["lastDelivery"]["state"], "run" in status["lastDelivery"]) == (1, "Dead", False)
    assert status["lastDelivery"]["message"] == "there is no AgentPool p in namespace default"
    status = await site.apply("hook", {"source": {"webhook": None, "manual": {}}})
    assert "url" not in status


async def test_a_restarted_operator_changes_nothing(site: Site) -> None:
    await site.apply("beat", spec(every(60)))
    before = await site.triggers.get("default/beat")
    await move_clock(site.pg, 61)
    await site.controller.reconcile(NS, "beat")
    after = await site.triggers.get("default/beat")
    assert before is not None
    assert after is not None
    assert (after.next_at, after.anchor_at, after.revision) == (before.next_at, before.anchor_at, before.revision)


async def test_a_deletion_stops_firing_whether_it_was_seen_or_not(site: Site) -> None:
    for name in ("seen", "missed"):
        await site.apply(name, spec(every(60)))
    await site.controller.deleted(await site.delete("seen"))
    site.cache.cut()
    await site.delete("missed")
    await site.controller.look()
    assert [key for key, _ in await site.triggers.living()] == ["default/missed"], (
        "the cache believes in it still; the next list corrects that"
    )
    site.cache.replace(TRIGGERS, [], "9")
    await site.controller.look()
    assert await site.triggers.living() == []
    await move_clock(site.pg, 61)
    await site.round()
    assert await site.runs() == []


async def test_an_empty_cluster_deletes_no_triggers(site: Site) -> None:
    for n in range(21):
        await site.put(f"t{n}", MANUAL)
    await site.controller.look()
    assert len(await site.triggers.living()) == 21


async def test_a_trigger_that_was_replaced_unseen_goes_on_where_it_was(site: Site) -> None:
    await site.apply("beat", spec(every(60)))
    before = await site.triggers.get("default/beat")
    await site.delete("beat")
    await site.apply("beat", spec(every(60)))
    after = await site.triggers.get("default/beat")
    assert before is not None
    assert after is not None
    assert after.uid != before.uid
    assert (after.next_at, after.anchor_at) == (before.next_at, before.anchor_at)


async def lose_the_database(site: Site) -> None:
    tables = ("triggers", "deliveries", "runs", "run_specs", "events", "resources")
    await site.pg.execute(f"truncate {', '.join(f'perdure.{table}' for table in tables)}")


@pytest.mark.parametrize("fraction", ["", ".5"])
async def test_an_instant_that_fired_does_not_fire_again_when_the_database_has_lost_it(site: Site, fraction: str) -> None:
    at = {"at": f"2026-01-01T00:00:00{fraction}Z"}
    await site.apply("once", spec(at))
    await site.round()
    assert len(await site.runs()) == 1
    fired = await site.look("once")
    await lose_the_database(site)
    for _ in range(2):
        status = await site.look("once")
        await site.round()
        assert await site.runs() == []
    assert status["lastScheduleTime"] == fired["lastScheduleTime"], "or the next loss would have it fire"
    await site.apply("once", spec(at, suspend=False))
    await site.round()
    assert await site.runs() == []
    await site.delete("once")
    await site.apply("once", {"source": {"at": "2026-01-02T00:00:00Z"}, "runTemplate": spec(at)["runTemplate"]})
    await site.round()
    assert len(await site.runs()) == 1, "another instant has not fired"


async def test_a_new_object_owes_nothing_to_the_one_that_the_database_has_lost(site: Site) -> None:
    await site.apply("once", spec({"at": "2026-01-01T00:00:00Z"}))
    await site.round()
    await site.look("once")
    await lose_the_database(site)
    await site.delete("once")
    await site.apply("once", spec({"at": "2026-01-01T00:00:00Z"}))
    await site.round()
    assert len(await site.runs()) == 1


async def test_a_calendar_that_the_database_has_lost_goes_on_after_what_fired_last(site: Site) -> None:
    await site.apply("beat", spec(every(60), catchUp={"policy": "All", "limit": 10}))
    for _ in range(3):
        await move_clock(site.pg, 60)
        await site.round()
    last = datetime.fromisoformat((await site.look("beat"))["lastScheduleTime"])
    await lose_the_database(site)
    assert datetime.fromisoformat((await site.look("beat"))["lastScheduleTime"]) == last
    await site.round()
    assert await site.runs() == []
    await lose_the_database(site)
    await move_clock(site.pg, 120)
    await site.look("beat")
    await site.round()
    assert [row["fire_at"] for row in await site.deliveries()] == [last + timedelta(minutes=n) for n in (1, 2)], "missed meanwhile"


async def test_a_spec_that_cannot_be_honoured_fires_nothing_until_it_can(site: Site) -> None:
    own = {"spec": {"agent": {"template": {"spec": {"containers": [{"name": "agent", "image": "a"}]}}}}}
    status = await site.apply("own", spec(every(60), template=own))
    assert ready(status) == ("False", "InvalidSpec")
    assert "name a pool" in status["conditions"][0]["message"]
    assert await site.triggers.get("default/own") is None
    site.inline = True
    assert ready(await site.look("own")) == ("True", "Ready")
    await move_clock(site.pg, 61)
    await site.round()
    assert len(await site.runs()) == 1
    site.inline = False
    assert ready(await site.look("own")) == ("False", "InvalidSpec")
    await move_clock(site.pg, 60)
    await site.round()
    assert len(await site.runs()) == 1
    site.inline = True
    assert ready(await site.look("own")) == ("True", "Ready")
    await site.round()
    assert len(await site.runs()) == 2
    lookup = spec(
        every(60), template={"spec": {"agent": {"poolRef": {"name": "p"}}, "inputFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}}
    )
    assert "inputFrom" in (await site.apply("lookup", lookup))["conditions"][0]["message"]


async def test_a_trigger_whose_last_firing_died_is_not_ready_until_one_does_better(site: Site) -> None:
    body = spec(MANUAL, retry={"maxAttempts": 1})
    await site.pg.execute("delete from perdure.pools")
    assert ready(await site.apply("wish", body)) == ("True", "Ready")
    delivery = (await site.emit("wish")).delivery
    await site.round()
    status = await site.look("wish")
    assert ready(status) == ("False", "DeliveryDead")
    assert status["conditions"][0]["message"] == (
        "the last firing made no run: there is no AgentPool p in namespace default; `kubectl agentrun deliveries wish` shows what was "
        f"given up, `kubectl agentrun redrive wish {delivery}` tries it again"
    )
    events = (await site.kube.list(EVENTS, "default"))[0]
    assert [(event["reason"], event["involvedObject"]["kind"]) for event in events] == [("DeliveryDead", "Trigger")]
    written = site.writes()
    assert await site.look("wish") == status
    assert site.writes() == written
    assert ready(await site.apply("wish", body | {"suspend": True})) == ("True", "Suspended")
    assert ready(await site.apply("wish", body | {"suspend": False})) == ("False", "DeliveryDead")
    own = {"spec": {"agent": {"template": {"spec": {"containers": [{"name": "agent", "image": "a"}]}}}}}
    assert ready(await site.apply("wish", body | {"runTemplate": own})) == ("False", "InvalidSpec")
    assert ready(await site.apply("wish", body | {"runTemplate": {"spec": {"agent": {"template": None}}}})) == ("False", "DeliveryDead")
    await site.setup()
    await site.triggers.redrive("default/wish", delivery)
    assert ready(await site.look("wish")) == ("True", "Ready")
    await site.round()
    assert ready(await site.look("wish")) == ("True", "Ready")


async def test_a_newer_firing_that_makes_a_run_makes_its_trigger_ready_again(site: Site) -> None:
    await site.pg.execute("delete from perdure.pools")
    await site.apply("wish", spec(MANUAL, retry={"maxAttempts": 1}))
    for message in ("x", "y" * 1000):
        await site.emit("wish")
        await site.round()
        await site.pg.execute("update perdure.deliveries set message = $1", message)
    status = await site.look("wish")
    assert ready(status) == ("False", "DeliveryDead")
    assert status["conditions"][0]["message"].endswith("tries it again"), "a long story leaves room for what to do"
    await site.setup()
    await site.emit("wish")
    assert ready(await site.look("wish")) == ("False", "DeliveryDead"), "not before it has a run"
    await site.round()
    status = await site.look("wish")
    assert (ready(status), status["dead"]) == (("True", "Ready"), 2)


async def test_a_suspended_trigger_is_ready_and_says_that_it_is_suspended(site: Site) -> None:
    assert ready(await site.apply("beat", spec(every(60), suspend=True))) == ("True", "Suspended")
    await move_clock(site.pg, 61)
    await site.round()
    assert await site.runs() == []
    assert ready(await site.apply("beat", {"suspend": False})) == ("True", "Ready")
    await site.round()
    assert len(await site.runs()) == 1


async def test_resources_of_old_runs_go(site: Site) -> None:
    resources = Resources(site.store)
    await site.apply("wish", spec(MANUAL, successfulRunsHistoryLimit=2, failedRunsHistoryLimit=0))
    for n in range(4):
        await site.emit("wish")
        await site.round()
        [unmade] = await resources.unmade(10)
        made = await site.kube.create(AGENTRUNS, NS, {"metadata": {"name": unmade.name}, "spec": {}})
        await resources.made(unmade.run, made["metadata"]["uid"])
        held = await runs.lease_next(site.store)
        await runs.apply(site.store, runs.work(held, "finish", outcome="failed" if n == 3 else "succeeded", type="T", message="m"))
    names = await site.runs()
    status = await site.look("wish")
    assert status["active"] == 0
    kept = {run["metadata"]["name"] for run in (await site.kube.list(AGENTRUNS, NS))[0]}
    assert kept == set(names[1:3])
    assert len(await site.runs()) == 4, "the store keeps its record"


# --------------------------------------------------------------------------------------------------- the whole of the operator


@asynccontextmanager
async def operating(store: Store, kube: FakeKube) -> AsyncIterator[None]:
    term = await Resources(store).lead("operator", "test", 3600)
    assert term is not None
    operator = Operator(store, kube, SETTINGS, lambda resources, _, on_change, selectors: FakeWatch(kube, resources, on_change, selectors))
    task = asyncio.create_task(operator.lead(term))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(there: Callable[[], Any]) -> Any:
    async with asyncio.timeout(20):
        while True:
            if found := await there():
                return found
            await asyncio.sleep(0.02)


async def test_a_firing_becomes_a_resource_that_goes_with_its_trigger(store: Store, pg: asyncpg.Connection) -> None:
    bench, kube = await Bench(store, pg).setup(), FakeKube()
    await kube.create(AGENTPOOLS, NS, {"metadata": {"name": "p"}, "spec": POOL})
    async with operating(store, kube):
        trigger = await kube.create(TRIGGERS, NS, {"metadata": {"name": "beat"}, "spec": spec(every(60))})
        await until(lambda: bench.triggers.get("default/beat"))
        await move_clock(pg, 61)
        await bench.round()
        [name] = await bench.runs()
        run = await until(lambda: kube.get(AGENTRUNS, NS, name))
        assert run["metadata"]["labels"]["perdure.dev/trigger"] == "beat"
        assert datetime.fromisoformat(run["metadata"]["annotations"]["perdure.dev/scheduled-at"]) < datetime.now(UTC) + timedelta(minutes=2)
        [owner] = run["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("Trigger", "beat", trigger["metadata"]["uid"], True)

        await kube.delete(TRIGGERS, NS, "beat", uid=trigger["metadata"]["uid"], propagation="Background")

        async def cancelled() -> bool:
            return (await bench.run(name))["state"] == "Cancelled"

        async def gone() -> bool:
            return await kube.get(AGENTRUNS, NS, name) is None

        await until(cancelled)
        await until(gone)
        assert await bench.triggers.living() == []
