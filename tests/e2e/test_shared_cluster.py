"""A cluster that others share: nodes are drained, pools go and come, tools wait for what they have installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.errors import ClusterError
from tests.e2e.installation import POOLS, Installation, Json, agent_run, pool
from tests.e2e.records import Records

AGENT = ["python", "agents.py"]
NODE = "node1"
SOON = 40
"""Seconds: a busy node takes its time before it looks for an image."""
# As docs/install.md has it. There is one node, and what serves the tests is on it too.
DRAIN = ("drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
WORKERS = "--pod-selector=app.kubernetes.io/component=worker"


@pytest.fixture(scope="module")
def records(perdure: Installation, place: str) -> Records:
    return Records(perdure, place)


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    perdure.apply(place, pool("worker", [*AGENT, "worker"]), pool("fork", [*AGENT, "worker"], reuse=True))


@pytest.fixture
def node(perdure: Installation) -> Iterator[str]:
    yield NODE
    perdure.cluster.kubectl("uncordon", NODE)


def ready(perdure: Installation, place: str, name: str) -> tuple[str, str, str]:
    found = (perdure.get(POOLS, name, place) or {}).get("status") or {}
    [said] = [c for c in found.get("conditions") or [{"type": "Ready", "status": "", "reason": "", "message": ""}] if c["type"] == "Ready"]
    return said["status"], said["reason"], said["message"]


def stalled(run: Json) -> tuple[str, str]:
    [said] = [c for c in run["status"]["conditions"] if c["type"] == "Stalled"]
    return said["status"], said["reason"]


def test_a_drain_takes_workers_from_their_node_and_nothing_is_held_against_their_runs(
    perdure: Installation, place: str, records: Records, node: str
) -> None:
    names = {"drained": "worker", "drained-fork": "fork"}
    perdure.apply(place, *(agent_run(name, which, {"seconds": 6}, retry={"maxRetries": 0}) for name, which in names.items()))
    before = [records.until_at_work(name) for name in names]
    perdure.cluster.kubectl(*DRAIN, WORKERS, seconds=150)
    assert not set(before) & set(perdure.workers(place)), "a drain returns when the pods are gone"
    for name in names:
        perdure.until(f"{name} waits for a node", lambda name=name: "Unschedulable" in str(perdure.run(name, place)["status"]))
    perdure.cluster.kubectl("uncordon", node)
    for name in names:
        done = perdure.until_phase(name, place, "Succeeded", 120)
        assert done["status"]["result"]["attempt"] == 2, "it was not struck"
        assert records.column(name, "failures, losses") == "0|0"
        assert len(set(records.holders(name))) == 2, "it went on elsewhere"
        assert records.count(name, "step.succeeded") == 2, "what was done was done again"


def test_a_pool_that_is_deleted_takes_its_pods_along_and_its_runs_wait_for_another(
    perdure: Installation, place: str, records: Records
) -> None:
    mine = pool("mine", [*AGENT, "worker"])
    perdure.apply(place, mine, agent_run("homeless", "mine", {"seconds": 8}, retry={"maxRetries": 0}))
    pod = records.until_at_work("homeless")
    # The collector learns of a new definition with its next discovery.
    perdure.delete(POOLS, "mine", place)
    perdure.until("its pod is gone", lambda: pod not in perdure.workers(place), 120)
    perdure.until("its run says so", lambda: stalled(perdure.run("homeless", place)) == ("True", "PoolNotFound"))
    perdure.apply(place, mine)
    perdure.until_phase("homeless", place, "Succeeded", 120)
    assert stalled(perdure.run("homeless", place))[0] == "False"
    assert records.column("homeless", "failures, losses") == "0|0"
    assert len(set(records.holders("homeless"))) == 2


def test_a_pool_says_soon_why_its_pods_do_not_start_with_their_last_words(perdure: Installation, place: str) -> None:
    words = "print('no such model: gpt-0'); raise SystemExit(3)"
    perdure.apply(
        place,
        pool("idler", [*AGENT, "worker"]),
        pool("missing", [*AGENT, "worker"], image="perdure-there-is-no-such-image"),
        pool("broken", ["python", "-c", words]),
        pool("mute", ["sleep", "600"]),
        *(agent_run(name, name, {}) for name in ("missing", "broken", "mute")),
    )
    perdure.until("a pool that nobody needs is ready", lambda: ready(perdure, place, "idler")[:2] == ("True", "NoPodsWanted"), 15)
    perdure.until("the image is said to be missing", lambda: ready(perdure, place, "missing")[:2] == ("False", "ErrImageNeverPull"), SOON)
    perdure.until("what the agent said last is told", lambda: "no such model: gpt-0" in ready(perdure, place, "broken")[2], SOON)
    perdure.until("and by its run", lambda: "no such model: gpt-0" in str(perdure.run("broken", place)["status"]["conditions"]), 15)
    perdure.until("silence is told", lambda: ready(perdure, place, "mute")[:2] == ("False", "AgentNotReady"), SOON + 30)
    perdure.until("and by its run", lambda: "has not asked for a run" in str(perdure.run("mute", place)["status"]["conditions"]), 15)
    perdure.cluster.kubectl("delete", "agentruns", "missing", "broken", "mute", "-n", place)
    perdure.cluster.kubectl("delete", "agentpools", "missing", "broken", "mute", "-n", place)


def test_helm_waits_for_pools_that_come_up_and_fails_with_runs_that_do_not(perdure: Installation, namespace: str, tmp_path: Path) -> None:
    def install(name: str, *objects: Json) -> None:
        folder = tmp_path / name
        (folder / "templates").mkdir(parents=True)
        (folder / "Chart.yaml").write_text(yaml.safe_dump({"apiVersion": "v2", "name": name, "version": "1.0.0"}))
        (folder / "templates" / "all.yaml").write_text(yaml.safe_dump_all(objects))
        perdure.cluster.helm("install", name, str(folder), "-n", namespace, "--wait", "--timeout", "60s")

    install("well", pool("warm", [*AGENT, "waiter"], idle=1), pool("idler", [*AGENT, "waiter"]), agent_run("waits", "idler", {}))
    assert ready(perdure, namespace, "warm")[:2] == ("True", "Ready"), "it was not waited for"
    with pytest.raises(ClusterError):
        install("ill", agent_run("lost", "there-is-none", {}))
    assert stalled(perdure.run("lost", namespace)) == ("True", "PoolNotFound")


def test_a_worker_runs_where_a_quota_counts_limits(perdure: Installation, namespace: str) -> None:
    hard = {"limits.cpu": "2", "limits.memory": "1Gi", "requests.cpu": "1", "requests.memory": "1Gi"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "compute"}, "spec": {"hard": hard}}
    resources = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}}
    frugal = pool("frugal", [*AGENT, "worker"], resources=resources)
    frugal["spec"]["sidecar"] = {"resources": {"limits": {"cpu": "300m"}}}
    perdure.apply(namespace, quota)
    perdure.until("the quota counts", lambda: (perdure.get("resourcequotas", "compute", namespace) or {}).get("status", {}).get("used"))
    perdure.apply(
        namespace,
        pool("limited", [*AGENT, "worker"], resources=resources), frugal, pool("boundless", [*AGENT, "worker"]),
        *(agent_run(name, name, {"seconds": 0.1}) for name in ("limited", "frugal", "boundless")),
    )  # fmt: skip
    perdure.until_phase("limited", namespace, "Succeeded", 120)
    perdure.until_phase("frugal", namespace, "Succeeded", 120)
    perdure.until("what to do is said", lambda: ready(perdure, namespace, "boundless")[:2] == ("False", "QuotaNeedsResources"))
    words = "quota compute wants every container to say limits.cpu for: agent; limits.memory for: agent; requests.cpu for: agent"
    assert ready(perdure, namespace, "boundless")[2].startswith(words)
    perdure.until("and by the run", lambda: words in str(perdure.run("boundless", namespace)["status"]["conditions"]))
