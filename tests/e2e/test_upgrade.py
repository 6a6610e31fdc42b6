"""Upgrade, uninstall, install again, with runs in flight: nothing is lost, and nothing is left that cannot be deleted.

This takes the shared installation away, for one whose database keeps its data, and puts it back at the end: whatever runs after these
tests finds what it expects.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.cluster.errors import ClusterError
from tests.cluster.paths import ROOT
from tests.e2e.installation import NAMESPACE, PODS, RELEASE, RUNS, Installation, agent_run, pool

Json = dict[str, Any]

NEXT = "e2e-next"
KEPT = ("quickstart.persistence.enabled=true", "quickstart.persistence.storageClassName=e2e")
CLAIM, VOLUME = f"data-{RELEASE}-postgres-0", "e2e-database"
POSTGRES_USER = 65532
FINALIZER = "perdure.dev/cancel"


@pytest.fixture(scope="module")
def kept(perdure: Installation, place: str) -> Iterator[Installation]:
    """Perdure anew, with data that outlive an uninstall."""
    perdure.tag_own(NEXT)
    perdure.uninstall()
    data = perdure.cluster.folder / "database"
    data.mkdir(mode=0o700)
    os.chown(data, POSTGRES_USER, POSTGRES_USER)
    spec = {"capacity": {"storage": "5Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "e2e", "hostPath": {"path": str(data)}}
    perdure.apply(NAMESPACE, {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": VOLUME}, "spec": spec})
    perdure.install(*KEPT)
    perdure.apply(place, *(few(name) for name in ("waiter", "sleeper", "worker", "stepper", "parent")))
    yield perdure
    perdure.uninstall()
    perdure.delete("pvc", CLAIM, NAMESPACE)
    perdure.delete("pv", VOLUME, NAMESPACE)
    shutil.rmtree(data)
    perdure.install()


def few(name: str) -> Json:
    """A pool of an agent of that name that leaves this machine something for the upgrade itself."""
    found = pool(name, ["python", "agents.py", name])
    found["spec"]["capacity"]["maxPods"] = 2
    return found


def states(perdure: Installation, place: str) -> dict[str, str]:
    rows = perdure.sql(f"select name || '=' || state from perdure.runs where namespace = '{place}'").split()
    return dict(row.split("=") for row in rows)


def redone(perdure: Installation, place: str) -> str:
    """Steps that were journaled more than once, and runs that had more than one attempt."""
    return perdure.sql(
        "select r.name, e.data ->> 'key' from perdure.events e join perdure.runs r using (run_id) "
        f"where r.namespace = '{place}' and e.kind = 'step.succeeded' group by 1, 2 having count(*) > 1"
    )


@contextmanager
def arriving(perdure: Installation, place: str) -> Iterator[list[str]]:
    """A run every few seconds, for as long as the block takes. Gives their names."""
    names: list[str] = []
    over = threading.Event()
    failures: list[ClusterError] = []

    def come() -> None:
        try:
            while not over.wait(6.0):
                name = f"arriving-{len(names)}"
                perdure.apply(place, agent_run(name, "worker", {"seconds": 0.1}))
                names.append(name)
        except ClusterError as error:
            failures.append(error)

    thread = threading.Thread(target=come, name="arriving")
    thread.start()
    try:
        yield names
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


def images(perdure: Installation) -> set[str]:
    """Of all that Perdure runs in its own namespace and that has not ended."""
    pods = perdure.all(PODS, NAMESPACE, fields="status.phase=Running")
    return {box["image"] for pod in pods if "deletionTimestamp" not in pod["metadata"] for box in pod["spec"]["containers"]}


def test_an_upgrade_loses_no_run(kept: Installation, place: str) -> None:
    kept.apply(
        place,
        *(agent_run(f"working-{n}", "stepper", {"count": 100, "seconds": 1}) for n in range(2)),
        agent_run("waiting", "waiter", {}),
        agent_run("sleeping", "sleeper", {"seconds": 25}),
        agent_run("family", "parent", {"levels": 1, "leaf": "30"}),
        agent_run("poolless", "not-yet", {"seconds": 0.1}),
    )
    for name in ("waiting", "sleeping", "family"):
        kept.until_phase(name, place, "Suspended")
    at_work = f"select count(*) from perdure.runs where namespace = '{place}' and name like 'working-%' and state = 'Running' and steps > 0"
    kept.until("two are at work", lambda: kept.sql(at_work) == "2")
    assert kept.run("poolless", place)["status"]["waitReason"] == "PoolNotFound"
    assert all(image.endswith(":e2e") for image in images(kept))

    with arriving(kept, place) as arrived:
        kept.cluster.helm(
            "upgrade", RELEASE, str(ROOT / "charts" / "perdure"), "-n", NAMESPACE, "--reset-then-reuse-values",
            "--set", f"image.tag={NEXT}", "--wait", "--timeout", "150s",
        )  # fmt: skip
    assert images(kept) == {f"perdure-{image}:{NEXT}" for image in ("operator", "postgres")}
    assert kept.sql(at_work) == "2", "the upgrade took longer than their work"
    assert len(arrived) >= 2

    kept.signal("waiting", place, "go")
    kept.apply(place, pool("not-yet", ["python", "agents.py", "worker"]))
    kept.cluster.kubectl("patch", "agentrun", "poolless", "-n", place, "--type=merge", "-p", '{"spec":{"priority":1}}')
    expected = {"working-0", "working-1", "waiting", "sleeping", "family", "poolless", *arrived}
    kept.until("all have ended", lambda: set(states(kept, place).values()) == {"Succeeded"} and expected <= set(states(kept, place)), 240)
    for name in expected:
        kept.until_phase(name, place, "Succeeded")
    assert redone(kept, place) == ""
    disturbed = f"select name, attempt, failures, losses from perdure.runs where namespace = '{place}' and (attempt > 1 or failures > 0)"
    assert kept.sql(disturbed) == ""


def test_an_uninstall_leaves_nothing_stuck_and_an_install_goes_on(kept: Installation, place: str, namespace: str) -> None:
    kept.prepare(namespace)
    kept.apply(namespace, *(few(name) for name in ("waiter", "worker")))
    kept.apply(place, agent_run("outlasting", "waiter", {}), agent_run("outworking", "worker", {"seconds": 60}))
    kept.apply(namespace, agent_run("doomed", "waiter", {}), agent_run("doomed-at-work", "worker", {"seconds": 120}))
    for name, where in (("outlasting", place), ("doomed", namespace)):
        kept.until_phase(name, where, "Suspended")
    for name, where in (("outworking", place), ("doomed-at-work", namespace)):
        kept.until_phase(name, where, "Running")
        first = f"select steps from perdure.runs where namespace = '{where}' and name = '{name}'"
        kept.until(f"{name} has taken a step", lambda first=first: kept.sql(first) == "1")
    assert FINALIZER in kept.run("outlasting", place)["metadata"]["finalizers"]

    kept.uninstall()
    definitions = kept.cluster.kubectl("get", "crd", "-o", "custom-columns=:.metadata.name", "--no-headers").split()
    assert {f"{kind}.perdure.dev" for kind in ("agentruns", "agentpools", "triggers")} <= set(definitions)
    runs = [*kept.all(RUNS, place), *kept.all(RUNS, namespace)]
    assert {"outlasting", "outworking", "doomed", "doomed-at-work"} <= {run["metadata"]["name"] for run in runs}
    assert [run["metadata"]["name"] for run in runs if run["metadata"].get("finalizers")] == []
    kinds = "pods,serviceaccounts,secrets,services,deployments,statefulsets,jobs,roles,rolebindings"
    left = ("get", kinds, "-A", "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    kept.until("nothing of the release is left", lambda: kept.cluster.kubectl(*left) == "")
    kept.cluster.kubectl("delete", "namespace", namespace, "--wait=true", "--timeout=100s", seconds=110)

    kept.install(*KEPT)
    kept.until("it holds what lives again", lambda: FINALIZER in (kept.run("outlasting", place)["metadata"].get("finalizers") or []))
    kept.signal("outlasting", place, "go", {"after": "all"})
    result = kept.until_phase("outlasting", place, "Succeeded")["status"]["result"]
    assert (result["first"], result["payload"], result["attempt"]) == ("noted before", {"after": "all"}, 1)
    assert kept.until_phase("outworking", place, "Succeeded", 200)["status"]["result"]["first"] == "noted first"
    assert redone(kept, place) == ""
    kept.until(
        "runs of the namespace that is gone are cancelled",
        lambda: states(kept, namespace) == {"doomed": "Cancelled", "doomed-at-work": "Cancelled"},
    )
