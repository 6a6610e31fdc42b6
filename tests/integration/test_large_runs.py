"""Runs that have written much: what a lease carries of them, how the rest is fetched, and what a gateway holds meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.harness.api import Api, Refused
from tests.harness.cluster import Cluster
from tests.harness.pods import FakePod, child, signal

from perdure import protocol as wire
from perdure_operator.store.context import LEAN
from perdure_operator.store.windows import WINDOW_BYTES

pytestmark = pytest.mark.slow
MB = 1024 * 1024


def noise(seed: int, size: int = 1_900_000) -> bytes:
    """JSON that does not compress."""
    return b'"' + random.Random(seed).randbytes(size // 2).hex().encode() + b'"'


def zeros(size: int = 1_990_000) -> bytes:
    return b'"' + b"0" * size + b'"'


async def again(cluster: Cluster, pod: FakePod, *, fetch: bool = True) -> FakePod:
    """The run's pod has gone; another one that fetches, or does not, gets the run."""
    await pod.cut()
    await cluster.store.pod_gone(pod.id, "PodDeleted")
    successor = cluster.new_pod()
    await successor.connect(cluster.gateways[0], successor.hello(fetch=fetch))
    await successor.lease()
    return successor


async def holding(cluster: Cluster, api: Api, name: str = "big", **spec: Any) -> FakePod:
    await api.create(name, **spec)
    pod = cluster.new_pod()
    await pod.connect(cluster.gateways[0], pod.hello(fetch=True))
    await pod.lease()
    return pod


def entries(pod: FakePod) -> dict[str, wire.JournalEntry]:
    assert pod.context is not None
    return {entry.key: entry for entry in pod.context.journal}


class Peak:
    """The most memory that a process has from here on."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before: int = self._process.memory_info().rss

    def grown(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        return peak - self._before


async def test_large_outputs_stay_behind_and_are_fetched_in_windows(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    pod = await holding(cluster, api)
    outputs = {f"step:s#{n}": noise(n) for n in range(38)} | {"step:small": b'{"a":1}'}
    for key, output in outputs.items():
        await pod.step(key, output)
    peak = Peak(gateway.pid)
    pod = await again(cluster, pod)
    found = entries(pod)
    assert found.keys() == outputs.keys()
    assert bytes(found["step:small"].output) == b'{"a":1}'
    assert not found["step:small"].fetch
    large = [key for key in outputs if key != "step:small"]
    assert all(found[key].fetch and bytes(found[key].output) == b"null" for key in large)
    windows = 0
    left = large
    while left:
        fetched = await pod.get(wire.Fetched, wire.Fetch(keys=left))
        assert 1 <= len(fetched.values) <= WINDOW_BYTES // 1_900_000
        assert [bytes(value) for value in fetched.values] == [outputs[key] for key in left[: len(fetched.values)]]
        left, windows = left[len(fetched.values) :], windows + 1
    assert windows == 19
    assert peak.grown() < 100 * MB
    assert await pod.finish() == "Succeeded"


async def test_much_that_is_small_stays_behind_too(cluster: Cluster) -> None:
    """Two megabytes in ninety-five bytes, a hundred and twenty times."""
    gateway, api = await cluster.one()
    pod = await holding(cluster, api)
    for n in range(120):
        await pod.step(f"step:bomb#{n}", zeros(1_990_000 + n))
    peak = Peak(gateway.pid)
    pod = await again(cluster, pod)
    assert all(entry.fetch for entry in entries(pod).values())
    fetched = await pod.get(wire.Fetched, wire.Fetch(keys=list(entries(pod))))
    assert [len(value) for value in fetched.values] == [1_990_002, 1_990_003]
    assert peak.grown() < 100 * MB
    assert await pod.finish() == "Succeeded"


async def test_the_index_of_a_long_journal_comes_in_pages(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    _, api = await cluster.one()
    pod = await holding(cluster, api)
    assert pod.run is not None
    count = (LEAN.entries or 0) + 5
    await cluster.pg.execute(
        "with r as (update perdure.runs set last_seq = last_seq + $2, steps = $2 where run_id = $1::text::uuid "
        "           returning run_id, epoch, last_seq - $2 as before), "
        "e as (insert into perdure.events (run_id, seq, epoch, at, kind, data) "
        "      select run_id, before + n, epoch, perdure.now(), 'step.succeeded', '{}' from r, generate_series(1, $2) n) "
        "insert into perdure.journal (run_id, key, kind, name, state, seq, epoch, output) "
        "select run_id, 'step:s#' || n, 'step', 's', 'succeeded', before + n, epoch, '\\x00'::bytea || convert_to(n::text, 'UTF8') "
        "from r, generate_series(1, $2) n",
        pod.run,
        count,
    )
    pod = await again(cluster, pod)
    assert pod.context is not None
    found = entries(pod)
    assert len(found) == LEAN.entries
    assert pod.context.journal_after is not None
    assert [entry.seq for entry in pod.context.journal] == sorted(entry.seq for entry in pod.context.journal)
    rest = await pod.get(wire.Fetched, wire.Fetch(after=pod.context.journal_after))
    assert not rest.more
    found |= {entry.key: entry for entry in rest.journal}
    assert {key: int(bytes(entry.output)) for key, entry in found.items()} == {f"step:s#{n}": n for n in range(1, count + 1)}

    whole = await again(cluster, pod, fetch=False)
    assert len(entries(whole)) == count


async def test_a_session_that_is_too_large_comes_chunk_by_chunk(cluster: Cluster) -> None:
    _, api = await cluster.one()
    pod = await holding(cluster, api)
    chunks = [b"[" + noise(n, 900_000) + b"]" for n in range(5)]
    for n, chunk in enumerate(chunks):
        slices = [
            wire.Slice(name="trail", value=msgspec.Raw(chunk), append=True),
            wire.Slice(name="total", value=msgspec.Raw(b"%d" % n)),
        ]
        await pod.get(wire.Recorded, wire.StepEnd(key=f"step:s#{n}", name="s", slices=slices))
    pod = await again(cluster, pod)
    assert pod.context is not None
    states = {state.name: state for state in pod.context.slices}
    assert [bytes(chunk) for chunk in states["total"].chunks] == [b"4"]
    trail = states["trail"]
    assert [bytes(chunk) for chunk in trail.chunks] == chunks[:2]
    refs = [wire.ChunkRef(name="trail", seq=seq) for seq in trail.fetch]
    fetched = await pod.get(wire.Fetched, wire.Fetch(chunks=refs))
    assert [bytes(value) for value in fetched.values] == chunks[2:]


async def test_what_satisfied_a_wait_is_fetched_if_it_is_large(cluster: Cluster) -> None:
    """By the answer, by a push, and by the next lease; whole for who does not fetch."""
    _, api = await cluster.one()
    pod = await holding(cluster, api)
    run = pod.run or ""
    payloads = [noise(n, 1_500_000) for n in range(3)]
    for n in range(2):
        await api.signal(run, f"s{n}", msgspec.Raw(payloads[n]))
    answer = await pod.wait("wait:a", signal("s0"), signal("s1"), mode="all")
    fired = answer.outcomes["wait:a"].fired
    assert [(item.fetch, bytes(item.payload)) for item in fired] == [(True, b"null")] * 2
    refs = [wire.FiredRef(key="wait:a", index=item.index) for item in fired]
    fetched = await pod.get(wire.Fetched, wire.Fetch(fired=refs))
    assert [bytes(value) for value in fetched.values] == payloads[:2]

    assert (await pod.wait("wait:b", signal("s2"), suspend=False)).status == "open"
    await api.signal(run, "s2", msgspec.Raw(payloads[2]))
    while "wait:b" not in (poke := await pod.poke()).outcomes:
        pass
    [item] = poke.outcomes["wait:b"].fired
    assert (item.fetch, item.name) == (True, "s2")

    pod = await again(cluster, pod)
    assert not entries(pod)["wait:a"].fetch
    outcome = msgspec.json.decode(entries(pod)["wait:a"].output, type=wire.WaitOutcome)
    assert [item.fetch for item in outcome.fired] == [True, True]
    fetched = await pod.get(wire.Fetched, wire.Fetch(keys=["wait:a", "wait:b"]))
    assert [item.fetch for item in msgspec.json.decode(fetched.values[0], type=wire.WaitOutcome).fired] == [True, True]

    whole = await again(cluster, pod, fetch=False)
    outcome = msgspec.json.decode(entries(whole)["wait:a"].output, type=wire.WaitOutcome)
    assert [bytes(item.payload) for item in outcome.fired] == payloads[:2]
    assert whole.context is not None
    assert b'"fetch"' not in wire.encode_json(whole.context)
    assert b'"ledgerSeq"' not in wire.encode_json(whole.context)


async def test_the_output_of_a_child_is_fetched_as_part_of_its_end(cluster: Cluster) -> None:
    _, api = await cluster.one()
    pod = await holding(cluster, api)
    kid = await pod.spawn("spawn:c#0")
    other = await cluster.holder(cluster.gateways[0])
    output = noise(1)
    await other.finish(output=output)
    fired = (await pod.wait("wait:c", child(kid), suspend=False)).outcomes
    while "wait:c" not in fired:
        fired = (await pod.poke()).outcomes
    assert fired["wait:c"].fired[0].fetch
    [value] = (await pod.get(wire.Fetched, wire.Fetch(fired=[wire.FiredRef(key="wait:c", index=0)]))).values
    ended = msgspec.json.decode(value, type=wire.ChildResult)
    assert (ended.status, bytes(ended.output)) == ("Succeeded", output)


async def test_signals_that_nobody_has_taken_do_not_fill_a_lease(cluster: Cluster) -> None:
    _, api = await cluster.one()
    pod = await holding(cluster, api)
    await api.signal(pod.run or "", "large", msgspec.Raw(noise(1)))
    await api.signal(pod.run or "", "small", msgspec.Raw(b"1"))
    pod = await again(cluster, pod)
    assert pod.context is not None
    unclaimed = {reason.name: (reason.omitted, bytes(reason.payload)) for reason in pod.context.reasons if reason.kind == "signal"}
    assert unclaimed == {"large": (True, b"null"), "small": (False, b"1")}


async def test_effects_that_are_settled_stay_behind(cluster: Cluster) -> None:
    _, api = await cluster.one()
    pod = await holding(cluster, api)
    for tool in ("a", "b"):
        decision = await pod.get(wire.ActivityDecision, wire.ActivityBegin(tool=tool, effect="external"))
        if tool == "a":
            end = wire.ActivityEnd(key=decision.key, token=decision.token or "", state="succeeded")
            settled = await pod.get(wire.ActivityRecorded, end)
    pod = await again(cluster, pod)
    assert pod.context is not None
    assert [(entry.tool, entry.state) for entry in pod.context.ledger] == [("b", "UNKNOWN")]
    assert pod.context.ledger_seq > settled.seq
    whole = await again(cluster, pod, fetch=False)
    assert whole.context is not None
    assert [entry.tool for entry in whole.context.ledger] == ["a", "b"]


async def test_only_the_holder_fetches_and_only_what_there_is(cluster: Cluster) -> None:
    _, api = await cluster.one()
    pod = await holding(cluster, api)
    await pod.step("step:s#0", noise(1))
    other = await cluster.pod(cluster.gateways[0])
    for body in (wire.Fetch(keys=["step:s#0"]), wire.Fetch(after="x")):
        with pytest.raises(Refused, match="lease-lost"):
            await other.op(body, run=pod.run, epoch=pod.epoch)
    for body in (
        wire.Fetch(),
        wire.Fetch(keys=["step:s#0"], after="x"),
        wire.Fetch(keys=["step:s#1"]),
        wire.Fetch(chunks=[wire.ChunkRef(name="x", seq=1)]),
        wire.Fetch(fired=[wire.FiredRef(key="step:s#0", index=0)]),
    ):
        with pytest.raises(Refused, match="invalid-input"):
            await pod.op(body)
    await cluster.pg.execute("update perdure.blobs set data = overlay(data placing '\\x00000000' from 100000)")
    with pytest.raises(Refused, match="corrupt-payload"):
        await pod.op(wire.Fetch(keys=["step:s#0"]))


async def parked(cluster: Cluster, api: Api, run: str, losses: int) -> dict[str, Any]:
    """What `why` says when the run has been given to so many pods and was parked. More than that it must not get."""
    pods = []
    for _ in range(losses + 1):
        pods.append(await cluster.pod(cluster.gateways[0]))
        await pods[-1].next(wire.Retire)
    spare = await cluster.pod(cluster.gateways[0])
    why: dict[str, Any] = await api.call("GET", f"/runs/{run}/why")
    assert (why["state"], why["reason"]) == ("Suspended", "LossesExhausted")
    kinds = [(event["kind"], event["data"].get("reason")) for event in await api.events(run)]
    assert kinds.count(("run.lost", "LeaseUndeliverable")) == losses
    assert spare.heard(wire.Lease) == 0
    return why


async def test_a_lease_that_cannot_be_delivered_counts_and_parks(cluster: Cluster) -> None:
    """To an agent that does not fetch, of a run that does not fit into a frame."""
    gateway, api = await cluster.one()
    pod = await holding(cluster, api, retry={"maxLosses": 2, "maxRetries": 0})
    run = pod.run or ""
    for n in range(26):
        await pod.step(f"step:s#{n}", zeros())
    await pod.cut()
    await cluster.store.pod_gone(pod.id, "Evicted")
    peak = Peak(gateway.pid)
    why = await parked(cluster, api, run, 2)
    assert "LeaseUndeliverable: what its worker is to be told has more than 48 MiB" in why["message"]
    assert peak.grown() < 100 * MB

    # One that fetches can go on where they could not.
    await api.call("POST", f"/runs/{run}/resume")
    able = cluster.new_pod()
    await able.connect(gateway, able.hello(fetch=True))
    await able.lease()
    assert len(entries(able)) == 26
    assert await able.finish() == "Succeeded"


async def test_a_run_whose_input_is_broken_is_parked(cluster: Cluster) -> None:
    _, api = await cluster.one()
    run = await api.create("broken", input="x" * 5000, retry={"maxLosses": 1, "maxRetries": 0})
    await cluster.pg.execute("update perdure.blobs set data = 'nothing'")
    why = await parked(cluster, api, run, 1)
    assert "missing or broken" in why["message"]


async def test_a_run_that_comes_near_to_its_limit_is_told_and_one_that_would_pass_it_is_refused(cluster: Cluster) -> None:
    _, api = await cluster.one(PERDURE_RUN_BYTES="100000", PERDURE_RUN_STORED_BYTES="0")
    pod = await holding(cluster, api)
    run = pod.run or ""
    await pod.step("step:a", b'"' + b"a" * 50_000 + b'"')
    assert (await api.call("GET", f"/runs/{run}/why"))["size"] is None
    await pod.step("step:b", b'"' + b"b" * 40_000 + b'"')
    while "run.nearly_full" not in (kinds := await api.kinds(run)):
        pass
    assert kinds[-1] == "run.nearly_full"
    with pytest.raises(Refused) as refusal:
        await pod.step("step:c", b'"' + b"c" * 10_000 + b'"')
    problem = refusal.value.problem
    assert (problem.type, problem.status, problem.retryable) == ("urn:perdure:run-too-large", 413, False)
    assert "the run has written 90004 bytes" in problem.detail
    assert "it may write 100000" in problem.detail
    view = await api.view(run)
    size = {"bytes": 90004, "maxBytes": 100_000, "storedBytes": view.stored_bytes, "maxStoredBytes": None}
    assert (view.bytes, (await api.call("GET", f"/runs/{run}/why"))["size"]) == (90004, size)
    assert 0 < view.stored_bytes < 1000
    assert await pod.finish("failed", error=wire.ErrorInfo(type="run-too-large")) == "Failed"


async def test_reads_are_paged_by_bytes_as_well_as_by_rows(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    pod = await holding(cluster, api)
    run = pod.run or ""
    large = [zeros(1_990_000 + n) for n in range(30)]
    for data in large:
        await pod.op(wire.EventAppend(kind="large", data=msgspec.Raw(data)))
    for n in range(3000):
        # In one batch of the gateway: only the last answer is waited for.
        last = pod.ask(wire.StepEnd(key=f"step:s#{n}", name="s", output=msgspec.Raw(b'"' + b"x" * 1000 + b'"')))
    await last
    for n in range(3):
        await pod.op(wire.ActivityBegin(tool=f"t{n}", effect="external"))

    async def pages(what: str, query: str) -> list[list[dict[str, Any]]]:
        found, following = [], 1
        while following is not None:
            page = await api.call("GET", f"/runs/{run}/{what}?from={following}&{query}")
            found.append(page["items"])
            following = page["next"]
        return found

    peak = Peak(gateway.pid)
    events = await pages("events", "limit=5000")
    assert [len(payload["payload"]) + 2 for page in events for payload in page if payload["kind"] == "agent.large"] == [*map(len, large)]
    assert sum(len(page) for page in events) == 2 + 30 + 3000 + 3
    assert max(sum(len(event.get("payload", "")) for event in page) for page in events) < 4 * MB
    assert [event["seq"] for page in events for event in page] == [*range(1, 2 + 30 + 3000 + 4)]
    journal = await pages("journal", "limit=5000")
    assert [entry["key"] for page in journal for entry in page] == [f"step:s#{n}" for n in range(3000)]
    assert [len(page) for page in journal] == [2091, 909]
    assert [len(page) for page in await pages("journal", "limit=1000")] == [1000, 1000, 1000]
    assert [[entry["tool"] for entry in page] for page in await pages("ledger", "limit=2")] == [["t0", "t1"], ["t2"]]
    assert peak.grown() < 100 * MB
