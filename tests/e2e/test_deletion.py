"""Deleted and made anew: what becomes of runs when their resource goes, comes again, or takes its whole namespace along."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from tests.e2e.installation import RUNS, Installation, Json, agent_run, pool
from tests.e2e.records import Records

AGENT = ["python", "agents.py"]
POOLS = ("waiter", "worker", "stepper", "elder", "breaker")
LEAVES: list[Json] = [
    {"pool": "stepper", "input": {"count": 10_000}},
    {"pool": "waiter", "input": {}},
    {"pool": "closed", "input": {}},
    {"pool": "waiter", "input": {}, "recording": "StoreOnly"},
]
"""One at work, one that waits, one that gets no pod, one that is only a row."""


def all_pools() -> list[Json]:
    closed = pool("closed", [*AGENT, "waiter"])
    closed["spec"]["capacity"] = {"minIdle": 0, "maxPods": 0}
    return [closed, *(pool(name, [*AGENT, name]) for name in POOLS)]


@pytest.fixture(scope="module")
def records(perdure: Installation, place: str) -> Records:
    return Records(perdure, place)


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    perdure.apply(place, *all_pools())


def resources(perdure: Installation, place: str, prefix: str) -> list[str]:
    return [run["metadata"]["name"] for run in perdure.all(RUNS, place) if run["metadata"]["name"].startswith(prefix)]


# -------------------------------------------------------------------------------------------------------------- families


def settle_down(perdure: Installation, place: str, name: str) -> None:
    """A parent with three levels below it, every leaf in the state that it is to be struck in."""
    records = Records(perdure, place)
    perdure.apply(place, agent_run(name, "elder", {"levels": 2, "children": LEAVES}))
    # Three elders and two waiters.
    expected = Counter(Suspended=5, Running=1, Pending=1)
    perdure.until("all have taken their places", lambda: records.states(name) == expected, 150)
    perdure.until("all but one row are resources", lambda: len(resources(perdure, place, name)) == 6)
    perdure.until("one of them has a pod", lambda: len(perdure.workers(place)) == 1)


def nothing_left(perdure: Installation, place: str, name: str, runs: int) -> None:
    records = Records(perdure, place)
    perdure.until("all are cancelled", lambda: records.states(name) == Counter(Cancelled=runs), 60)
    perdure.until("their resources go", lambda: not resources(perdure, place, name), 60)
    perdure.until("their pods go", lambda: not perdure.workers(place), 60)


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_a_deleted_parent_takes_three_levels_along(perdure: Installation, place: str, cascade: str) -> None:
    name = f"dynasty-{cascade[:4]}"
    settle_down(perdure, place, name)
    started = time.monotonic()
    perdure.delete(RUNS, name, place, f"--cascade={cascade}", "--wait=true", "--timeout=30s")
    assert time.monotonic() - started < 20
    nothing_left(perdure, place, name, 7)


@pytest.mark.usefixtures("operators")
def test_a_deletion_that_nobody_saw_takes_three_levels_along(perdure: Installation, place: str, records: Records) -> None:
    settle_down(perdure, place, "abandoned")
    perdure.scale_operators(0)
    perdure.delete(RUNS, "abandoned", place, "--wait=false")
    assert perdure.run("abandoned", place)["metadata"]["deletionTimestamp"]
    assert records.unfinished("abandoned") == 7, "somebody has seen the deletion"
    perdure.scale_operators(2)
    nothing_left(perdure, place, "abandoned", 7)


def test_orphans_live_on(perdure: Installation, place: str, records: Records) -> None:
    perdure.apply(place, agent_run("late-parent", "elder", {"levels": 0, "children": [{"pool": "waiter", "input": {}}]}))
    perdure.until("the child waits", lambda: records.states("late-parent") == Counter(Suspended=2), 120)
    perdure.until("and has a resource", lambda: len(resources(perdure, place, "late-parent")) == 2)
    [child] = [name for name in resources(perdure, place, "late-parent") if name != "late-parent"]
    assert perdure.run(child, place)["metadata"]["ownerReferences"]
    perdure.delete(RUNS, "late-parent", place, "--cascade=orphan", "--wait=true", "--timeout=30s")
    perdure.until("the parent is cancelled", lambda: records.column("late-parent", "state") == "Cancelled")
    assert not perdure.run(child, place)["metadata"].get("ownerReferences")
    perdure.signal(child, place, "go", "still here")
    assert perdure.until_phase(child, place, "Succeeded")["status"]["result"]["payload"] == "still here"


# -------------------------------------------------------------------------------------------------------------- again


@pytest.mark.usefixtures("operators")
def test_what_came_and_went_without_operators_leaves_nothing(perdure: Installation, place: str, records: Records) -> None:
    perdure.scale_operators(0)
    perdure.apply(place, agent_run("mayfly", "waiter", {}))
    perdure.delete(RUNS, "mayfly", place, "--wait=true", "--timeout=30s")
    perdure.apply(place, agent_run("witness", "worker", {"seconds": 0.1}))
    perdure.scale_operators(2)
    perdure.until_phase("witness", place, "Succeeded")
    assert records.states("mayfly") == Counter()
    assert perdure.get(RUNS, "mayfly", place) is None
    perdure.until("no pod is left", lambda: not perdure.workers(place))


def test_the_same_name_waits_for_the_end_of_the_old_run(perdure: Installation, place: str, records: Records) -> None:
    # Its one step hears nothing of a cancel: it ends when the grace is over.
    perdure.apply(place, agent_run("phoenix", "worker", {"seconds": 600}, terminationGracePeriodSeconds=8))
    old_pod = records.until_at_work("phoenix")
    old = records.column("phoenix", "run_id")
    perdure.delete(RUNS, "phoenix", place, "--wait=true", "--timeout=30s")
    perdure.apply(place, agent_run("phoenix", "worker", {"seconds": 0.1}))
    assert records.column("phoenix", "run_id, state") == f"{old}|Running", "the old one was to be at its end still"
    done = perdure.until_phase("phoenix", place, "Succeeded", 120)
    assert done["status"]["runID"] != old
    assert records.states("phoenix") == Counter(Cancelled=1, Succeeded=1)
    new = done["status"]["runID"]
    both = f"perdure.runs o, perdure.runs n where o.run_id = '{old}' and n.run_id = '{new}'"
    assert perdure.sql(f"select n.created_at >= o.finished_at from {both}") == "t", "two of one name were alive"
    perdure.until("the old pod is gone", lambda: old_pod not in perdure.workers(place))


def test_the_same_key_after_success_executes_nothing(perdure: Installation, place: str, records: Records) -> None:
    perdure.apply(place, agent_run("invoice", "worker", {"seconds": 0.1}, idempotencyKey="invoice-7"))
    first = perdure.until_phase("invoice", place, "Succeeded")["status"]
    perdure.delete(RUNS, "invoice", place, "--wait=true", "--timeout=30s")
    perdure.apply(place, agent_run("invoice-again", "worker", {"seconds": 0.1}, idempotencyKey="invoice-7"))
    again = perdure.until_phase("invoice-again", place, "Succeeded")["status"]
    assert (again["runID"], again["result"]) == (first["runID"], first["result"])
    assert records.states("invoice") == Counter(Succeeded=1)
    assert len(records.holders("invoice")) == 1


# -------------------------------------------------------------------------------------------------------------- namespaces


def test_a_namespace_goes_with_runs_in_every_state(perdure: Installation, namespace: str) -> None:
    records = Records(perdure, namespace)
    perdure.apply(
        namespace,
        *all_pools(),
        agent_run("house", "elder", {"levels": 1, "children": LEAVES}),
        agent_run("done", "worker", {"seconds": 0.1}),
        agent_run("failed", "breaker", {}, retry={"maxRetries": 0}),
        agent_run("cancelled", "waiter", {}, desiredState="Cancelled"),
    )
    expected = Counter(Suspended=4, Running=1, Pending=1, Succeeded=1, Failed=1, Cancelled=1)
    perdure.until("there is one in every state", lambda: records.states() == expected, 150)
    perdure.until("all but one row are resources", lambda: len(resources(perdure, namespace, "")) == 8)
    started = time.monotonic()
    perdure.cluster.kubectl("delete", "namespace", namespace, "--wait=true", "--timeout=90s", seconds=100)
    assert time.monotonic() - started < 60
    perdure.until("every run has ended", lambda: records.unfinished() == 0)
    assert records.states() == Counter(Cancelled=7, Succeeded=1, Failed=1)
    perdure.until("no pod is counted", lambda: perdure.sql(f"select count(*) from perdure.pods where pool like '{namespace}/%'") == "0")
