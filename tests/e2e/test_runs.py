"""AgentRuns on a real cluster: what a person sees with kubectl from apply to the end, and what becomes of runs when parts break."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Any

import pytest
from tests.cluster.audit import AuditLog
from tests.cluster.errors import ClusterError
from tests.e2e.installation import POOLS, RUNS, Installation, agent_run, pool

from perdure_operator.services.projector import WAKE_SECONDS

Json = dict[str, Any]

AGENT = ["python", "agents.py"]


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    perdure.apply(
        place,
        *(pool(name, [*AGENT, name]) for name in ("waiter", "sleeper", "worker", "parent", "breaker")),
        pool("warm", [*AGENT, "waiter"], idle=1),
        pool("fork", [*AGENT, "waiter"], idle=1, reuse=True),
    )


def truth(run: Json, kind: str) -> tuple[str, str]:
    [found] = [c for c in run["status"]["conditions"] if c["type"] == kind]
    return found["status"], found["reason"]


def no_workers(perdure: Installation, place: str, name: str) -> None:
    """None of this run's pods is left."""
    perdure.until(f"{name} has no pod", lambda: not perdure.workers_of(name, place))


# -------------------------------------------------------------------------------------------------------------- one life


def test_a_run_waits_without_a_pod_and_is_woken(perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("waits", "waiter", {"n": 1}, summary="waits for a signal"))
    suspended = perdure.until_phase("waits", place, "Suspended")
    assert suspended["status"]["waitReason"] == "signal go"
    no_workers(perdure, place, "waiter")
    table = perdure.cluster.kubectl("get", "agentruns", "waits", "-n", place)
    assert "Suspended" in table
    assert "signal go" in table
    described = perdure.cluster.kubectl("describe", "agentrun", "waits", "-n", place)
    assert "Started" in described
    assert "waits for signal go" in described

    first = perdure.signal("waits", place, "go", {"ok": True}, key="once")
    again = perdure.signal("waits", place, "go", {"ok": True}, key="once")
    assert (first["duplicate"], again["duplicate"]) == (False, True)
    perdure.cluster.kubectl("wait", "--for=condition=Succeeded", "agentrun/waits", "-n", place, "--timeout=60s", seconds=70)
    done = perdure.run("waits", place)
    assert done["status"]["result"]["payload"] == {"ok": True}
    assert truth(done, "Finished")[0] == "True"
    perdure.until("it may be deleted", lambda: not perdure.run("waits", place)["metadata"].get("finalizers"))


def test_a_timer_wakes(perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("sleeps", "sleeper", {"seconds": 4}))
    perdure.until_phase("sleeps", place, "Suspended")
    no_workers(perdure, place, "sleeper")
    assert perdure.until_phase("sleeps", place, "Succeeded")["status"]["result"] == "noted after"


def test_failure_ends_a_wait_for_the_end(perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("breaks", "breaker", {}, retry={"maxRetries": 0}))
    perdure.cluster.kubectl("wait", "--for=condition=Finished", "agentrun/breaks", "-n", place, "--timeout=60s", seconds=70)
    broken = perdure.run("breaks", place)
    assert broken["status"]["phase"] == "Failed"
    assert "cannot do anything" in json.dumps(broken["status"]["conditions"])


@pytest.mark.parametrize("pool_name", ["warm", "fork"])
def test_a_warm_pod_takes_the_wake(perdure: Installation, place: str, pool_name: str) -> None:
    name = f"wakes-{pool_name}"
    perdure.apply(place, agent_run(name, pool_name, {}))
    perdure.until_phase(name, place, "Suspended")
    perdure.until("a pod is warm", lambda: _idle(perdure, place, pool_name) >= 1)
    perdure.signal(name, place, "go")
    perdure.until_phase(name, place, "Succeeded")
    late = float(
        perdure.sql(
            "select extract(epoch from l.at - s.at) from perdure.events s join perdure.events l using (run_id) "
            "join perdure.runs r using (run_id) "
            f"where r.name = '{name}' and s.kind = 'signal.received' and l.kind = 'run.leased' and l.seq > s.seq limit 1"
        )
    )
    assert late < 0.5, f"leased {late:.3f} s after the signal: no warm pod took it"


def _idle(perdure: Installation, place: str, name: str) -> int:
    return int(perdure.sql(f"select count(*) from perdure.pods where pool = '{place}/{name}' and state = 'idle'"))


# -------------------------------------------------------------------------------------------------------------- families


def test_children_are_resources_and_their_end_wakes_the_parent(perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("family", "parent", {"levels": 1, "leaf": "0.1"}))
    assert perdure.until_phase("family", place, "Succeeded", 120)["status"]["result"] == "worked 0.1 s"
    [child] = [run for run in perdure.all(RUNS, place) if run["metadata"]["name"].startswith("family-")]
    assert child["metadata"]["ownerReferences"][0]["name"] == "family"
    assert child["status"]["phase"] == "Succeeded"


# -------------------------------------------------------------------------------------------------------------- what breaks


def test_a_worker_that_is_deleted_mid_step_is_replaced(perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("killed", "worker", {"seconds": 6}, retry={"backoffSeconds": 0}))
    pod = _at_work(perdure, place, "killed")
    perdure.delete("pod", pod, place, "--force", "--grace-period=0")
    done = perdure.until_phase("killed", place, "Succeeded", 120)
    assert done["status"]["result"]["attempt"] == 2
    steps = perdure.sql(
        "select count(*) from perdure.events e join perdure.runs r using (run_id) "
        f"where r.name = 'killed' and r.namespace = '{place}' and kind = 'step.succeeded' and data ->> 'name' like '%note%'"
    )
    assert steps == "1", "what was done was done again"


@pytest.mark.parametrize("container", ["agent", "perdure-sidecar"])
def test_a_killed_container_costs_an_attempt_and_no_step(perdure: Installation, place: str, container: str) -> None:
    name = f"struck-{container.removeprefix('perdure-')}"
    perdure.apply(place, agent_run(name, "worker", {"seconds": 4}, retry={"backoffSeconds": 0}))
    pod = _at_work(perdure, place, name)
    perdure.cluster.kill_container_process(pod, container, signal.SIGKILL, namespace=place)
    done = perdure.until_phase(name, place, "Succeeded", 120)
    assert done["status"]["result"]["first"] == "noted first"


def _at_work(perdure: Installation, place: str, name: str) -> str:
    """The pod of a run that has journaled its first step."""
    query = f"select r.steps from perdure.runs r where r.name = '{name}' and r.namespace = '{place}' and r.state = 'Running'"
    perdure.until(f"{name} has taken a step", lambda: perdure.sql(query) == "1")
    pod = perdure.until(f"{name} says its pod", lambda: (perdure.run(name, place).get("status") or {}).get("podName"))
    return str(pod)


def test_an_image_that_cannot_be_pulled_says_so(perdure: Installation, place: str) -> None:
    broken = pool("no-image", [*AGENT, "waiter"])
    broken["spec"]["template"]["spec"]["containers"][0] |= {"image": "perdure-e2e-missing:1", "imagePullPolicy": "Never"}
    perdure.apply(place, broken, agent_run("imageless", "no-image", {}))

    def says() -> bool:
        found = perdure.get(POOLS, "no-image", place) or {}
        return any(c["reason"] == "ErrImageNeverPull" for c in (found.get("status") or {}).get("conditions", []))

    perdure.until("the pool says why", says)
    perdure.until("and so does the run", lambda: truth(perdure.run("imageless", place), "PodScheduled") == ("False", "PoolNotReady"))
    assert perdure.run("imageless", place)["status"]["phase"] == "Pending"
    describe = ("describe", "agentrun", "imageless", "-n", place)
    perdure.until("its events too", lambda: "ErrImageNeverPull" in perdure.cluster.kubectl(*describe).partition("Events:")[2])
    perdure.delete("agentrun", "imageless", place)
    perdure.delete("agentpool", "no-image", place)


def test_the_leader_dies_and_the_other_leads(perdure: Installation, place: str) -> None:
    perdure.delete("pod", perdure.leader(), "perdure-system", "--force", "--grace-period=0")
    perdure.apply(place, agent_run("interregnum", "waiter", {}))
    perdure.until_phase("interregnum", place, "Suspended")
    perdure.signal("interregnum", place, "go")
    perdure.until_phase("interregnum", place, "Succeeded")


# -------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"agent": {"poolRef": {"name": "waiter"}, "template": {"spec": {"containers": [{"name": "agent", "image": "x"}]}}}},
            "exactly one of",
        ),
        ({"agent": {"poolRef": {"name": "waiter"}}, "frobnicate": 1}, "frobnicate"),
    ],
)
def test_what_is_wrong_is_refused_with_words(perdure: Installation, place: str, spec: Json, message: str) -> None:
    wrong = agent_run("wrong", "waiter") | {"spec": spec}
    with pytest.raises(ClusterError, match=message):
        perdure.apply(place, wrong)


def test_a_run_costs_the_apiserver_little(perdure: Installation, place: str) -> None:
    """From the audit log, by identity: so much a life and a suspension at most, however slow a machine is; none a step."""
    perdure.apply(place, *(pool(name, [*AGENT, name.partition("-")[0]]) for name in ("stepper-cost", "waiter-cost")))
    for name in ("stepper-cost", "waiter-cost"):
        perdure.until("the pools are known", lambda name=name: perdure.get(POOLS, name, place).get("status"))
    perdure.apply(place, agent_run("plain", "stepper-cost", {"count": 100, "seconds": 0.0}), agent_run("patient", "waiter-cost", {}))
    perdure.until_phase("patient", place, "Suspended")
    no_workers(perdure, place, "waiter-cost")
    perdure.signal("patient", place, "go")
    for name, pods in (("plain", "stepper-cost"), ("patient", "waiter-cost")):
        perdure.until_phase(name, place, "Succeeded")
        no_workers(perdure, place, pods)
        perdure.until(f"{name} is let go", lambda name=name: not perdure.run(name, place)["metadata"].get("finalizers"))

    def writes(*names: str) -> Counter[str]:
        found = AuditLog(perdure.cluster.audit_log).writes(place, by="system:serviceaccount:perdure-system:", names=names)
        print(names[0], dict(found))
        return found

    # Finalizer on and off; Pending, Running, Succeeded; events for the last two.
    life = Counter({"patch agentruns": 2, "create pods": 1, "delete pods": 1, "patch agentruns/status": 3, "create events": 2})
    # Suspended, Running again.
    suspension = Counter({"create pods": 1, "delete pods": 1, "patch agentruns/status": 2, "create events": 2})
    assert writes("plain", "stepper-cost-") <= life
    # On a machine so slow that the status says in between that a pod is awaited, that is one more.
    waited = perdure.sql(
        "select extract(epoch from max(e.at) filter (where e.kind = 'run.leased') - max(e.at) filter (where e.kind = 'run.woken')) "
        f"from perdure.events e join perdure.runs r using (run_id) where r.namespace = '{place}' and r.name = 'patient'"
    )
    late = Counter({"patch agentruns/status": int(float(waited) > WAKE_SECONDS)})
    assert writes("patient", "waiter-cost-") <= life + suspension + late
