"""Two real gateways at one tick: one run, which a pod gets with the reason of its start."""

from __future__ import annotations

from datetime import datetime, timedelta

from tests.harness.cluster import Cluster
from tests.harness.postgres import move_clock
from tests.harness.triggers import MANUAL, Bench, every


async def test_two_gateways_at_the_tick_make_one_run(cluster: Cluster) -> None:
    a, b = await cluster.start("a", "b")
    bench = Bench(cluster.store, cluster.pg)
    await bench.put("beat", every(3600))
    found = []
    for gateway in (a, b):
        await move_clock(cluster.pg, 3600.5)  # before a pod connects, which would have been silent for an hour
        pod = await cluster.holder(gateway)
        assert pod.context is not None
        found.append(pod.context)
        assert await pod.finish() == "Succeeded"
    row = await bench.triggers.get("default/beat")
    assert row is not None
    assert row.fired_at is not None
    assert [context.name for context in found] == [f"beat-{row.fired_at - ago:%Y%m%dt%H%M%S}z" for ago in (timedelta(hours=1), timedelta())]
    [reason] = found[1].reasons
    assert (reason.kind, reason.name, datetime.fromisoformat(reason.at)) == ("start", "beat", row.fired_at)
    assert len(await bench.runs()) == 2


async def test_a_person_fires_at_one_gateway_and_it_runs(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    bench = Bench(cluster.store, cluster.pg)
    await bench.put("wish", MANUAL)
    pod = await cluster.pod(gateway)
    answer = await api.call("POST", "/triggers/wish/emit", {"a": 1}, key="k")
    assert (await api.call("POST", "/triggers/wish/emit", {"a": 1}, key="k"))["delivery"] == answer["delivery"]
    context = await pod.lease()
    assert bytes(context.input) == b'{"a":1}'
    [reason] = context.reasons
    assert (reason.kind, reason.name, reason.id) == ("start", "wish", answer["delivery"])
    assert await pod.finish() == "Succeeded"
