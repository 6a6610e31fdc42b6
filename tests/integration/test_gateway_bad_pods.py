"""What is wrong with a pod's frame is said clearly, and nothing of it is stored.

A bad operation is refused and the connection goes on; a bad frame ends the connection, with a word why.
"""

from __future__ import annotations

import json
import random
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import pytest
from tests.harness.cluster import Cluster
from tests.harness.complaints import nothing_stored
from tests.harness.pods import FakePod
from tests.integration.test_bad_input import LIMIT, NOT_JSON, text

from perdure import protocol as wire

WAIT = {"op": "wait", "key": "wait:w#0", "on": [{"kind": "signal", "name": "x"}]}
STEP = {"op": "step.end", "key": "step:s#0", "name": "s"}
SPAWN = {"op": "spawn", "key": "spawn:c#0"}
CALL = {"op": "activity.begin", "tool": "t"}
END = {"op": "activity.end", "key": "k", "token": str(uuid4()), "state": "succeeded"}
INCOMPRESSIBLE = "".join(chr(random.Random(7).randrange(0x4E00, 0x9FFF)) for _ in range(1024))

BODIES: dict[str, bytes | dict[str, Any]] = {
    "nothing": b"",
    "a list": b"[]",
    "no op": {"key": "k"},
    "unknown op": {"op": "explode"},
    "op of a wrong type": {"op": 5},
    "unknown field": {**STEP, "outptu": 1},
    "unknown field below": {**STEP, "error": {"type": "x", "why": "y"}},
    "duplicate field": b'{"op":"step.end","key":"a","name":"s","key":"b"}',
    "empty key": {**STEP, "key": ""},
    "key too long": {**STEP, "key": "k" * 1025},
    "key of 3,000 bytes": {**STEP, "key": INCOMPRESSIBLE},
    "wait key of 3,000 bytes": {**WAIT, "key": INCOMPRESSIBLE},
    "spawn key of 3,000 bytes": {**SPAWN, "key": INCOMPRESSIBLE},
    "state of a wrong kind": {**STEP, "state": "done"},
    "attempts of a wrong type": {**STEP, "attempts": "1"},
    "attempts too many": {**STEP, "attempts": 2**31},
    "attempts far too many": {**STEP, "attempts": 10**30},
    "attempts below zero": {**STEP, "attempts": -1},
    "a slice twice": {**STEP, "slices": [{"name": "a", "value": 1}, {"name": "a", "value": 2}]},
    "an append of no array": {**STEP, "slices": [{"name": "a", "value": {}, "append": True}]},
    "a slice of a huge version": {**STEP, "slices": [{"name": "a", "value": 1, "version": 2**31}]},
    "a slice without a name": {**STEP, "slices": [{"name": "", "value": 1}]},
    "an error type too long": {**STEP, "error": {"type": "x" * 201}},
    "an event without a kind": {"op": "event", "kind": ""},
    "a sequence too large": {"op": "event", "kind": "x", "expectedSeq": 2**63},
    "a sequence far too large": {"op": "event", "kind": "x", "expectedSeq": 10**30},
    "a negative sequence": {"op": "event", "kind": "x", "expectedSeq": -1},
    "covers too much": {"op": "checkpoint", "coversSeq": 2**63},
    "checkpoint of another type": {"op": "checkpoint", "type": "x"},
    "a wait for nothing": {**WAIT, "on": []},
    "a wait for too much": {**WAIT, "on": [{"kind": "signal", "name": "x"}] * 10_001},
    "a wait of another mode": {**WAIT, "mode": "some"},
    "a wait of another kind": {**WAIT, "on": [{"kind": "rain"}]},
    "a signal without a name": {**WAIT, "on": [{"kind": "signal"}]},
    "a timer without a time": {**WAIT, "on": [{"kind": "timer"}]},
    "a timer of two times": {**WAIT, "on": [{"kind": "timer", "seconds": 1, "at": "2026-01-01T00:00:00Z"}]},
    "a timer at no time": {**WAIT, "on": [{"kind": "timer", "at": "tomorrow"}]},
    "a timer on the 31st of February": {**WAIT, "on": [{"kind": "timer", "at": "2026-02-31T00:00:00Z"}]},
    "a timer of no zone": {**WAIT, "on": [{"kind": "timer", "at": "2026-02-01T00:00:00"}]},
    "a timer below zero": {**WAIT, "on": [{"kind": "timer", "seconds": -1}]},
    "a timer for ever": {**WAIT, "on": [{"kind": "timer", "seconds": 1e300}]},
    "a time before all times": {"op": "wait", "key": "w", "on": [{"kind": "timer", "at": "0001-01-01T00:00:00+14:00"}]},
    "a timeout for ever": {**WAIT, "timeoutSeconds": 1e300},
    "a timeout that is infinite": b'{"op":"wait","key":"w","on":[{"kind":"signal","name":"x"}],"timeoutSeconds":1e999}',
    "suspend on nothing": {"op": "suspend", "waits": []},
    "a token that is none": {**END, "token": "x"},
    "an end of another state": {**END, "state": "perhaps"},
    "an occurrence too large": {**CALL, "occurrence": 2**31},
    "a tool timeout for ever": {**CALL, "timeoutSeconds": 1e300},
    "a tool timeout of nothing": {**CALL, "timeoutSeconds": 0},
    "a scope without arguments": {**CALL, "scope": ["to"]},
    "a scope of other arguments": {**CALL, "scope": ["to"], "arguments": {"from": 1}},
    "a scope with a field that is none": {**CALL, "scope": [""], "arguments": {"to": 1}},
    "too many retries": {**CALL, "maxRetries": 101},
    "a finish of another outcome": {"op": "finish", "outcome": "stuck"},
    "a spawn of another policy": {**SPAWN, "policy": "adopt"},
    "a spawn with a field of its own in the spec": {**SPAWN, "spec": {"input": 1}},
    "a spawn with an unknown field": {**SPAWN, "spec": {"colour": "red"}},
    "a spawn with a wrong type": {**SPAWN, "spec": {"priority": "high"}},
    "a spawn with a huge number": {**SPAWN, "spec": {"deadlineSeconds": 10**30}},
    "a summary too long": {**SPAWN, "summary": "ü" * 150},
}
OTHER_CODES: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "output too large": (b'{"op":"step.end","key":"s","name":"s","output":%b}' % text(LIMIT + 1), "payload-too-large"),
    "slice too large": (b'{"op":"checkpoint","slices":[{"name":"a","value":%b}]}' % text(LIMIT + 1), "payload-too-large"),
    "input too large": (b'{"op":"spawn","key":"s","input":%b}' % text(LIMIT + 1), "payload-too-large"),
    "unknown pool": ({**SPAWN, "pool": "nowhere"}, "pool-not-found"),
    "pool of another namespace": ({**SPAWN, "pool": "other/p"}, "invalid-input"),
    "suspend on an unknown wait": ({"op": "suspend", "waits": ["wait:nothing#0"]}, "wait-conflict"),
    "end of an unknown call": (END, "unknown-activity"),
    "resolve of an unknown call": ({"op": "activity.resolve", "key": "k", "happened": True}, "unknown-activity"),
}


async def usable(pod: FakePod) -> bool:
    """Asks something that writes nothing."""
    return bool((await pod.op(wire.StepBegin(name="s")))["decision"] == "execute")


async def test_operations(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    async with nothing_stored(cluster.pg) as complaints:
        for what, body in BODIES.items():
            complaints.frame(what, await pod.ask(body if isinstance(body, bytes) else json.dumps(body).encode()), "invalid-input")
        for what, (body, code) in OTHER_CODES.items():
            complaints.frame(what, await pod.ask(body if isinstance(body, bytes) else json.dumps(body).encode()), code)
        for what, data in NOT_JSON.items():
            if what == "depth 201":
                continue  # a payload may lie a few levels down
            for body in (data, b'{"op":"step.end","key":"s","name":"s","output":%b}' % data, b'{"op":"event","kind":"x","data":%b}' % data):
                complaints.frame(f"{what}: {body[:40]!r}", await pod.ask(body), "invalid-input")
        for field in ("key", "name", "fingerprint", "phase"):
            for bad in ("\\u0000", "\\ud800"):
                body = json.dumps({**STEP, field: "?"}).replace("?", bad).encode()
                complaints.frame(f"{bad} in {field}", await pod.ask(body), "invalid-input")
        assert await usable(pod)
    assert pod.heard(wire.LeaseLost) == pod.heard(wire.Retire) == 0
    await pod.op(b'{"op":"step.end","key":"step:full#0","name":"s","output":%b}' % text(LIMIT))
    await pod.op(b'{"op":"step.end","key":"step:deep#0","name":"s","output":%b}' % (b"[" * 200 + b"]" * 200))
    assert await pod.finish() == "Succeeded"


async def test_a_known_wait_for_something_else(cluster: Cluster) -> None:
    """Without a fingerprint the conditions speak for themselves; when they come true may change from attempt to attempt."""
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    first = {**WAIT, "on": [{"kind": "signal", "name": "x"}, {"kind": "timer", "seconds": 60}]}
    assert (await pod.op(json.dumps(first).encode()))["status"] == "open"
    again = {**first, "on": [first["on"][0], {"kind": "timer", "at": "2126-01-01T00:00:00Z"}]}
    assert (await pod.op(json.dumps(again).encode()))["status"] == "open"
    async with nothing_stored(cluster.pg) as complaints:
        for what, other in (("conditions", {"on": [{"kind": "signal", "name": "y"}]}), ("mode", {"mode": "all"})):
            complaints.frame(f"other {what}", await pod.ask(json.dumps({**first, **other}).encode()), "wait-conflict")


async def test_fences(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create_many(["mine", "others"])
    pod, other = await cluster.holder(gateway), await cluster.holder(gateway)
    assert pod.run is not None
    bodies: list[wire.Body] = [
        wire.StepEnd(key="step:s#0", name="s"), wire.StepBegin(name="s"), wire.EventAppend(kind="x"), wire.CheckpointSave(),
        wire.Spawn(key="spawn:c#0"), wire.ActivityBegin(tool="t"), wire.Finish(outcome="succeeded"), wire.Suspend(waits=["w"]),
    ]  # fmt: skip
    async with nothing_stored(cluster.pg) as complaints:
        for body in bodies:
            kind = type(body).__name__
            for epoch in (0, 2, 2**31 - 1, 2**31, 2**62, -1):
                complaints.frame(f"{kind} at epoch {epoch}", await pod.ask(body, epoch=epoch), "lease-lost")
            complaints.frame(f"{kind} of another's run", await pod.ask(body, run=other.run), "lease-lost")
            complaints.frame(f"{kind} of an unknown run", await pod.ask(body, run=str(uuid4())), "run-not-found", "lease-lost")
            complaints.frame(f"{kind} of no run", await pod.ask(body, run="nonsense"), "invalid-input", "lease-lost")
        assert await usable(pod)
        assert await usable(other)
    # Any string is a request id; it means the same one when it comes again.
    first, second = await pod.ask(bodies[2], req="not a uuid"), await pod.ask(bodies[2], req="not a uuid")
    assert isinstance(first, wire.Answer)
    assert isinstance(second, wire.Answer)
    assert first.body == second.body


FRAMES: dict[str, bytes] = {
    "garbage": b"\xc1garbage",
    "empty": b"",
    "another frame": msgspec.msgpack.encode({"t": "nope"}),
    "no frame": msgspec.msgpack.encode([1, 2]),
    "a wrong type": msgspec.msgpack.encode({"t": "op", "id": "x", "run": "r", "epoch": 1, "req": "r", "body": b""}),
    "a missing field": msgspec.msgpack.encode({"t": "op", "id": 1}),
    "a second hello": wire.encode_frame(wire.Hello(protocol=1, sidecar="x")),
}
HELLOS: dict[str, wire.FromPod] = {
    "another protocol": wire.Hello(protocol=99, sidecar="x"),
    "a run that is none": wire.Hello(protocol=1, sidecar="x", run="nonsense", epoch=1),
    "an epoch that is none": wire.Hello(protocol=1, sidecar="x", run=str(uuid4()), epoch=2**40),
    "no hello": wire.Beat(),
}


async def test_frames_end_the_connection_with_a_word(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create()
    holder = await cluster.holder(gateway)
    for what, frame in FRAMES.items():
        pod = await cluster.pod(gateway)
        before = await cluster.pg.fetchval("select count(*) from perdure.events")
        pod.send_bytes(frame)
        retire = await pod.next(wire.Retire)
        assert "protocol error" in retire.reason, what
        await pod.closed()
        assert await cluster.pg.fetchval("select count(*) from perdure.events") == before
    async with nothing_stored(cluster.pg):
        for what, hello in HELLOS.items():
            pod = await cluster.new_pod().connect(gateway, hello)
            assert (await pod.next(wire.Retire)).reason, what
            await pod.closed()
    # A holder that speaks wrongly once connects again and still holds its run.
    holder.send_bytes(b"\xc1")
    await holder.next(wire.Retire)
    await holder.closed()
    await holder.connect(gateway)
    await holder.lease()
    assert await usable(holder)


async def test_who_may_connect(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    async with nothing_stored(cluster.pg):
        for token in ("", "garbage", api.token, cluster.tokens.issue_pod(uuid4(), "default/p", ttl_seconds=-1)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await FakePod(token, uuid4()).connect(gateway)
            assert refused.value.status in (401, 403)


async def test_a_pod_of_one_pool_does_not_serve_another(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    pod = await cluster.pod(gateway)
    await pod.cut()
    moved = await cluster.new_pod(pod_id=pod.id, pool="default/other").connect(gateway)
    await moved.next(wire.Retire)
    await api.create()
    assert (await api.call("GET", "/runs"))["items"][0]["state"] == "Pending"


async def test_a_connection_that_hangs_does_not_keep_its_pod_from_coming_back(cluster: Cluster) -> None:
    """The network swallowed the first one with megabytes on the way: nobody reads there, and a close does not get through."""
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    await pod.op(b'{"op":"step.end","key":"step:big#0","name":"big","output":%b}' % text(LIMIT))
    for _ in range(20):
        pod.ask(wire.StepBegin(name="big"))
    pod.hang()
    again = cluster.new_pod(pod_id=pod.id)
    again.run, again.epoch = pod.run, pod.epoch
    await again.connect(gateway)
    await again.lease(5)
    assert await usable(again)
