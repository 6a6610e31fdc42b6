"""What breaks around runs: gateways, the database, the Kubernetes API, operators. Runs are at work and signals come while it happens."""

from __future__ import annotations

import signal
import time

import pytest
from tests.cluster.errors import ClusterError
from tests.e2e.inside import Inside
from tests.e2e.installation import NAMESPACE, PODS, RUNS, Installation, Json, agent_run, pool
from tests.e2e.records import Records

AGENT = ["python", "agents.py"]
NEWS_SECONDS = 15.0
OUTAGE_SECONDS = 20.0
ABSENCE_SECONDS = 120.0
SILENCE_SECONDS = 75.0
"""After which a watch that says nothing is begun anew; API servers send something every minute."""
METRICS_PORT = 9090


@pytest.fixture(scope="module")
def records(perdure: Installation, place: str) -> Records:
    return Records(perdure, place)


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    perdure.apply(
        place,
        pool("cold", [*AGENT, "waiter"]),
        pool("stepper", [*AGENT, "stepper"]),
        *(pool(name, [*AGENT, name], idle=2, reuse=True) for name in ("waiter", "sleeper", "collector")),
    )


@pytest.fixture
def inside(perdure: Installation, place: str) -> Inside:
    return Inside(perdure, place)


# ------------------------------------------------------------------------------------------------------------ our own parts


def test_gateways_die_while_runs_work_and_signals_come(perdure: Installation, place: str, records: Records, inside: Inside) -> None:
    perdure.apply(place, agent_run("collects", "collector"), agent_run("works", "stepper", {"count": 300}))
    perdure.until_phase("collects", place, "Suspended")
    records.until_at_work("works")
    with inside.flow("collects") as flow:
        for pod in perdure.all(PODS, NAMESPACE, labels="app.kubernetes.io/component=gateway"):
            gateway, sent = pod["metadata"]["name"], flow.sent
            perdure.until("signals flow", lambda sent=sent: flow.sent > sent)
            assert records.is_running("works")
            perdure.cluster.kill_container_process(gateway, "gateway", signal.SIGKILL, namespace=NAMESPACE)
            perdure.delete("pod", gateway, NAMESPACE, "--force", "--grace-period=0")
            perdure.cluster.kubectl("rollout", "status", "deployment/perdure-gateway", "-n", NAMESPACE, "--timeout=120s", seconds=130)
    assert flow.unanswered > 0, "nobody met a gateway that was dead"
    assert perdure.until_phase("collects", place, "Succeeded", 120)["status"]["result"] == list(range(flow.sent))
    assert perdure.until_phase("works", place, "Succeeded", 120)["status"]["result"] == {"steps": 300, "attempt": 1}
    assert len(records.holders("works")) == 1, "a lease outlives a gateway"
    assert records.count("works", "step.succeeded") == 300


def test_the_database_dies_while_runs_work_and_signals_come(perdure: Installation, place: str, records: Records, inside: Inside) -> None:
    """Its process: the test's database has no volume that would outlive the pod, but one that outlives the container."""
    perdure.apply(place, agent_run("keeps", "collector"), agent_run("toils", "stepper", {"count": 150}))
    perdure.until_phase("keeps", place, "Suspended")
    records.until_at_work("toils")
    with inside.flow("keeps") as flow:
        perdure.until("signals flow", lambda: flow.sent > 2)
        assert records.is_running("toils")
        while not flow.unanswered:
            # It can be back before anybody has met it dead; the kubelet takes its time with a second restart.
            perdure.cluster.kill_container_process("perdure-postgres-0", "postgres", signal.SIGKILL, namespace=NAMESPACE)
            sent = flow.sent
            perdure.until(
                "somebody meets a database that is dead, or nobody does", lambda sent=sent: flow.unanswered or flow.sent > sent + 3
            )
        sent = flow.sent
        perdure.until("signals flow again", lambda: flow.sent > sent + 2)
    assert perdure.until_phase("keeps", place, "Succeeded", 120)["status"]["result"] == list(range(flow.sent))
    assert perdure.until_phase("toils", place, "Succeeded", 120)["status"]["result"] == {"steps": 150, "attempt": 1}
    assert len(records.holders("toils")) == 1, "a lease outlives the database's restart"
    assert records.count("toils", "step.succeeded") == 150


@pytest.mark.usefixtures("operators")
def test_warm_runs_go_on_without_operators(perdure: Installation, place: str, records: Records) -> None:
    names = ["alone-1", "alone-2"]
    perdure.apply(place, *(agent_run(name, "waiter", {}) for name in names))
    for name in names:
        perdure.until_phase(name, place, "Suspended")
    records.until_warm("waiter", 2)
    records.until_warm("sleeper")
    perdure.apply(place, agent_run("naps", "sleeper", {"seconds": 20}))
    perdure.until_phase("naps", place, "Suspended")
    perdure.scale_operators(0)
    gone = time.monotonic()
    assert records.column("naps", "state") == "Suspended", "it was to be woken later"
    perdure.signal("alone-1", place, "go", 1)
    perdure.until("it has succeeded", lambda: records.column("alone-1", "state") == "Succeeded")
    perdure.until("its timer has woken it", lambda: records.column("naps", "state") == "Succeeded")
    time.sleep(max(0.0, gone + ABSENCE_SECONDS - time.monotonic()))
    perdure.signal("alone-2", place, "go", 2)
    perdure.until("it has succeeded, late in the absence", lambda: records.column("alone-2", "state") == "Succeeded")
    assert perdure.run("alone-1", place)["status"]["phase"] == "Suspended", "somebody wrote statuses"
    perdure.scale_operators(2)
    for name in (*names, "naps"):
        perdure.until_phase(name, place, "Succeeded")
        assert records.column(name, "failures") == "0"


# ------------------------------------------------------------------------------------------------------- the Kubernetes API


def test_the_apiserver_restarts_and_news_come_at_once(perdure: Installation, place: str, records: Records) -> None:
    """A restart cuts every watch."""
    perdure.apply(place, agent_run("works-on", "stepper", {"count": 60}), agent_run("goes", "cold", {}), agent_run("stays", "cold", {}))
    perdure.until_phase("goes", place, "Suspended")
    perdure.until_phase("stays", place, "Suspended")
    records.until_at_work("works-on")
    perdure.cluster.restart_apiserver()
    assert records.is_running("works-on")
    perdure.apply(place, agent_run("comes", "cold", {}))
    perdure.delete(RUNS, "goes", place, "--wait=false")
    perdure.until("the new run is known", lambda: records.column("comes", "state"), NEWS_SECONDS)
    perdure.until("the deletion is known", lambda: records.column("goes", "state") == "Cancelled", NEWS_SECONDS)
    perdure.until("the deleted one is gone", lambda: perdure.get(RUNS, "goes", place) is None, NEWS_SECONDS)
    perdure.until_phase("comes", place, "Suspended")
    assert perdure.until_phase("works-on", place, "Succeeded")["status"]["result"]["attempt"] == 1
    assert records.column("stays", "state") == "Suspended"


@pytest.mark.parametrize(("how", "seconds"), [("reset", NEWS_SECONDS), ("forgotten", SILENCE_SECONDS + NEWS_SECONDS)])
def test_the_leaders_watches_are_cut(perdure: Installation, place: str, records: Records, how: str, seconds: float) -> None:
    """``forgotten``: the watches seem to be there, and say nothing any more."""
    gone, new, later = f"{how}-gone", f"{how}-new", f"{how}-later"
    perdure.apply(place, agent_run(gone, "cold", {}))
    perdure.until_phase(gone, place, "Suspended")
    leader = perdure.leader()
    since = time.monotonic()  # those that are reset are begun anew at once
    cut = perdure.cluster.cut_connections(leader, "operator", 443, silently=how == "forgotten", namespace=NAMESPACE)
    assert cut >= 4, "a watch for each kind"
    perdure.apply(place, agent_run(new, "cold", {}))
    perdure.delete(RUNS, gone, place, "--wait=false")
    perdure.until("the new run is known", lambda: records.column(new, "state"), seconds)
    perdure.until("the deletion is known", lambda: records.column(gone, "state") == "Cancelled", seconds)
    perdure.until("the deleted one is gone", lambda: perdure.get(RUNS, gone, place) is None, seconds)
    # A list of everything, which is made now and then, may have told that; of each watch itself:
    perdure.until("every watch is heard again", lambda: silence(perdure, leader) < time.monotonic() - since, seconds)
    if how == "forgotten":
        assert perdure.cluster.lost_packets(leader, "operator", namespace=NAMESPACE) > 0, "they were not cut"
    perdure.until_phase(new, place, "Suspended")

    perdure.apply(place, pool(later, [*AGENT, "waiter"], idle=1), trigger(later))
    perdure.until("news of pools come", lambda: perdure.workers_of(later, place), NEWS_SECONDS)
    known = f"select 1 from perdure.triggers where trigger_key = '{place}/{later}'"
    perdure.until("news of triggers come", lambda: perdure.sql(known), NEWS_SECONDS)
    records.until_warm(later)
    [pod] = perdure.workers_of(later, place)
    perdure.delete("pod", pod, place, "--wait=false")
    perdure.until("news of pods come", lambda: set(perdure.workers_of(later, place)) - {pod}, NEWS_SECONDS)
    assert perdure.leader() == leader, "somebody else knew it"
    perdure.delete("pod", leader, NAMESPACE)  # what drops the packets is part of it


def silence(perdure: Installation, operator: str) -> float:
    """Seconds since the most silent of its watches was heard."""
    pod = perdure.get(PODS, operator, NAMESPACE)
    assert pod is not None
    metrics = perdure.cluster.exec(["curl", "-sS", "--max-time", "5", f"http://{pod['status']['podIP']}:{METRICS_PORT}/metrics"])
    return float(next(line.split()[1] for line in metrics.splitlines() if line.startswith("perdure_watch_age_seconds ")))


def trigger(name: str) -> Json:
    run = {"agent": {"poolRef": {"name": "cold"}}}
    return {
        "apiVersion": "perdure.dev/v1alpha1", "kind": "Trigger", "metadata": {"name": name},
        "spec": {"source": {"manual": {}}, "runTemplate": {"spec": run}},
    }  # fmt: skip


def test_warm_runs_go_on_without_the_apiserver(perdure: Installation, place: str, records: Records, inside: Inside) -> None:
    names = ["cut-off-1", "cut-off-2"]
    perdure.apply(place, *(agent_run(name, "waiter", {}) for name in (*names, "cut-off-late")))
    for name in (*names, "cut-off-late"):
        perdure.until_phase(name, place, "Suspended")
    records.until_warm("waiter", 2)
    records.until_warm("sleeper")
    perdure.apply(place, agent_run("cut-off-naps", "sleeper", {"seconds": 12}), agent_run("cut-off-works", "stepper", {"count": 200}))
    perdure.until_phase("cut-off-naps", place, "Suspended")
    records.until_at_work("cut-off-works")
    # Gateways know for ten seconds what somebody may do; from then on they cannot say it, and say that.
    for gateway in inside.gateways:
        inside.signal("cut-off-late", "other", gateway=gateway)
    perdure.cluster.stop_apiserver()
    stopped = time.monotonic()
    try:
        for name, gateway in zip(names, inside.gateways, strict=True):
            inside.signal(name, "go", name, gateway=gateway)
        for name in names:
            perdure.until(f"{name} has ended", lambda name=name: records.column(name, "state") == "Succeeded", 15)
        perdure.until("a timer has woken its run", lambda: records.column("cut-off-naps", "state") == "Succeeded", 30)
        time.sleep(max(0.0, stopped + OUTAGE_SECONDS - time.monotonic()))
        with pytest.raises(ClusterError, match="returned error: 503"):
            inside.signal("cut-off-late", "go", "late", gateway=inside.gateways[0])
        assert records.is_running("cut-off-works")
    finally:
        perdure.cluster.start_apiserver()
    for name in (*names, "cut-off-naps"):
        perdure.until_phase(name, place, "Succeeded")
    assert perdure.run("cut-off-1", place)["status"]["result"]["payload"] == "cut-off-1"
    inside.insist("cut-off-late", "go", "late", key="late")
    assert perdure.until_phase("cut-off-late", place, "Succeeded")["status"]["result"]["payload"] == "late"
    assert perdure.until_phase("cut-off-works", place, "Succeeded")["status"]["result"] == {"steps": 200, "attempt": 1}
    perdure.apply(place, agent_run("afterwards", "cold", {}))
    perdure.until_phase("afterwards", place, "Suspended")
