"""Triggers on a real cluster: one run a tick, whatever dies at that moment, and nothing at all for whoever may not fire."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import signal
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.e2e.installation import NAMESPACE, PODS, RUNS, TRIGGERS, Installation, pool

Json = dict[str, Any]

SECRET = "s3cret-of-the-sender"


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    perdure.apply(
        place,
        pool("quick", ["python", "agents.py", "worker"], idle=1, reuse=True),
        pool("patient", ["python", "agents.py", "waiter"]),
    )


def trigger(name: str, source: Json, pool_name: str = "quick", **spec: Any) -> Json:
    run = {"agent": {"poolRef": {"name": pool_name}}, "input": {"seconds": 0}}
    body = {"source": source, "runTemplate": {"spec": run}, **spec}
    return {"apiVersion": "perdure.dev/v1alpha1", "kind": "Trigger", "metadata": {"name": name}, "spec": body}


def deliveries(perdure: Installation, place: str, name: str) -> list[Json]:
    """All of them, the oldest first, with the number of runs that each has."""
    return list(
        json.loads(
            perdure.sql(
                "select coalesce(json_agg(json_build_object('state', d.state, 'at', extract(epoch from d.fire_at), 'run', r.name, "
                "'phase', r.state, 'message', d.message, 'runs', (select count(*) from perdure.runs o where o.run_id = d.run_id)) "
                "order by d.fire_at), '[]') from perdure.deliveries d left join perdure.runs r using (run_id) "
                f"where d.trigger_key = '{place}/{name}'"
            )
        )
    )


def runs_of(perdure: Installation, place: str, name: str) -> list[str]:
    """Whichever delivery they name, and whether they name one at all."""
    return perdure.sql(f"select name from perdure.runs where namespace = '{place}' and name like '{name}-%'").split()


def resources_of(perdure: Installation, place: str, name: str) -> list[str]:
    return [run["metadata"]["name"] for run in perdure.all(RUNS, place) if run["metadata"]["name"].startswith(f"{name}-")]


def stop(perdure: Installation, place: str, name: str) -> None:
    """No more firings; what was not decided waits."""
    perdure.cluster.kubectl("patch", "trigger", name, "-n", place, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    suspended = f"select suspended from perdure.triggers where trigger_key = '{place}/{name}'"
    perdure.until("the store knows", lambda: perdure.sql(suspended) == "t")


def each_tick_has_one_run(perdure: Installation, place: str, name: str, *, every: int, until: float) -> list[float]:
    """The instants up to ``until``: each with one delivery, each of these with one run, and there is no other run."""

    def decided() -> list[Json]:
        found = [delivery for delivery in deliveries(perdure, place, name) if delivery["at"] <= until]
        return found if all(delivery["state"] == "DONE" for delivery in found) else []

    found = perdure.until("all of them are decided", decided)
    instants = [delivery["at"] for delivery in found]
    assert instants == [instants[0] + every * n for n in range(len(found))], "a tick is missing, or has two deliveries"
    assert instants[-1] > until - every
    assert [delivery["runs"] for delivery in found] == [1] * len(found)
    assert len({delivery["run"] for delivery in found}) == len(found)
    runs = runs_of(perdure, place, name)
    assert len(runs) == len(set(runs))
    assert set(runs) <= {delivery["run"] for delivery in deliveries(perdure, place, name)}
    return instants


# ------------------------------------------------------------------------------------------------------------ the clock


def gateways(perdure: Installation) -> list[str]:
    return [pod["metadata"]["name"] for pod in perdure.all(PODS, NAMESPACE, labels="app.kubernetes.io/component=gateway")]


def process(perdure: Installation, pod: str, container: str) -> int:
    """Its pid on this machine, found beforehand: the kill itself is to meet an instant. (SIGCONT does nothing to what runs.)"""
    return perdure.cluster.kill_container_process(pod, container, signal.SIGCONT, namespace=NAMESPACE)


def next_tick(perdure: Installation, place: str, name: str) -> float:
    return float(perdure.sql(f"select extract(epoch from next_at) from perdure.triggers where trigger_key = '{place}/{name}'"))


def kill_at(instant: float, *pids: int) -> None:
    time.sleep(max(0.0, instant - time.time()))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def all_ready(perdure: Installation) -> None:
    for what in ("operator", "gateway"):
        perdure.cluster.kubectl("rollout", "status", f"deployment/perdure-{what}", "-n", NAMESPACE, "--timeout=90s", seconds=100)


def test_each_tick_has_one_run_while_both_gateways_die_at_one(perdure: Installation, place: str) -> None:
    seconds = 4
    source = {"interval": {"seconds": seconds}}
    perdure.apply(place, trigger("pulse", source, catchUp={"policy": "All", "limit": 1000}))
    perdure.until("it fires", lambda: len(deliveries(perdure, place, "pulse")) >= 2)
    pids = [process(perdure, pod, "gateway") for pod in gateways(perdure)]
    assert len(pids) == 2
    at = next_tick(perdure, place, "pulse")
    if at - time.time() < 0.2:
        at += seconds
    kill_at(at, *pids)
    all_ready(perdure)
    restored = time.time()
    perdure.until("it fires again", lambda: deliveries(perdure, place, "pulse")[-1]["at"] > restored + seconds)
    assert at in each_tick_has_one_run(perdure, place, "pulse", every=seconds, until=restored)
    stop(perdure, place, "pulse")
    perdure.until("all runs end", lambda: {d["phase"] for d in deliveries(perdure, place, "pulse") if d["run"]} == {"Succeeded"})
    perdure.until("three resources are kept", lambda: len(resources_of(perdure, place, "pulse")) == 3)


def test_a_minute_has_one_run_though_leader_and_gateway_die_at_its_first_instant(perdure: Installation, place: str) -> None:
    perdure.apply(place, trigger("minute", {"schedule": {"cron": "* * * * *"}}))
    perdure.until("it is known", lambda: perdure.sql(f"select 1 from perdure.triggers where trigger_key = '{place}/minute'"))
    pids = [process(perdure, perdure.leader(), "operator"), process(perdure, gateways(perdure)[0], "gateway")]
    at = next_tick(perdure, place, "minute")
    assert at % 60 == 0
    kill_at(at, *pids)
    name = f"minute-{datetime.fromtimestamp(at, UTC):%Y%m%dt%H%M%Sz}"
    perdure.until_phase(name, place, "Succeeded")
    assert each_tick_has_one_run(perdure, place, "minute", every=60, until=at) == [at]
    assert perdure.run(name, place)["metadata"]["annotations"]["perdure.dev/scheduled-at"] == f"{datetime.fromtimestamp(at, UTC):%FT%TZ}"
    stop(perdure, place, "minute")
    all_ready(perdure)


def test_a_suspended_run_has_not_ended(perdure: Installation, place: str) -> None:
    perdure.apply(place, trigger("single", {"interval": {"seconds": 2}}, "patient", concurrencyPolicy="Forbid"))
    [first] = perdure.until("it has fired", lambda: resources_of(perdure, place, "single"))
    perdure.until_phase(first, place, "Suspended")

    def skipped() -> list[Json]:
        return [delivery for delivery in deliveries(perdure, place, "single") if delivery["runs"] == 0 and delivery["state"] == "DONE"]

    perdure.until("three firings find it suspended", lambda: len(skipped()) >= 3)
    assert perdure.run(first, place)["status"]["phase"] == "Suspended"
    assert len(runs_of(perdure, place, "single")) == 1
    assert resources_of(perdure, place, "single") == [first]
    assert all(delivery["message"] for delivery in skipped())

    perdure.signal(first, place, "go")
    perdure.until_phase(first, place, "Succeeded")
    perdure.until("the next one has its turn", lambda: len(runs_of(perdure, place, "single")) == 2)
    stop(perdure, place, "single")
    assert len(runs_of(perdure, place, "single")) == 2


# ------------------------------------------------------------------------------------------------------------- webhooks


@pytest.fixture(scope="module")
def hook(perdure: Installation, place: str) -> str:
    """The path of a webhook whose key the gateway may read, as docs/triggers.md says."""
    perdure.cluster.kubectl("create", "secret", "generic", "orders-hook", "-n", place, f"--from-literal=secret={SECRET}")
    perdure.cluster.kubectl(
        "create", "role", "perdure-hooks", "-n", place, "--verb=get", "--resource=secrets", "--resource-name=orders-hook"
    )
    perdure.cluster.kubectl(
        "create", "rolebinding", "perdure-hooks", "-n", place, "--role=perdure-hooks", f"--serviceaccount={NAMESPACE}:perdure-gateway"
    )
    auth = {"hmac": {"secretRef": {"name": "orders-hook", "key": "secret"}}}
    perdure.apply(place, trigger("orders", {"webhook": {"auth": auth, "idHeader": "X-Delivery"}}))
    url = perdure.until("it says where it is", lambda: ((perdure.get(TRIGGERS, "orders", place) or {}).get("status") or {}).get("url"))
    return str(url).partition(f".{NAMESPACE}.svc")[2]


def post(perdure: Installation, path: str, body: Json, *, key: str = SECRET, **headers: str) -> tuple[int, Json]:
    raw = json.dumps(body)
    signed = {"X-Hub-Signature-256": "sha256=" + hmac.new(key.encode(), raw.encode(), hashlib.sha256).hexdigest()}
    return perdure.request("POST", path, raw, **(signed | headers))


def test_a_signed_request_makes_a_run_and_the_same_delivery_no_second_one(perdure: Installation, place: str, hook: str) -> None:
    status, first = post(perdure, hook, {"seconds": 0, "order": 7}, **{"X-Delivery": "d-7"})
    assert (status, first["duplicate"]) == (202, False)
    again = [post(perdure, hook, {"seconds": 0, "order": 7}, **{"X-Delivery": "d-7"}) for _ in range(2)]
    assert again == [(202, {"delivery": first["delivery"], "duplicate": True})] * 2
    [name] = perdure.until("its run has a resource", lambda: resources_of(perdure, place, "orders"))
    assert perdure.until_phase(name, place, "Succeeded")["spec"]["input"] == {"seconds": 0, "order": 7}
    assert post(perdure, hook, {"seconds": 0, "order": 8}, **{"X-Delivery": "d-8"})[1]["duplicate"] is False
    perdure.until("another delivery has another run", lambda: len(runs_of(perdure, place, "orders")) == 2)
    assert [delivery["runs"] for delivery in deliveries(perdure, place, "orders")] == [1, 1]


@pytest.mark.parametrize(
    ("key", "headers"),
    [("another key", {}), (SECRET, {"X-Hub-Signature-256": ""}), (SECRET, {"X-Hub-Signature-256": "sha256=" + "0" * 64})],
    ids=["wrong key", "no signature", "made up"],
)
def test_a_request_that_is_not_signed_stores_nothing(
    perdure: Installation, place: str, hook: str, key: str, headers: dict[str, str]
) -> None:
    def stored() -> tuple[list[str], str]:
        runs = [delivery["run"] for delivery in deliveries(perdure, place, "orders")]
        return runs, perdure.sql("select count(*) from perdure.deliveries where source = 'webhook'")

    before = stored()
    status, answer = post(perdure, hook, {"seconds": 0}, key=key, **{"X-Delivery": "forged", **headers})
    assert status == 401
    assert "not signed with this webhook's secret" in answer["detail"]
    assert stored() == before


# --------------------------------------------------------------------------------------------------------------- by hand


def test_who_may_edit_fires_by_hand_and_who_may_view_does_not(perdure: Installation, place: str) -> None:
    perdure.apply(place, trigger("asked", {"manual": {}}))
    perdure.until("it is known", lambda: perdure.sql(f"select 1 from perdure.triggers where trigger_key = '{place}/asked'"))
    path = f"/v1/namespaces/{place}/triggers/asked/emit"
    perdure.cluster.kubectl("create", "serviceaccount", "onlooker", "-n", place)
    perdure.cluster.kubectl("create", "rolebinding", "onlooker", "-n", place, "--clusterrole=view", f"--serviceaccount={place}:onlooker")
    status, answer = perdure.request("POST", path, '{"seconds": 0}', token=perdure.token(place, "onlooker"))
    assert (status, "may not create triggers/emit.perdure.dev" in answer["detail"]) == (403, True), answer
    assert deliveries(perdure, place, "asked") == []

    tester = perdure.token(place, "tester")
    answers = [perdure.request("POST", path, '{"seconds": 0}', token=tester, **{"Idempotency-Key": "mine"}) for _ in range(2)]
    assert [(status, answer.get("duplicate")) for status, answer in answers] == [(202, False), (202, True)], answers
    [name] = perdure.until("its run has a resource", lambda: resources_of(perdure, place, "asked"))
    perdure.until_phase(name, place, "Succeeded")
    assert len(runs_of(perdure, place, "asked")) == 1
