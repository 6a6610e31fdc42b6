"""What is wrong with a request is said clearly, in one shape, and nothing of it is stored: the public API.

Every case of a table is sent; all that were not refused as they should are reported together.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from tests.harness.api import Api, Reply
from tests.harness.cluster import Cluster
from tests.harness.complaints import nothing_stored

from perdure import protocol as wire
from perdure_operator.gateway.auth import LocalTokens

LIMIT = 2_000_000
NOT_JSON: dict[str, bytes] = {
    "NUL escaped": b'{"a":"x\\u0000y"}',
    "NUL raw": b'"x\x00y"',
    "NUL in a key": b'{"\\u0000":1}',
    "lone surrogate": b'["\\ud800"]',
    "lone surrogate in a key": b'{"\\udfff":1}',
    "NaN": b'{"a":NaN}',
    "Infinity": b"[Infinity]",
    "-Infinity": b"-Infinity",
    "a number that is infinite": b"[1e999]",
    "a number of 5,000 digits": b"9" * 5000,
    "a float of 400 digits": b"9" * 400 + b".0",
    "depth 10,000": b"[" * 10_000 + b"]" * 10_000,
    "depth 10,000, objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "depth 201": b"[" * 201 + b"]" * 201,
    "duplicate key": b'{"a":1,"a":2}',
    "duplicate key below": b'[{"b":{"a":1,"\\u0061":2}}]',
    "invalid UTF-8": b'"\xff\xfe"',
    "overlong UTF-8": b'"\xc0\xaf"',
    "truncated": b'{"a":',
    "two values": b"1 2",
    "trailing comma": b"[1,]",
    "byte order mark": b"\xef\xbb\xbf1",
    "single quotes": b"{'a':1}",
    "control character": b'"a\nb"',
}


async def test_bodies_that_are_no_json(cluster: Cluster) -> None:
    _, api = await cluster.one()
    run = await api.create()
    async with nothing_stored(cluster.pg) as complaints:
        for what, data in NOT_JSON.items():
            for path in (f"/runs/{run}/signals/go", "/runs", f"/runs/{run}/cancel"):
                too_large = ("payload-too-large",) if len(data) > 16_384 and path.endswith("cancel") else ()
                complaints.reply(f"{what} to {path}", await api.raw("POST", path, data=data), "invalid-input", *too_large)
            wrapped = b'{"spec":{"agent":{"poolRef":{"name":"p"}},"input":%b}}' % data
            complaints.reply(f"{what} as input", await api.raw("POST", "/runs", data=wrapped), "invalid-input")
            complaints.reply(f"{what} as a pool", await api.raw("PUT", "/pools/x", data=data), "invalid-input")


async def test_sizes(cluster: Cluster) -> None:
    _, api = await cluster.one()
    run = await api.create()
    path = f"/runs/{run}/signals/go"

    async def chunks(size: int) -> AsyncIterator[bytes]:
        yield b'"'
        for _ in range((size - 2) // 100_000):
            yield b"x" * 100_000
        yield b"x" * ((size - 2) % 100_000) + b'"'

    async with nothing_stored(cluster.pg) as complaints:
        complaints.reply("one byte too many", await api.raw("POST", path, data=text(LIMIT + 1)), "payload-too-large")
        complaints.reply("a batch of 9 MB", await api.raw("POST", "/runs", data=text(9_000_000)), "payload-too-large")
        bomb = gzip.compress(text(50_000_000))
        for encoding in ("gzip", "deflate", "br", "zstd", "nonsense"):
            reply = await api.raw("POST", path, data=bomb, headers={"Content-Encoding": encoding})
            complaints.reply(f"a bomb in {encoding}", reply, "invalid-input")
        complaints.reply("a long reason", await api.raw("POST", f"/runs/{run}/pause", data=text(20_000)), "payload-too-large")
        async with api.gateway.http.post(api.gateway.url + api.base + path, data=chunks(LIMIT + 1), headers=api.headers) as response:
            reply = Reply(response.status, response.content_type, await response.read())
        complaints.reply("the same in chunks", reply, "payload-too-large")
    assert (await api.raw("POST", path, data=text(LIMIT))).status == 202
    assert (await api.raw("POST", path, data=b"[" * 200 + b"]" * 200)).status == 202
    stored = await api.tail_of(run, 3)
    assert len(stored) == 3


def text(size: int) -> bytes:
    return b'"' + b"x" * (size - 2) + b'"'


def submission(**fields: Any) -> dict[str, Any]:
    return {"spec": {"agent": {"poolRef": {"name": "p"}}}, **fields}


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": {"agent": {"poolRef": {"name": "p"}}, **fields}}


SUBMISSIONS: dict[str, Any] = {
    "null": None,
    "a list": [],
    "no spec": {"name": "x"},
    "unknown field": submission(extra=1),
    "unknown field of the spec": spec(colour="red"),
    "snake case": spec(active_deadline_seconds=5),
    "name of a wrong type": submission(name=5),
    "name in capitals": submission(name="Run"),
    "name too long": submission(name="x" * 254),
    "empty name": submission(name=""),
    "labels of a wrong type": submission(labels={"a": 1}),
    "labels that are none": submission(labels={"a b": "c"}),
    "priority of a wrong type": spec(priority="high"),
    "priority too high": spec(priority=10**30),
    "a boolean as a number": spec(deadlineSeconds=True),
    "a fraction of a second": spec(deadlineSeconds=0.5),
    "negative deadline": spec(deadlineSeconds=-1),
    "huge deadline": spec(deadlineSeconds=10**20),
    "huge backoff": spec(retry={"backoffSeconds": 10**20}),
    "input too large": spec(input="x" * 17_000),
    "summary too long": spec(summary="x" * 201),
    "no agent": {"spec": {}},
    "two agents": {"spec": {"agent": {"poolRef": {"name": "p"}, "template": {}}}},
    "runs and more": {"runs": [submission()], "name": "x"},
    "runs that are no list": {"runs": {}},
    "no runs": {"runs": []},
    "too many runs": {"runs": [submission()] * 1001},
    "one bad of many": {"runs": [submission(), submission(name=5), submission()]},
}


async def test_submissions(cluster: Cluster) -> None:
    _, api = await cluster.one()
    async with nothing_stored(cluster.pg) as complaints:
        for what, content in SUBMISSIONS.items():
            complaints.reply(what, await api.raw("POST", "/runs", data=json.dumps(content).encode()), "invalid-input")
        nowhere = {"spec": {"agent": {"poolRef": {"name": "nowhere"}}}}
        complaints.reply("unknown pool", await api.raw("POST", "/runs", data=wire.encode_json(nowhere)), "pool-not-found")
        everywhere = cluster.api(api.gateway, namespace="-")
        complaints.reply("no namespace", await everywhere.raw("POST", "/runs", data=wire.encode_json(submission())), "invalid-input")


async def test_paths_queries_and_headers(cluster: Cluster) -> None:
    _, api = await cluster.one()
    run = await api.create()
    gets = {
        "/runs?limit=0": "invalid-input", "/runs?limit=1001": "invalid-input", "/runs?limit=x": "invalid-input",
        f"/runs?limit={'9' * 5000}": "invalid-input", "/runs?state=Bogus": "invalid-input", "/runs?parent=x": "invalid-input",
        "/runs?after=x": "invalid-input", "/runs?pool=%00": "invalid-input", f"/runs/{run}/events?from=0": "invalid-input",
        f"/runs/{run}/events?from={2**70}": "invalid-input", f"/runs/{run}/events?limit=-1": "invalid-input",
        f"/runs/{run}/tail?from=x": "invalid-input", f"/runs/{uuid4()}": "run-not-found", "/runs/nobody": "run-not-found",
        "/runs/nobody/tail": "run-not-found", "/runs/a%00b": "invalid-input", f"/runs/{'x' * 3000}": "run-not-found",
        "/runs/%FF": "run-not-found", "/bogus": "not-found", "//bogus": "not-found", "//v1": "not-found",
    }  # fmt: skip
    long = "k" * 254
    posts: list[tuple[str, dict[str, str], bytes, str]] = [
        (f"/runs/{run}/signals/{'x' * 254}", {}, b"", "invalid-input"),
        (f"/runs/{run}/signals/a%00b", {}, b"", "invalid-input"),
        (f"/runs/{run}/signals/go", {"Idempotency-Key": long}, b"", "invalid-input"),
        ("/runs", {"Idempotency-Key": long}, wire.encode_json(submission()), "invalid-input"),
        (f"/runs/{uuid4()}/signals/go", {}, b"", "run-not-found"),
        (f"/runs/{uuid4()}/cancel", {}, b"", "run-not-found"),
        (f"/runs/{run}/cancel", {}, b"[]", "invalid-input"),
        (f"/runs/{run}/pause", {}, b'{"reason":5}', "invalid-input"),
        (f"/runs/{run}/pause", {}, b'{"why":"x"}', "invalid-input"),
        (f"/runs/{run}", {}, b"", "method-not-allowed"),
        (f"/runs/{run}/explode", {}, b"", "not-found"),
    ]
    async with nothing_stored(cluster.pg) as complaints:
        for path, code in gets.items():
            complaints.reply(f"GET {path[:80]}", await api.raw("GET", path), code)
        for value in ("x", "9" * 30, "-" + "9" * 30, "1.5"):
            reply = await api.raw("GET", f"/runs/{run}/tail", headers={"Last-Event-ID": value})
            complaints.reply(f"Last-Event-ID {value}", reply, "invalid-input")
        for path, headers, data, code in posts:
            complaints.reply(f"POST {path[:80]} {headers}", await api.raw("POST", path, data=data, headers=headers), code)
        for name in ("Upper", "-x", "x" * 254, "%00"):
            reply = await api.raw("PUT", f"/pools/{name}", data=b'{"spec":{}}')
            complaints.reply(f"pool {name[:20]}", reply, "invalid-input")
        for content in (b"{}", b'{"spec":{}}', b'{"spec":{"template":{}},"x":1}', b'{"spec":{"template":{"spec":{"hostNetwork":true}}}}'):
            complaints.reply(f"pool {content!r}", await api.raw("PUT", "/pools/x", data=content), "invalid-input")
    assert await api.gateway.answers("/readyz")


async def test_a_key_that_is_no_text(cluster: Cluster) -> None:
    """No HTTP client sends it, so it is written by hand. It must not even disturb the gateway, which batches it with what others send."""
    gateway, api = await cluster.one()
    run = await api.create()
    async with nothing_stored(cluster.pg) as complaints:
        for path, data in [(f"/runs/{run}/signals/go", b""), ("/runs", wire.encode_json(submission()))]:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head = f"POST {api.base}{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.token}\r\nContent-Length: {len(data)}\r\n"
            writer.write(head.encode() + b"Connection: close\r\nIdempotency-Key: \xff\xfe\r\n\r\n" + data)
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            head_, _, content = answer.partition(b"\r\n\r\n")
            kind = "application/problem+json" if b"application/problem+json" in head_ else "?"
            complaints.reply(path, Reply(int(head_.split()[1]), kind, content), "invalid-input")
    assert await gateway.answers("/readyz")


async def test_tokens(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    run = await api.create()
    tokens, pod = cluster.tokens, uuid4()
    good = tokens.issue_person("x", verbs=["*"], namespaces=["*"])
    unknown = {
        "none": "", "garbage": "garbage", "other secret": LocalTokens(b"s" * 32).issue_person("x", verbs=["*"], namespaces=["*"]),
        "expired": tokens.issue_person("x", verbs=["*"], namespaces=["*"], ttl_seconds=-1), "tampered": good[:-2] + "xx",
        "other claims": good.partition(".")[0] + "." + good.split(".")[1][:-4] + "AAAA." + good.split(".")[2], "not ASCII": "tök.en.é",
    }  # fmt: skip
    forbidden = {
        "a pod's": tokens.issue_pod(pod, "default/p"),
        "no verb": tokens.issue_person("x", verbs=["list"], namespaces=["*"]),
        "no namespace": tokens.issue_person("x", verbs=["*"], namespaces=["elsewhere"]),
    }
    async with nothing_stored(cluster.pg) as complaints:
        for code, table in (("unauthenticated", unknown), ("forbidden", forbidden)):
            for what, token in table.items():
                person = Api(gateway, token)
                for method, path in [("GET", f"/runs/{run}"), ("POST", "/runs"), ("POST", f"/runs/{run}/cancel"), ("PUT", "/pools/x")]:
                    reply = await person.raw(method, path, data=wire.encode_json(submission()) if method == "POST" else None)
                    complaints.reply(f"{what}: {method} {path}", reply, code)
                if what not in ("a pod's", "no verb", "no namespace"):
                    complaints.reply(f"{what}: as a pod", await person.raw("GET", "//v1/pod"), code)
        complaints.reply("a person as a pod", await api.raw("GET", "//v1/pod"), "forbidden")
        narrow = cluster.api(gateway, of=["default"])
        complaints.reply("all namespaces", await Api(gateway, narrow.token, "-").raw("GET", "/runs"), "forbidden")
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await gateway.http.ws_connect(gateway.url + "/v1/pod", headers=api.headers)
