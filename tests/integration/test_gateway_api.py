"""The public API as programs use it: create once, find again, page, follow, signal once."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import UNSET, Raw
from tests.harness.api import Api, Refused
from tests.harness.cluster import POOL, Cluster
from tests.harness.pods import signal

from perdure import protocol as wire
from perdure_operator.store.store import Store


def body(name: str | None = None, **spec: Any) -> dict[str, Any]:
    return {**({"name": name} if name else {}), "spec": {"agent": {"poolRef": {"name": "p"}}, **spec}}


# --------------------------------------------------------------------------------------------------------------- create


async def test_a_key_makes_one_run_however_often_it_is_sent(cluster: Cluster) -> None:
    apis = [cluster.api(gateway) for gateway in await cluster.start("a", "b")]
    views = await asyncio.gather(*(apis[n % 2].call("POST", "/runs", body(input={"n": 1}), key="once") for n in range(12)))
    assert len({view["runId"] for view in views}) == 1
    other = await apis[0].call("POST", "/runs", body(), key="another")
    assert other["runId"] != views[0]["runId"]
    # A batch has a key for each of its runs, and gets all of them back.
    batches = await asyncio.gather(*(apis[n % 2].call("POST", "/runs", {"runs": [body(), body()]}, key="both") for n in range(6)))
    assert len({tuple(view["runId"] for view in batch["items"]) for batch in batches}) == 1
    assert await cluster.pg.fetchval("select count(*) from perdure.runs") == 4


async def test_a_taken_name_refuses_the_whole_batch(cluster: Cluster) -> None:
    _, api = await cluster.one()
    await api.create("taken")
    with pytest.raises(Refused, match="name-taken"):
        await api.call("POST", "/runs", body("taken"))
    with pytest.raises(Refused, match="name-taken") as refused:
        await api.call("POST", "/runs", {"runs": [body("new"), body("taken")]})
    assert "Idempotency-Key" in refused.value.problem.action
    assert await cluster.pg.fetchval("select count(*) from perdure.runs") == 1
    with pytest.raises(Refused, match="name-taken"):
        await api.call("POST", "/runs", {"runs": [body("twice"), body("twice")]})
    # The same name in another namespace is another run.
    other = cluster.api(api.gateway, namespace="elsewhere")
    await other.call("PUT", "/pools/p", {"spec": POOL})
    await other.create("taken")


async def test_a_pool_made_at_another_gateway_is_known_at_once(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    await cluster.api(a).call("PUT", "/pools/fresh", {"spec": POOL})
    await cluster.api(b).create("run", pool="fresh")
    pools = await cluster.api(b).call("GET", "/pools")
    assert {item["pool"]: item["runnable"] for item in pools["items"]} == {"default/fresh": 1, "default/p": 0}
    pod = await cluster.holder(a, pool="default/fresh")
    await cluster.api(b).call("PUT", "/pools/fresher", {"spec": POOL})
    await pod.spawn("spawn:c#0", pool="fresher")


# ----------------------------------------------------------------------------------------------------------------- read


async def pages(api: Api, query: str, limit: int) -> list[list[str]]:
    found, after = [], ""
    while True:
        page = await api.call("GET", f"/runs?limit={limit}{query}{after}")
        found.append([item["name"] for item in page["items"]])
        if page["next"] is None:
            return found
        after = f"&after={page['next']}"


async def test_paging_and_filters(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    names = [f"r{n:02}" for n in range(25)]
    await api.create_many(names)
    found = await pages(api, "", 10)
    assert [len(page) for page in found] == [10, 10, 5]
    everything = [name for page in found for name in page]
    assert sorted(everything) == names
    first = await api.call("GET", "/runs?limit=10")
    await api.create("later")
    rest = await api.call("GET", f"/runs?limit=100&after={first['next']}")
    assert [item["name"] for item in rest["items"]] == [*everything[10:], "later"]  # what comes in between is not missed

    pod = await cluster.holder(gateway)
    assert await pages(api, "&state=Running", 10) == [[pod.context.name if pod.context else ""]]
    kid = await pod.spawn("spawn:c#0")
    assert [item["runId"] for item in (await api.call("GET", f"/runs?parent={pod.run}"))["items"]] == [kid]
    assert (await api.call("GET", "/runs?pool=default/nothing"))["items"] == []
    elsewhere = cluster.api(gateway, namespace="elsewhere")
    assert (await elsewhere.call("GET", "/runs"))["items"] == []
    everywhere = cluster.api(gateway, namespace="-")
    assert len((await everywhere.call("GET", "/runs?limit=1000"))["items"]) == 27
    assert (await everywhere.view(kid)).parent == pod.run
    with pytest.raises(Refused, match="run-not-found"):
        await elsewhere.view(kid)


async def test_what_a_run_shows_of_itself(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create("shown", summary="a summary", objective="an objective", input={"n": [1, 2]})
    pod = await cluster.holder(gateway)
    kid = await pod.spawn("spawn:c#0")
    await pod.step("step:s#0")
    begun = await pod.op(wire.ActivityBegin(tool="send_mail"))
    await pod.op(wire.ActivityEnd(key=begun["key"], token=begun["token"], state="unknown"))
    await pod.wait("wait:go#0", signal("go"), wire.Condition(kind="child_done", name=kid), mode="all")
    view = await api.view("shown")
    assert view == await api.view(run)
    assert (view.summary, view.objective, view.steps) == ("a summary", "an objective", 1)
    assert view.input == {"n": [1, 2]}
    assert "agent" in view.spec
    assert "input" not in view.spec
    assert view.children == {"active": 1, "succeeded": 0, "failed": 0}
    assert [(w["kind"], w["name"]) for w in view.waiting_for] == [("signal", "go"), ("child_done", kid)]
    why = await api.call("GET", f"/runs/{run}/why")
    assert (why["state"], why["reason"], why["message"]) == ("Suspended", "Waiting", "waits for child_done, signal go")
    tree = await api.call("GET", f"/runs/{run}/tree")
    assert (tree["run"]["runId"], [item["runId"] for item in tree["descendants"]]) == (run, [kid])
    journal = (await api.call("GET", f"/runs/{run}/journal"))["items"]
    assert [(item["kind"], item.get("output", "none")) for item in journal] == [("spawn", "none"), ("step", 1), ("wait", "none")]
    [entry] = (await api.call("GET", f"/runs/{run}/ledger"))["items"]
    assert (entry["tool"], entry["state"]) == ("send_mail", "UNKNOWN")
    assert "response" not in entry
    first = await api.call("GET", f"/runs/{run}/events?limit=3")
    second = await api.call("GET", f"/runs/{run}/events?from={first['next']}")
    seqs = [event["seq"] for event in first["items"] + second["items"]]
    assert (seqs, second["next"]) == (list(range(1, view.last_seq + 1)), None)


async def test_lists_and_trees_show_results_and_ledgers_receipts(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    small, large = await api.create("small"), await api.create("large")
    for output in (b'{"pages": 3}', b'"' + b"x" * 5000 + b'"'):
        pod = await cluster.holder(gateway)
        begun = await pod.get(wire.ActivityDecision, wire.ActivityBegin(tool="send_mail"))
        await pod.op(wire.ActivityEnd(key=begun.key, token=begun.token or "", state="succeeded", response=Raw(output)))
        await pod.finish(output=output)
    listed = {item["name"]: item for item in (await api.call("GET", "/runs"))["items"]}
    assert listed["small"]["result"] == {"pages": 3}
    assert "result" not in listed["large"], "left out is not the same as null"
    assert len((await api.view(large)).result) == 5000
    assert (await api.call("GET", f"/runs/{small}/tree"))["run"]["result"] == {"pages": 3}
    ledgers = [(await api.call("GET", f"/runs/{run}/ledger"))["items"][0] for run in (small, large)]
    assert [entry.get("response") for entry in ledgers] == [{"pages": 3}, None]


async def test_ids_beyond_the_integers_of_a_double_tell_effects_apart(cluster: Cluster) -> None:
    """The first two are one and the same double; the last ones need more than 64 bits."""
    gateway, api = await cluster.one()
    run = await api.create("snowflakes")
    pod = await cluster.holder(gateway)
    ids = [1152921504606846977, 1152921504606846978, 2**64 + 1, 2**64 + 2]
    keys = []
    for id in ids:
        begun = await pod.get(wire.ActivityDecision, wire.ActivityBegin(tool="post", arguments=Raw(b'{"channel": %d}' % id)))
        assert begun.decision == "execute"
        await pod.op(wire.ActivityEnd(key=begun.key, token=begun.token or "", state="succeeded", response=Raw(b"%d" % id)))
        keys.append(begun.key)
    assert len(set(keys)) == len(ids)
    for id, key in zip(ids, keys, strict=True):
        again = await pod.get(wire.ActivityDecision, wire.ActivityBegin(tool="post", arguments=Raw(b'{"channel": %d}' % id)))
        assert (again.decision, again.key) == ("receipt", key)
        assert again.response is not UNSET
        assert bytes(again.response) == b"%d" % id
    assert [entry["response"] for entry in (await api.call("GET", f"/runs/{run}/ledger"))["items"]] == ids


async def test_why_asks_a_person_what_became_of_a_call_and_takes_only_an_answer(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create("doubtful")
    pod = await cluster.holder(gateway)
    begin = wire.ActivityBegin(tool="send_mail", arguments=Raw(b'{"to": "ann"}'), on_unknown="ask")
    begun = await pod.get(wire.ActivityDecision, begin)
    error = wire.ErrorInfo(type="ConnectionError", message="it broke")
    await pod.op(wire.ActivityEnd(key=begun.key, token=begun.token or "", state="unknown", error=error))
    name = wire.question(begun.key, 1)
    await pod.wait("wait:effect=1", signal(name))
    signals_only = cluster.api(gateway, verbs=["get", "signal"])
    with pytest.raises(Refused, match="tester may not answer"):
        await signals_only.call("POST", f"/runs/{run}/signals/{name}", {"happened": False})
    [shown] = (await api.view(run)).waiting_for
    assert (shown["name"], shown["tool"]) == (name, "send_mail")
    [wait] = (await api.call("GET", f"/runs/{run}/why"))["waitingFor"]
    call = wait["call"]
    assert (call["key"], call["tool"], call["arguments"], call["attempts"]) == (begun.key, "send_mail", {"to": "ann"}, 1)
    assert call["error"]["message"] == "it broke"
    for wrong in ("yes", None, {"happend": True}, {"happened": "true"}, {"happened": True, "respons": 1}):
        with pytest.raises(Refused, match=r"invalid-input.*happened"):
            await api.call("POST", f"/runs/{run}/signals/{name}", wrong)
    assert (await api.view(run)).state == "Suspended"
    await api.call("POST", f"/runs/{run}/signals/{name}", {"happened": True, "response": 1})
    assert (await api.view(run)).state != "Suspended"


async def test_why_says_that_a_signal_came_and_was_of_no_use(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    for name, reason in (("go", "first"), ("go", "Expected `int`, got `str`"), ("other", "of another")):
        said = {"signal": name, "id": "1", "payload": '"x"', "expected": "int", "reason": reason}
        await pod.op(wire.EventAppend(kind="SignalRejected", data=Raw(wire.encode_json(said))))
    await pod.wait("wait:go#0", signal("go"), timeout_seconds=3600.0)
    [wait] = (await api.call("GET", f"/runs/{run}/why"))["waitingFor"]
    assert wait["refused"]["reason"] == "Expected `int`, got `str`"
    assert wait["timeoutAt"] > wait["since"]


async def test_why_says_that_the_pools_pods_fail(cluster: Cluster, store: Store) -> None:
    _, api = await cluster.one()
    run = await api.create("stuck")
    assert (await api.view(run)).reason == "Queued"
    soon = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
    await store.tell_trouble("default/p", {"reason": "AgentExited", "message": "exit code 1", "lastWords": ["boom"], "nextTry": soon})
    why = await api.call("GET", f"/runs/{run}/why")
    assert why["reason"] == "PoolNotReady"
    assert re.fullmatch(r"queued, but pods of pool default/p fail: exit code 1; the next try is in \d+ s", why["message"])
    assert why["poolTrouble"]["lastWords"] == ["boom"]
    assert (await api.call("GET", "/pools"))["items"][0]["trouble"]["message"] == "exit code 1"
    await store.tell_trouble("default/p", None)
    assert (await api.view(run)).reason == "Queued"


async def test_why_says_a_pause_beside_a_wait(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create("paused")
    pod = await cluster.holder(gateway)
    await pod.wait("wait:go#0", signal("go"))
    await api.call("POST", f"/runs/{run}/pause")
    why = await api.call("GET", f"/runs/{run}/why")
    assert (why["state"], why["pausedBy"], why["message"]) == ("Suspended", ["person"], "paused; resume it to go on")
    assert [wait["name"] for wait in why["waitingFor"]] == ["go"]


# --------------------------------------------------------------------------------------------------------------- follow


async def test_a_tail_goes_on_where_it_was_cut_and_ends_with_the_run(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    run = await cluster.api(a).create()
    pod = await cluster.holder(a)
    await pod.step("step:s#0", b'{"text":"' + b"x" * 3000 + b'"}')
    seen = await cluster.api(a).tail_of(run, 3)
    assert [event.id for event in seen] == ["1", "2", "3"]
    live = asyncio.create_task(collect(cluster.api(b), run, last_event_id=seen[1].id))
    await pod.op(wire.EventAppend(kind="note", data=Raw(b'{"big":"' + b"y" * 3000 + b'"}')))
    await pod.finish(output=b'"done"')
    events = await asyncio.wait_for(live, 10)
    assert [(event.event, event.id) for event in events] == [
        ("step.succeeded", "3"),
        ("agent.note", "4"),
        ("run.succeeded", "5"),
        ("end", ""),
    ]
    assert events[1].data["payload"] == {"big": "y" * 3000}
    assert events[-1].data == {"state": "Succeeded"}
    # A tail of a run that has ended is its log, and ends at once; from a place behind the end it is the end alone.
    assert len(await collect(cluster.api(a), run)) == 6
    assert [event.event for event in await collect(cluster.api(a), run, last_event_id="5")] == ["end"]
    assert [event.event for event in await collect(cluster.api(a), run, start=100)] == ["end"]


async def collect(api: Api, run: str, **options: Any) -> list[Any]:
    return [event async for event in api.tail(run, **options)]


async def test_a_reader_that_goes_away_is_no_error(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    pod = await cluster.holder(gateway)
    await api.tail_of(run, 2)
    for n in range(3):
        await pod.step(f"step:s#{n}")
    await api.tail_of(run, 5)
    await pod.finish()
    assert gateway.errors() == []


# --------------------------------------------------------------------------------------------------------------- signal


async def test_a_signal_is_taken_once_under_its_key(cluster: Cluster) -> None:
    apis = [cluster.api(gateway) for gateway in await cluster.start("a", "b")]
    run = await apis[0].create()
    answers = await asyncio.gather(*(apis[n % 2].signal(run, "go", n, key="once") for n in range(10)))
    assert len({answer["seq"] for answer in answers}) == 1
    assert [answer["duplicate"] for answer in answers].count(False) == 1
    assert await cluster.pg.fetchval("select count(*) from perdure.wakeups") == 1
    # The same key for another name is another signal; no key is always another one.
    assert (await apis[0].signal(run, "stop", key="once"))["duplicate"] is False
    plain = [await apis[0].signal(run, "go") for _ in range(2)]
    assert plain[0]["id"] != plain[1]["id"]
    assert await cluster.pg.fetchval("select count(*) from perdure.wakeups") == 4


async def test_names_and_keys_with_slashes_are_different_signals(cluster: Cluster) -> None:
    _, api = await cluster.one()
    run = await api.create()
    first = await api.signal(run, "a%2Fb", key="c")
    second = await api.signal(run, "a", key="b/c")
    assert first["seq"] != second["seq"]
    names = await cluster.pg.fetch("select name, id from perdure.wakeups order by seq")
    assert [tuple(row) for row in names] == [("a/b", "c"), ("a", "b/c")]


async def test_health(cluster: Cluster) -> None:
    gateway, _ = await cluster.one()
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
        assert await gateway.answers(path), path
