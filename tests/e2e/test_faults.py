"""What breaks under runs that are at work: their pod is taken away, the kubelet restarts, the namespace has no room."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.e2e.installation import POOLS, Installation, agent_run, pool
from tests.e2e.records import Records

AGENT = ["python", "agents.py"]
# Ends without a word at SIGTERM, as most programs do that are not the first of their container.
ABRUPT = ["sh", "-c", "python agents.py worker & agent=$!; trap 'kill -9 $agent; exit 0' TERM; wait $agent"]


@pytest.fixture(scope="module")
def records(perdure: Installation, place: str) -> Records:
    return Records(perdure, place)


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    perdure.apply(place, *(pool(name, [*AGENT, name]) for name in ("waiter", "worker", "stepper")), pool("abrupt", ABRUPT))


def evict(perdure: Installation, place: str, pod: str) -> None:
    """As a drain does it."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": place}}
    perdure.cluster.kubectl("create", "--raw", f"/api/v1/namespaces/{place}/pods/{pod}/eviction", "-f", "-", input=json.dumps(eviction))


def delete(perdure: Installation, place: str, pod: str) -> None:
    perdure.delete("pod", pod, place, "--wait=false")


@pytest.mark.parametrize("agent", ["worker", "abrupt"])
@pytest.mark.parametrize("end", [evict, delete])
def test_a_pod_that_is_taken_away_mid_step_is_no_failure(
    perdure: Installation, place: str, records: Records, end: Callable[[Installation, str, str], None], agent: str
) -> None:
    name = f"{agent}-{end.__name__}"
    perdure.apply(place, agent_run(name, agent, {"seconds": 8}, retry={"maxRetries": 0}))
    pod = records.until_at_work(name)
    assert records.is_running(name)
    end(perdure, place, pod)
    done = perdure.until_phase(name, place, "Succeeded", 120)
    assert done["status"]["result"]["attempt"] == 2, "it was not struck"
    assert records.column(name, "failures, losses") == "0|0"
    assert len(set(records.holders(name))) == 2, "it went on elsewhere"
    assert records.count(name, "step.succeeded") == 2, "what was done was done again"
    perdure.until("the old pod goes", lambda: pod not in perdure.workers(place))


def test_the_kubelet_restarts_and_nobody_at_work_notices(perdure: Installation, place: str, records: Records) -> None:
    perdure.apply(place, agent_run("waits", "waiter", {}), agent_run("works", "stepper", {"count": 100}))
    perdure.until_phase("waits", place, "Suspended")
    records.until_at_work("works")
    perdure.cluster.stop_kubelet()
    try:
        before = int(records.column("works", "steps"))
        perdure.until("it works without a kubelet", lambda: int(records.column("works", "steps")) > before + 2)
    finally:
        perdure.cluster.start_kubelet()
    assert records.is_running("works")
    assert perdure.run("waits", place)["status"]["phase"] == "Suspended"
    perdure.signal("waits", place, "go", "now")
    assert perdure.until_phase("waits", place, "Succeeded", 120)["status"]["result"]["payload"] == "now"
    done = perdure.until_phase("works", place, "Succeeded", 120)
    assert done["status"]["result"] == {"steps": 100, "attempt": 1}
    assert len(records.holders("works")) == 1


def test_a_quota_refuses_pods_until_it_is_raised(perdure: Installation, namespace: str) -> None:
    def quota(pods: int) -> dict[str, object]:
        return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}, "spec": {"hard": {"pods": str(pods)}}}

    def used() -> str | None:
        found = perdure.get("resourcequotas", "pods", namespace) or {}
        return ((found.get("status") or {}).get("used") or {}).get("pods")

    def says() -> tuple[str, str]:
        found = perdure.get(POOLS, "worker", namespace) or {}
        [ready] = (found.get("status") or {}).get("conditions") or [{"status": "", "reason": ""}]
        return ready["status"], ready["reason"]

    perdure.apply(namespace, quota(0))
    perdure.until("the quota counts", lambda: used() == "0")
    perdure.apply(namespace, pool("worker", [*AGENT, "worker"]), agent_run("squeezed", "worker", {"seconds": 0.1}))
    perdure.until("the pool says why it has no pods", lambda: says() == ("False", "QuotaExceeded"))
    perdure.until("and so does the run", lambda: perdure.run("squeezed", namespace)["status"]["waitReason"] == "PoolNotReady")
    assert perdure.run("squeezed", namespace)["status"]["phase"] == "Pending"
    describe = ("describe", "agentrun", "squeezed", "-n", namespace)
    perdure.until("its events too", lambda: "QuotaExceeded" in perdure.cluster.kubectl(*describe).partition("Events:")[2])
    assert not perdure.workers(namespace)

    perdure.apply(namespace, quota(5))
    done = perdure.until_phase("squeezed", namespace, "Succeeded", 120)
    assert done["status"]["result"]["attempt"] == 1
    assert Records(perdure, namespace).column("squeezed", "failures") == "0"
    perdure.until("the pool is well", lambda: says()[0] == "True")
