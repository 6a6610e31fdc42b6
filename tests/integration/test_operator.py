"""The operator on a real store and a cluster in memory: what becomes of resources, of pods, and of what it missed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.harness import runs
from tests.harness.postgres import move_clock
from tests.harness.site import NS, POOL, SETTINGS, Json, Site

from perdure_operator.controllers.agentrun import AGAIN_SECONDS
from perdure_operator.controllers.release import end_workers
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, EVENTS, PODS
from perdure_operator.kube.errors import KubeConflict, KubeForbidden, KubeUnavailable
from perdure_operator.kube.names import CANCEL_FINALIZER, RUN_ID_LABEL
from perdure_operator.services import projector
from perdure_operator.services.why import trouble_of_pool
from perdure_operator.store.operations import Control
from perdure_operator.store.store import Store

HERE = SETTINGS.pods.installation


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


async def test_limits_that_a_changed_spec_does_not_name_stay_and_those_that_it_names_hold(site: Site) -> None:
    defaults = {"activeDeadlineSeconds": 100, "budgets": {"maxRetriesPerToolCall": 2}}
    await site.pool(spec=POOL | {"runDefaults": defaults})
    async with site.operating():
        await site.create("report", deadlineSeconds=400)
        await site.lease((await site.pods(1))[0])
        steps: list[tuple[Json, tuple[int, int, int]]] = [
            ({"priority": 5}, (100_000, 400, 2)),
            ({"activeDeadlineSeconds": 200}, (200_000, 400, 2)),
            ({"budgets": {"maxRetriesPerToolCall": 9}}, (200_000, 400, 9)),
        ]
        for generation, (spec, limits) in enumerate(steps, 2):
            await site.kube.merge_patch(AGENTRUNS, NS, "report", {"spec": spec})
            await site.until(lambda told=generation: site.pg.fetchval("select generation = $1 from perdure.resources", told))
            row = await site.pg.fetchrow("select active_limit_ms, deadline_seconds, max_tool_retries, deadline_at from perdure.runs")
            assert tuple(row)[:3] == limits
            assert row["deadline_at"] is not None


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
        [event] = await site.events(reason)
        assert (event["type"], event["involvedObject"]["name"]) == ("Warning", "report")
    assert await site.pg.fetchval("select count(*) from perdure.runs") == 0


async def test_what_cannot_begin_can_be_cancelled(site: Site) -> None:
    async with site.operating():
        await site.create("report")
        await site.phase("report", "Pending")
        await site.kube.merge_patch(AGENTRUNS, NS, "report", {"spec": {"desiredState": "Cancelled"}})
        found = await site.phase("report", "Cancelled")
        assert (truth(found, "Finished"), truth(found, "Succeeded")) == (("True", "Cancelled"), ("False", "Cancelled"))
        await site.pool()
        await asyncio.sleep(0.3)
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


async def test_a_detached_child_outlives_the_cleaning_up_of_its_parent(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("parent", ttlSecondsAfterFinished=0)
        parent = await site.lease((await site.pods(1))[0])
        spawn, _ = runs.spawn(parent, "spawn:c#0", "detach", name="child")
        await runs.apply(site.store, spawn)
        await site.phase("child", "Pending")
        await runs.apply(site.store, runs.work(parent, "finish", outcome="succeeded"))
        await site.gone("parent")
        assert "deletionTimestamp" not in (await site.get("child"))["metadata"]
    assert dict(await site.pg.fetch("select name, state from perdure.runs")) == {"parent": "Succeeded", "child": "Pending"}


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
        waiting = await site.phase("report", "Pending")
        assert truth(waiting, "Succeeded") == ("Unknown", "PredecessorActive")
        assert waiting["status"]["waitReason"] == "PredecessorActive"
        assert str(held.run) in waiting["status"]["conditions"][0]["message"]
        await asyncio.sleep(AGAIN_SECONDS * 2)
        assert (await site.get("report"))["metadata"]["resourceVersion"] == waiting["metadata"]["resourceVersion"], "it is said once"
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
        await site.create("again", idempotencyKey="2026-47", desiredState="Cancelled")
        adopted = await site.phase("again", "Succeeded")
        assert (adopted["status"]["result"], adopted["status"]["observedGeneration"]) == (7, 1)
    assert await site.pg.fetchval("select count(*) from perdure.runs") == 1
    assert await site.pg.fetchval("select count(*) from perdure.events where kind = 'run.leased'") == 1


@pytest.mark.parametrize("state", ["Suspended", "Cancelled"])
async def test_an_adopted_run_does_what_its_resource_says(site: Site, state: str) -> None:
    await site.pool()
    run = await runs.pending(site.store, name="other", idempotency_key="k", active_limit_ms=100_000)
    async with site.operating():
        await site.create("mine", idempotencyKey="k", desiredState=state, priority=5, deadlineSeconds=50)
        await site.phase("mine", state)

        async def observed() -> bool:
            return bool((await site.get("mine"))["status"]["observedGeneration"] == 1)

        await site.until(observed)
        assert (await site.get("mine"))["status"]["runID"] == str(run)
    row = await site.pg.fetchrow("select priority, deadline_seconds, active_limit_ms from perdure.runs")
    assert tuple(row) == (5, 50, 100_000)


async def test_resources_of_runs_come_when_a_quota_has_room_for_them(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projector, "QUOTA_SECONDS", 1.0)
    await site.pool()
    async with site.operating():
        await site.create("parent")
        parent = await site.lease((await site.pods(1))[0])
        site.kube.fail(KubeForbidden("exceeded quota: few", quota=True), "create", AGENTRUNS, times=1_000_000)
        begun = monotonic()
        for name in ("a", "b"):
            await runs.apply(site.store, runs.spawn(parent, f"spawn:{name}#0", name=name)[0])
        [event] = await site.events("QuotaExceeded")
        assert (event["involvedObject"]["name"], "exceeded quota: few" in event["message"]) == ("parent", True)
        await asyncio.sleep(0.5)
        tries = [call for call in site.kube.writes(AGENTRUNS) if call.verb == "create" and call.name != "parent"]
        assert 1 <= len(tries) <= 1 + (monotonic() - begun)
        site.kube.faults.clear()
        for name in ("a", "b"):
            await site.phase(name, "Pending")
        assert len(await site.events("QuotaExceeded")) == 1


async def test_a_run_whose_resource_is_refused_for_good_says_so_at_its_parent(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("parent")
        parent = await site.lease((await site.pods(1))[0])
        site.kube.fail(KubeForbidden("no more agents, says a policy"), "create", AGENTRUNS, times=1_000_000)
        await runs.apply(site.store, runs.spawn(parent, "spawn:c#0", name="child")[0])
        [event] = await site.events("NoResource")
        assert (event["involvedObject"]["name"], "says a policy" in event["message"]) == ("parent", True)
        await site.until(lambda: site.pg.fetchval("select gone from perdure.resources where name = 'child'"))
    assert [call.name for call in site.kube.writes(AGENTRUNS) if call.verb == "create"] == ["parent", "child"]


# -------------------------------------------------------------------------------------------------------------- the fleet


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
        [event] = await site.events("ErrImagePull")
        assert (event["type"], "no such image" in event["message"]) == ("Warning", True)
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


async def test_workers_of_another_installation_are_left_alone(site: Site) -> None:
    labels = {"app.kubernetes.io/managed-by": "perdure", "app.kubernetes.io/component": "worker", "perdure.dev/installation": "there"}
    neighbour = {"metadata": {"name": "neighbour", "labels": labels | {"perdure.dev/pod-id": str(uuid4())}}, "spec": {}}
    made = await site.kube.create(PODS, NS, neighbour)
    await site.pool()
    async with site.operating() as operator:
        await site.create("report")
        await site.pods(1, besides="neighbour")
        await operator._resync.look()
    assert await end_workers(site.kube, [], HERE) == 1
    await site.pods(0, besides="neighbour")
    assert await site.kube.get(PODS, NS, "neighbour") == made


async def test_no_worker_outlives_an_uninstall_and_what_was_at_work_goes_on_after_the_next_install(site: Site) -> None:
    await site.pool()
    async with site.operating():
        await site.create("report", retry={"backoffSeconds": 0})
        [pod] = await site.pods(1)
        held = await site.lease(pod)
    others = {"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/component": "worker"}
    await site.kube.create(PODS, NS, {"metadata": {"name": "a-stranger", "labels": others}, "spec": {}})
    assert await end_workers(site.kube, ["elsewhere"], HERE) == 0
    assert await end_workers(site.kube, [NS], HERE) == 1
    assert await end_workers(site.kube, [], HERE) == 0
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


@pytest.mark.parametrize("count", [1, 25])
async def test_pools_that_were_deleted_while_the_operator_was_down_go_with_their_pods(site: Site, count: int) -> None:
    warm = POOL | {"capacity": {"minIdle": 1, "maxIdle": 1, "maxPods": 9}}
    names = [f"p{n}" for n in range(count)]
    for name in (*names, "kept"):
        await site.pool(name, warm)
    async with site.operating():
        await site.pods(count + 1)
        await site.come_up()
    for name in names:
        found = await site.kube.get(AGENTPOOLS, NS, name)
        assert found is not None
        await site.kube.delete(AGENTPOOLS, NS, name, uid=found["metadata"]["uid"])
    async with site.operating():
        [pod] = await site.pods(1)
        assert pod["metadata"]["name"].startswith("kept-")

        async def dropped() -> bool:
            return [*await site.store.pools()] == [f"{NS}/kept"]

        await site.until(dropped)
        await site.pool("p0", warm)
        await site.pods(2)


async def test_a_pool_without_a_resource_stays_when_nobody_knows(site: Site) -> None:
    await site.pool()
    async with site.operating(replace(SETTINGS, namespaces=(NS,))) as operator:
        await site.until(site.store.pools)
        for namespace, name in (("unwatched", "p"), (NS, "unseen")):
            await site.store.upsert_pool(namespace, name, POOL, None)
        assert site.watch is not None
        site.watch.cut()
        await site.pool("unseen")
        before = await site.store.pools()
        assert len(before) == 3
        await operator._pools.look()
        await site.store.upsert_pool(NS, "gone", POOL, None)
        site.kube.fail(KubeUnavailable("overloaded"), "get", AGENTPOOLS)
        with pytest.raises(KubeUnavailable):
            await operator._pools.look()
        await asyncio.sleep(0.2)
        assert {*await site.store.pools()} == {*before, f"{NS}/gone"}
        await operator._pools.look()

        async def dropped() -> bool:
            return await site.store.pools() == before

        await site.until(dropped)


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
    await site.pg.execute("truncate perdure.runs, perdure.events, perdure.resources, perdure.pods, perdure.leases cascade")
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
