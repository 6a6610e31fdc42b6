"""The operator on a real store and a cluster in memory: what becomes of resources, of pods, and of what it missed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.fake_kube import FakeKube
from tests.harness.fake_watch import FakeWatch
from tests.harness.postgres import move_clock

from perdure_operator.controllers.operator import Operator, OperatorSettings
from perdure_operator.controllers.release import end_workers
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, EVENTS, PODS, Resource
from perdure_operator.kube.errors import KubeConflict, KubeNotFound, KubeUnavailable
from perdure_operator.kube.names import CANCEL_FINALIZER, RUN_ID_LABEL
from perdure_operator.kube.specs.pod import PodSettings
from perdure_operator.services.why import trouble_of_pool
from perdure_operator.store.operations import Control, Fence
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store

Json = dict[str, Any]

NS = "default"
PATIENCE = 10.0
POOL = {"template": {"spec": {"containers": [{"name": "agent", "image": "agent"}]}}, "capacity": {"minIdle": 0, "maxIdle": 0, "maxPods": 9}}
SETTINGS = OperatorSettings(PodSettings(sidecar_image="sidecar", gateway_urls=("https://gateway",)), resync_seconds=3600)
GATEWAY = "g"


class Site:
    """A cluster, a store, and an operator that may come and go."""

    def __init__(self, store: Store, pg: asyncpg.Connection) -> None:
        self.store, self.pg = store, pg
        self.kube = FakeKube()
        self.resources = Resources(store)
        self.watch: FakeWatch | None = None
        self.operator: Operator | None = None
        self.kube.subscribe(self._kubelet)
        self._endings: set[asyncio.Task[None]] = set()

    def _kubelet(self, what: str, resource: Resource, pod: Json) -> None:
        """Ends the containers of a pod that is being deleted, says so, and lets it go."""
        if resource == PODS and what == "MODIFIED" and pod["metadata"].get("deletionTimestamp") and "phase" not in pod.get("status", {}):
            self._endings.add(asyncio.create_task(self._end_pod(pod["metadata"]["name"])))

    async def _end_pod(self, name: str) -> None:
        status = {"phase": "Succeeded", "containerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": 0}}}]}
        with contextlib.suppress(KubeNotFound, KeyError):
            await self.kube.merge_patch(PODS, NS, name, {"status": status}, subresource="status")
            self.kube.remove_pod(NS, name)

    @asynccontextmanager
    async def operating(self, settings: OperatorSettings = SETTINGS) -> AsyncIterator[Operator]:
        term = await self.resources.lead("operator", "test", 3600)
        assert term is not None

        def watch(resources: Any, namespaces: Any, on_change: Any) -> FakeWatch:
            self.watch = FakeWatch(self.kube, resources, on_change)
            return self.watch

        self.operator = Operator(self.store, self.kube, settings, watch)
        task = asyncio.create_task(self.operator.lead(term))
        try:
            yield self.operator
        finally:
            task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(done[0], asyncio.CancelledError), done

    async def pool(self, name: str = "p", spec: Json = POOL) -> None:
        await self.kube.create(AGENTPOOLS, NS, {"metadata": {"name": name}, "spec": spec})

    async def create(self, name: str, *, labels: Json | None = None, **spec: Any) -> Json:
        body = {"metadata": {"name": name, "labels": labels or {}}, "spec": {"agent": {"poolRef": {"name": "p"}}, **spec}}
        return await self.kube.create(AGENTRUNS, NS, body)

    async def get(self, name: str) -> Json:
        found = await self.kube.get(AGENTRUNS, NS, name)
        assert found is not None, f"there is no AgentRun {name}"
        return found

    async def until(self, look: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not (found := await look()):  # noqa: ASYNC110  # the operator's doing: there is no event to wait for
                await asyncio.sleep(0.01)
            return found

    async def phase(self, name: str, phase: str) -> Json:
        async def look() -> Json | None:
            found = await self.kube.get(AGENTRUNS, NS, name)
            return found if found is not None and (found.get("status") or {}).get("phase") == phase else None

        found: Json = await self.until(look)
        return found

    async def gone(self, name: str) -> None:
        async def look() -> bool:
            return await self.kube.get(AGENTRUNS, NS, name) is None

        await self.until(look)

    async def pods(self, count: int, *, besides: str = "") -> list[Json]:
        async def look() -> tuple[list[Json]] | None:
            found = [pod for pod in (await self.kube.list(PODS, NS))[0] if pod["metadata"]["name"] != besides]
            return (found,) if len(found) == count else None

        found: tuple[list[Json]] = await self.until(look)
        return found[0]

    async def lease(self, pod: Json) -> runs.Held:
        """The pod comes up and gets the run that it was made for."""
        known = await self.until(lambda: self.store.worker_pod(pod["metadata"]["uid"]))
        await self.store.pod_hello(known[0], known[1], GATEWAY, reuse=False)
        [grant] = await self.store.dispatch(GATEWAY, [known[0]])
        return runs.Held(grant.run, Fence(grant.epoch, known[0]))

    async def come_up(self) -> None:
        for pod in (await self.kube.list(PODS, NS))[0]:
            if known := await self.store.worker_pod(pod["metadata"]["uid"]):
                await self.store.pod_hello(known[0], known[1], GATEWAY, reuse=False)


@pytest.fixture
async def site(store: Store, pg: asyncpg.Connection) -> Site:
    return Site(store, pg)


def truth(resource: Json, kind: str) -> tuple[str, str]:
    [found] = [c for c in resource["status"]["conditions"] if c["type"] == kind]
    return found["status"], found["reason"]


# -------------------------------------------------------------------------------------------------------------- one life


async def test_a_run_from_apply_to_the_end(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", summary="a report")
        [pod] = await site.pods(1)
        pending = await site.phase("report", "Pending")
        assert CANCEL_FINALIZER in pending["metadata"]["finalizers"]
        assert truth(pending, "Succeeded")[0] == "Unknown"
        held = await site.lease(pod)
        running = await site.phase("report", "Running")
        assert running["status"]["podName"] == pod["metadata"]["name"]
        assert truth(running, "PodScheduled")[0] == "True"
        await site.store.journal([runs.step(held, f"step:{n}#0") for n in range(50)], wait=True)
        await runs.apply(site.store, runs.work(held, "finish", outcome="succeeded", payload=b'{"pages": 3}'))
        done = await site.phase("report", "Succeeded")
        assert (truth(done, "Succeeded")[0], truth(done, "Finished")[0]) == ("True", "True")
        assert done["status"]["result"] == {"pages": 3}
        assert done["status"]["usage"] == {"steps": 50}

        async def released() -> bool:
            return not (await site.get("report"))["metadata"].get("finalizers")

        await site.until(released)
        await site.pods(0)
    written = site.kube.writes(AGENTRUNS)
    # The finalizer on and off, and a status for each phase: none for fifty steps.
    assert len([call for call in written if call.verb == "patch"]) <= 5, written
    assert len(site.kube.writes()) - len([c for c in site.kube.writes() if c.resource in (EVENTS, AGENTPOOLS)]) <= 8 + 1
    reasons = [event["reason"] for event in (await site.kube.list(EVENTS, NS))[0]]
    assert sorted(reasons) == ["Started", "Succeeded"]


async def test_a_suspended_run_has_no_pod_and_says_what_it_waits_for(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        await runs.apply(site.store, runs.wait_for(held, "wait:go#0", runs.on_signal("approved")))
        suspended = await site.phase("report", "Suspended")
        assert suspended["status"]["waitReason"] == "signal approved"
        assert suspended["status"]["waitingFor"][0]["name"] == "approved"
        await site.pods(0)
        await runs.apply(site.store, runs.signal(held.run, "approved", "1"))
        [next_pod] = await site.pods(1)
        assert next_pod["metadata"]["name"] != pod["metadata"]["name"]
        await runs.apply(site.store, runs.work(await site.lease(next_pod), "finish", outcome="succeeded"))
        await site.phase("report", "Succeeded")


async def test_spec_changes_reach_the_run(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", desiredState="Suspended")
        assert truth(await site.phase("report", "Suspended"), "Suspended")[0] == "True"
        await site.kube.merge_patch(AGENTRUNS, NS, "report", {"spec": {"desiredState": "Running"}})
        await site.phase("report", "Pending")
        patched = await site.kube.merge_patch(AGENTRUNS, NS, "report", {"spec": {"priority": 5}})

        async def observed() -> bool:
            return bool((await site.get("report"))["status"]["observedGeneration"] == patched["metadata"]["generation"])

        await site.until(observed)
        await site.kube.merge_patch(AGENTRUNS, NS, "report", {"spec": {"desiredState": "Cancelled"}})
        cancelled = await site.phase("report", "Cancelled")
        assert cancelled["status"]["observedGeneration"] == cancelled["metadata"]["generation"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"agent": {"poolRef": {"name": "nowhere"}}}, "PoolNotFound"),
        ({"agent": {"template": POOL["template"]}}, "InlineTemplateForbidden"),
        ({"inputFrom": {"configMapKeyRef": {"name": "none", "key": "k"}}}, "InputNotFound"),
        ({"frobnicate": True}, "InvalidSpec"),
    ],
)
async def test_what_cannot_run_says_why(site: Site, spec: Json, reason: str) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", **spec)
        assert truth(await site.phase("report", "Pending"), "Succeeded") == ("Unknown", reason)
    assert await site.pg.fetchval("select count(*) from perdure.runs") == 0


async def test_a_run_waits_for_its_pool_to_exist(site: Site) -> None:
    async with site.operating():
        await site.create("report")
        await site.phase("report", "Pending")
        await site.pool()
        await site.pods(1)


async def test_a_resource_goes_when_its_time_is_over(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", ttlSecondsAfterFinished=0)
        await runs.apply(site.store, runs.work(await site.lease((await site.pods(1))[0]), "finish", outcome="succeeded"))
        await site.gone("report")
    assert await site.pg.fetchval("select state from perdure.runs") == "Succeeded"


# -------------------------------------------------------------------------------------------------------------- deletion


async def family(site: Site) -> dict[str, runs.Held | UUID]:
    """A parent that runs, a child resource that runs, a child resource that is pending, and a child that is a row."""
    await site.create("parent")
    parent = await site.lease((await site.pods(1))[0])
    found: dict[str, runs.Held | UUID] = {"parent": parent}
    for name, recording in (("running", "Resource"), ("pending", "Resource"), ("row", "StoreOnly")):
        spawn, child = runs.spawn(parent, f"spawn:{name}#0", name=name)
        spawn.body["recording"] = recording
        assert (await runs.apply(site.store, spawn)).code == "ok"
        found[name] = child
    await site.phase("pending", "Pending")
    return found


async def test_a_deleted_parent_takes_all_below_it_along(site: Site) -> None:
    await site.pool()
    async with site.operating():
        people = await family(site)
        child = await site.get("running")
        assert child["metadata"]["labels"][RUN_ID_LABEL] == str(people["running"])
        assert child["metadata"]["ownerReferences"][0]["name"] == "parent"
        parent = await site.get("parent")
        await site.kube.delete(AGENTRUNS, NS, "parent", uid=parent["metadata"]["uid"], propagation="Background")
        # Let go as soon as the cancel is committed: the parent's worker still has its grace.
        await site.gone("parent")
        held = people["parent"]
        assert isinstance(held, runs.Held)
        await runs.apply(site.store, runs.work(held, "finish", outcome="cancelled"))
        await site.store.control([runs.settle(run) for run in await site.store.unapplied_runs()], wait=True)
        for name in ("running", "pending"):
            await site.gone(name)
        states = {row[0] for row in await site.pg.fetch("select state from perdure.runs")}
        assert states == {"Cancelled"}
        # Pods that were made for the children come up and find nothing to do.
        await site.come_up()
        await site.pods(0)


async def test_a_deletion_while_the_operator_is_down(site: Site) -> None:
    await site.pool()
    async with site.operating():
        people = await family(site)
    parent = await site.get("parent")
    await site.kube.delete(AGENTRUNS, NS, "parent", uid=parent["metadata"]["uid"], propagation="Background")
    assert (await site.get("parent"))["metadata"]["deletionTimestamp"]
    async with site.operating():
        await site.gone("parent")
        held = people["parent"]
        assert isinstance(held, runs.Held)
        assert await site.pg.fetchval("select cancel_requested from perdure.runs where run_id = $1", held.run)


async def test_orphaned_children_outlive_their_parent(site: Site) -> None:
    await site.pool()
    async with site.operating():
        people = await family(site)
        parent = await site.get("parent")
        await site.kube.delete(AGENTRUNS, NS, "parent", uid=parent["metadata"]["uid"], propagation="Orphan")
        await site.gone("parent")
        held = people["parent"]
        assert isinstance(held, runs.Held)
        await runs.apply(site.store, runs.work(held, "finish", outcome="cancelled"))
        while due := await site.store.unapplied_runs():
            await site.store.control([runs.settle(run) for run in due], wait=True)
        states = dict(await site.pg.fetch("select name, state from perdure.runs"))
    assert states == {"parent": "Cancelled", "running": "Pending", "pending": "Pending", "row": "Cancelled"}


async def test_a_resource_that_came_and_went_unseen_leaves_nothing(site: Site) -> None:
    await site.pool()
    made = await site.create("report")
    await site.kube.delete(AGENTRUNS, NS, "report", uid=made["metadata"]["uid"])
    async with site.operating():
        await site.create("other")
        await site.pods(1)
    assert await site.pg.fetchval("select array_agg(name) from perdure.runs") == ["other"]


async def test_the_same_name_again_while_the_old_run_ends(site: Site) -> None:
    await site.pool()
    async with site.operating():
        old = await site.create("report")
        held = await site.lease((await site.pods(1))[0])
        await site.kube.delete(AGENTRUNS, NS, "report", uid=old["metadata"]["uid"])
        await site.gone("report")
        new = await site.create("report")
        await asyncio.sleep(0.1)
        assert await site.resources.find(UUID(new["metadata"]["uid"])) is None
        await runs.apply(site.store, runs.work(held, "finish", outcome="cancelled"))

        async def admitted() -> Any:
            return await site.resources.find(UUID(new["metadata"]["uid"]))

        found = await site.until(admitted)
        assert found.run != held.run


async def test_a_key_that_succeeded_is_adopted_and_nothing_runs(site: Site) -> None:
    await site.pool()
    async with site.operating():
        old = await site.create("report", idempotencyKey="2026-47")
        await runs.apply(site.store, runs.work(await site.lease((await site.pods(1))[0]), "finish", outcome="succeeded", payload=b"7"))
        await site.phase("report", "Succeeded")
        await site.pods(0)
        await site.kube.delete(AGENTRUNS, NS, "report", uid=old["metadata"]["uid"])
        await site.gone("report")
        await site.create("again", idempotencyKey="2026-47")
        adopted = await site.phase("again", "Succeeded")
        assert adopted["status"]["result"] == 7
    assert await site.pg.fetchval("select count(*) from perdure.runs") == 1
    assert await site.pg.fetchval("select count(*) from perdure.events where kind = 'run.leased'") == 1


# -------------------------------------------------------------------------------------------------------------- the fleet


async def test_a_pod_that_ends_under_its_run_is_replaced(site: Site, pg: asyncpg.Connection) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", retry={"backoffSeconds": 0})
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        status = {"phase": "Failed", "containerStatuses": [
            {"name": "agent", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}  # fmt: skip
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": status}, subresource="status")

        async def replaced() -> Json | None:
            found = [p for p in (await site.kube.list(PODS, NS))[0] if p["metadata"]["name"] != pod["metadata"]["name"]]
            return found[0] if found else None

        heir = await site.lease(await site.until(replaced))
        assert (heir.run, heir.fence.epoch > held.fence.epoch) == (held.run, True)
        assert await pg.fetchval("select count(*) from perdure.terminated_pods") == 1
        kinds = [row[0] for row in await pg.fetch("select kind from perdure.events order by seq")]
        assert "run.retrying" in kinds


async def test_a_pod_deleted_by_force_proves_nothing(site: Site, pg: asyncpg.Connection) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        site.kube.remove_pod(NS, pod["metadata"]["name"])

        async def lost() -> bool:
            return bool(await pg.fetchval("select epoch from perdure.runs where run_id = $1", held.run) > held.fence.epoch)

        await site.until(lost)
        assert await pg.fetchval("select count(*) from perdure.terminated_pods") == 0


async def test_a_mended_template_is_tried_at_once(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        await site.create("report")
        [pod] = await site.pods(1)
        fleet = operator._fleet
        for _ in range(20):
            fleet.failed(f"{NS}/p", "ErrImagePull", "no such image")
        assert fleet.troubles[f"{NS}/p"].until > fleet._now() + 50
        mended = {"template": {"spec": {"containers": [{"name": "agent", "image": "example/agent:mended"}]}}}
        await site.kube.merge_patch(AGENTPOOLS, NS, "p", {"spec": mended})
        await site.pods(1, besides=pod["metadata"]["name"])
        assert fleet.troubles == {}


async def test_a_pool_whose_image_cannot_be_pulled_backs_off_and_says_so(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        await site.create("report")
        [pod] = await site.pods(1)
        waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
        status = {"phase": "Pending", "containerStatuses": [{"name": "agent", "state": waiting}]}
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": status}, subresource="status")

        async def trouble() -> Any:
            return operator._fleet.troubles.get(f"{NS}/p")

        found = await site.until(trouble)
        assert (found.reason, found.message) == ("ErrImagePull", "no such image")

        async def told() -> Any:
            async with site.store.reader() as reader:
                return trouble_of_pool(next(iter(await reader.runs(namespace=NS, state=None, pool=None, parent=None, after=None, limit=1))))

        assert (await site.until(told))["message"] == "no such image"

        async def said() -> bool:
            return (await site.get("report")).get("status", {}).get("waitReason") == "PoolNotReady"

        await site.until(said)
        [again] = await site.pods(1, besides=pod["metadata"]["name"])
        # The next one comes up: that it runs proves nothing, that it asks for a run does.
        running = {"phase": "Running", "containerStatuses": [{"name": "agent", "state": {"running": {}}}]}
        await site.kube.merge_patch(PODS, NS, again["metadata"]["name"], {"status": running}, subresource="status")
        await asyncio.sleep(0.3)
        assert await told() is not None
        await site.lease(again)

        async def over() -> bool:
            return operator._fleet.troubles == {} and (await site.store.pool_demand())[0].trouble is None

        await site.until(over)


async def test_an_init_container_that_fails_is_named(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        await site.create("report")
        [pod] = await site.pods(1)
        ended: Json = {"phase": "Failed", "initContainerStatuses": [
            {"name": "perdure-sidecar", "state": {"terminated": {"exitCode": 143}}},
            {"name": "early", "state": {"terminated": {"exitCode": 0}}},
            {"name": "fetch", "state": {"terminated": {"exitCode": 3}}},
        ], "containerStatuses": [{"name": "agent", "state": {"waiting": {"reason": "PodInitializing"}}}]}  # fmt: skip
        await site.kube.merge_patch(PODS, NS, pod["metadata"]["name"], {"status": ended}, subresource="status")

        async def trouble() -> Any:
            return operator._fleet.troubles.get(f"{NS}/p")

        found = await site.until(trouble)
        assert (found.reason, found.message) == ("AgentExited", "the container fetch ended with code 3")


async def test_two_operators_make_no_more_pods_than_one(site: Site, pg: asyncpg.Connection) -> None:
    """The old leader goes on for a moment after another has its term: what it writes to the store is refused."""
    await site.pool()
    async with site.operating() as old:
        await site.create("one")
        await site.pods(1)
        await move_clock(pg, 120)
        assert await site.resources.lead("operator", "another", 60) is not None
        await site.create("two")
        await asyncio.sleep(0.5)
        assert len((await site.kube.list(PODS, NS))[0]) == 1
        assert old._fleet.troubles == {}


# -------------------------------------------------------------------------------------------------------------- what was missed


async def test_a_deletion_that_nobody_saw_is_found(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        made = await site.create("report")
        await site.pods(1)
        assert site.watch is not None
        site.watch.cut()
        # Somebody took the finalizer off by hand.
        await site.kube.merge_patch(AGENTRUNS, NS, "report", {"metadata": {"finalizers": []}})
        await site.kube.delete(AGENTRUNS, NS, "report", uid=made["metadata"]["uid"])
        await site.watch.resume()
        assert await operator._resync.look() == 1
    assert await site.pg.fetchval("select state from perdure.runs") == "Cancelled"


async def test_no_worker_outlives_an_uninstall_and_what_was_at_work_goes_on_after_the_next_install(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", retry={"backoffSeconds": 0})
        [pod] = await site.pods(1)
        held = await site.lease(pod)
    others = {"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/component": "worker"}
    await site.kube.create(PODS, NS, {"metadata": {"name": "a-stranger", "labels": others}, "spec": {}})
    assert await end_workers(site.kube, ["elsewhere"]) == 0
    assert await end_workers(site.kube, [NS]) == 1
    assert await end_workers(site.kube, []) == 0
    await site.pods(0, besides="a-stranger")
    async with site.operating():
        await runs.apply(site.store, Control(held.run, "expire", held.lease))
        heir = await site.lease((await site.pods(1, besides="a-stranger"))[0])
        assert (heir.run, heir.fence.epoch > held.fence.epoch) == (held.run, True)
    assert await site.pg.fetchval("select failures from perdure.runs") == 0


async def test_a_run_that_lives_is_held_again(site: Site) -> None:
    """An uninstall takes the finalizer off; whoever is installed next cares for the run's end again."""
    await site.pool()
    async with site.operating():
        await site.create("report")
        await site.pods(1)
        await site.kube.merge_patch(AGENTRUNS, NS, "report", {"metadata": {"finalizers": []}})

        async def held() -> bool:
            return CANCEL_FINALIZER in ((await site.get("report"))["metadata"].get("finalizers") or [])

        await site.until(held)


async def test_many_absences_at_once_are_no_deletions(site: Site) -> None:
    await site.pool()
    for n in range(25):
        run = runs.NewRun(runs.columns(name=f"r{n}"), b"null")
        assert (await site.resources.admit(uuid4(), 1, run)).decision == "created"
    async with site.operating() as operator:
        assert await operator._resync.look() == 0
    assert {row[0] for row in await site.pg.fetch("select state from perdure.runs")} == {"Pending"}


async def test_faults_of_the_apiserver_delay_and_lose_nothing(site: Site) -> None:
    await site.pool()
    site.kube.fail(KubeUnavailable("overloaded"), "create", PODS, times=2)
    site.kube.fail(KubeConflict("somebody was faster"), "patch", AGENTRUNS, times=3)
    site.kube.fail(KubeUnavailable("no answer"), "patch", AGENTRUNS, after=True, times=2)
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        await runs.apply(site.store, runs.work(await site.lease(pod), "finish", outcome="succeeded"))
        await site.phase("report", "Succeeded")
        await site.pods(0)


@pytest.mark.parametrize("ended", [True, False])
async def test_a_run_that_the_database_has_lost_is_not_executed_again(site: Site, ended: bool) -> None:
    """A restored database, or one without a volume: what the run did happened, whoever has forgotten it."""
    await site.pool()
    async with site.operating():
        await site.create("report")
        [pod] = await site.pods(1)
        held = await site.lease(pod)
        await site.phase("report", "Running")
        if ended:
            await runs.apply(site.store, runs.work(held, "finish", outcome="succeeded"))
            await site.phase("report", "Succeeded")
    await site.pg.execute("truncate perdure.runs, perdure.resources, perdure.pods, perdure.leases cascade")
    async with site.operating():

        async def settled() -> bool:
            resource = await site.get("report")
            if ended:
                return not resource["metadata"].get("finalizers")
            return truth(resource, "Succeeded")[1] == "RecordMissing"

        await site.until(settled)
        await site.create("another")
        await site.until(lambda: site.pg.fetchval("select true from perdure.runs where name = 'another'"))
    assert await site.pg.fetchval("select count(*) from perdure.runs") == 1
    assert (await site.get("report"))["status"]["phase"] == ("Succeeded" if ended else "Pending")


async def test_pods_of_one_pool_that_never_ask_leave_room_for_another(site: Site) -> None:
    await site.pool(spec=POOL | {"capacity": {"minIdle": 0, "maxIdle": 0, "maxPods": 40}})
    await site.pool("other")
    async with site.operating():
        for n in range(35):
            await site.create(f"stuck-{n}")
        await site.pods(30)
        await site.create("free", agent={"poolRef": {"name": "other"}})
        await move_clock(site.pg, 20)

        async def has_one() -> bool:
            return any(pod["metadata"]["name"].startswith("other-") for pod in (await site.kube.list(PODS, NS))[0])

        await site.until(has_one)


async def test_a_pool_whose_pods_cannot_be_made_says_so_and_stops_no_other(site: Site) -> None:
    reserved = {"metadata": {"labels": {"app.kubernetes.io/component": "mine"}}, **POOL["template"]}
    await site.pool("bad", POOL | {"template": reserved})
    await site.pool()
    async with site.operating():
        await site.create("bad-run", agent={"poolRef": {"name": "bad"}})
        await site.create("report")
        await site.pods(1)

        async def said() -> bool:
            return (await site.get("bad-run")).get("status", {}).get("waitReason") == "PoolNotReady"

        await site.until(said)


async def test_a_pod_whose_agent_never_asks_is_given_up(site: Site) -> None:
    await site.pool()
    async with site.operating() as operator:
        await site.create("report")
        [pod] = await site.pods(1)
        await move_clock(site.pg, 700)
        await site.pods(1, besides=pod["metadata"]["name"])
        assert operator._fleet.troubles[f"{NS}/p"].reason == "AgentNotReady"
