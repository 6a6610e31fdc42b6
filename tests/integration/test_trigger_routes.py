"""Firing by HTTP: webhooks that prove who they are, people with the right verb, and nothing stored for anybody else."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import aiohttp
import asyncpg
import pytest
from aiohttp import web
from tests.harness.fake_kube import FakeKube
from tests.harness.postgres import contents
from tests.harness.triggers import MANUAL, Bench

from perdure_operator.gateway.auth import LocalTokens
from perdure_operator.gateway.http import AUTHENTICATOR, problems
from perdure_operator.gateway.routes.triggers import TriggerRoutes
from perdure_operator.gateway.secrets import KubeSecrets
from perdure_operator.kube.client import SECRETS
from perdure_operator.store.store import Store

KEY = b"s3cret-of-the-sender"
SIGNED: dict[str, Any] = {"webhook": {"auth": {"hmac": {"secretRef": {"name": "hook", "key": "key"}}}}}
SHOWN: dict[str, Any] = {"webhook": {"auth": {"bearer": {"secretRef": {"name": "hook", "key": "key"}}}}}


def signature(body: bytes, key: bytes = KEY) -> str:
    return "sha256=" + hmac.new(key, body, hashlib.sha256).hexdigest()


class Door(Bench):
    """The routes behind a socket, secrets in a cluster."""

    url: str
    http: aiohttp.ClientSession
    kube: FakeKube
    time: float = 0.0
    tokens = LocalTokens(b"x" * 32)

    async def post(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(self.url + path, data=body, headers=sent) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str, verbs: tuple[str, ...] = ("*",)) -> tuple[int, Any]:
        async with self.http.get(self.url + path, headers={"Authorization": self.bearer(*verbs)}) as response:
            return response.status, json.loads(await response.read())

    def bearer(self, *verbs: str) -> str:
        return "Bearer " + self.tokens.issue_person("jane", verbs=verbs or ("*",), namespaces=["default"])

    async def secret(self, **data: bytes) -> None:
        await self.kube.create(
            SECRETS, "default", {"metadata": {"name": "hook"}, "data": {k: b64encode(v).decode() for k, v in data.items()}}
        )


@pytest.fixture
async def door(store: Store, pg: asyncpg.Connection) -> AsyncIterator[Door]:
    door = Door(store, pg)
    await door.setup()
    door.kube = FakeKube()
    secrets = KubeSecrets(door.kube, now=lambda: door.time)
    app = web.Application(middlewares=[problems], client_max_size=1 << 24)
    app[AUTHENTICATOR] = door.tokens
    app.add_routes(TriggerRoutes(door.triggers, secrets, emitted=lambda: None).routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    door.url = "http://{}:{}".format(*runner.addresses[0][:2])
    async with aiohttp.ClientSession() as door.http:
        yield door
    await runner.cleanup()


async def test_a_signed_request_makes_one_run_however_often_it_is_sent(door: Door) -> None:
    await door.secret(key=KEY)
    await door.put("orders", SIGNED)
    body = b'{"order": 7}'
    first = await door.post("/v1/hooks/default/orders", body, X_Hub_Signature_256=signature(body), Idempotency_Key="o-7")
    again = await door.post("/v1/hooks/default/orders", body, X_Hub_Signature_256=signature(body)[7:].upper(), Idempotency_Key="o-7")
    assert (first[0], first[1]["duplicate"]) == (202, False)
    assert (again[0], again[1]) == (202, {"delivery": first[1]["delivery"], "duplicate": True})
    await door.round()
    [name] = await door.runs()
    assert (await door.run(name))["input"] == b"\x00" + body
    other = await door.post("/v1/hooks/default/orders", body, X_Hub_Signature_256=signature(body), Idempotency_Key="o-8")
    assert not other[1]["duplicate"]


async def test_a_wrong_signature_stores_nothing(door: Door) -> None:
    await door.secret(key=KEY, other=b"another")
    await door.put("orders", SIGNED)
    body = b'{"order": 7}'
    before = await contents(door.pg)
    for headers in (
        {},
        {"X_Hub_Signature_256": ""},
        {"X_Hub_Signature_256": "sha256="},
        {"X_Hub_Signature_256": signature(body, b"another")},
        {"X_Hub_Signature_256": signature(body, b"")},
        {"X_Hub_Signature_256": signature(body + b" ")},
        {"X_Hub_Signature_256": signature(body)[:-1]},
        {"X_Hub_Signature_256": signature(body).replace("sha256=", "sha1=")},
        {"X_Hub_Signature_256": "ä€"},
        {"X_Hub_Signature": signature(body)},
        {"Authorization": f"Bearer {KEY.decode()}"},
        {"Authorization": door.bearer()},
    ):
        status, problem = await door.post("/v1/hooks/default/orders", body, **headers)
        assert (status, problem["type"]) == (401, "urn:perdure:unauthenticated"), headers
        assert problem["title"] == "The request does not prove that its sender knows the webhook's secret.", headers
    assert await contents(door.pg) == before
    assert (await door.post("/v1/hooks/default/orders", body, X_Hub_Signature_256=signature(body)))[0] == 202


async def test_a_signed_request_that_is_wrong_stores_nothing(door: Door) -> None:
    await door.secret(key=KEY)
    await door.put("orders", SIGNED)
    before = await contents(door.pg)
    for body, status in ((b"{", 400), (b'{"a": "\\u0000"}', 400), (b"[" * 300 + b"]" * 300, 400), (b'"' + b"x" * 2_000_000 + b'"', 413)):
        assert (await door.post("/v1/hooks/default/orders", body, X_Hub_Signature_256=signature(body)))[0] == status, body[:20]
    for id in ("", "x" * 254, "a\tb", "é"):
        answer = await door.post("/v1/hooks/default/orders", b"1", X_Hub_Signature_256=signature(b"1"), Idempotency_Key=id)
        assert answer[0] == 400, id
    assert await contents(door.pg) == before


async def test_a_token_and_headers_of_ones_own(door: Door) -> None:
    await door.secret(key=KEY + b"\n")
    await door.put("shown", {"webhook": {**SHOWN["webhook"], "idHeader": "X-Event"}})
    auth = SIGNED["webhook"]["auth"]["hmac"]
    await door.put("signed", {"webhook": {"auth": {"hmac": {**auth, "header": "X-Sig"}}}})
    right = f"Bearer {KEY.decode()}"
    before = await contents(door.pg)
    for wrong in ("Bearer x", f"Basic {KEY.decode()}", f"{right}x", ""):
        assert (await door.post("/v1/hooks/default/shown", b"1", Authorization=wrong))[0] == 401
    assert await contents(door.pg) == before
    assert (await door.post("/v1/hooks/default/shown", b"", Authorization=right, X_Event="e"))[1]["duplicate"] is False
    assert (await door.post("/v1/hooks/default/shown", b"", Authorization=right, X_Event="e"))[1]["duplicate"] is True
    body = b"[]"
    assert (await door.post("/v1/hooks/default/signed", body, X_Sig=signature(body, KEY + b"\n")))[0] == 202


async def test_without_its_secret_a_webhook_says_so_and_it_may_come_later(door: Door) -> None:
    await door.put("orders", SIGNED)
    before = await contents(door.pg)
    for _ in range(3):
        status, problem = await door.post("/v1/hooks/default/orders", b"1", X_Hub_Signature_256=signature(b"1", b""))
        assert (status, problem["retryable"]) == (503, True)
    assert await contents(door.pg) == before
    assert [call.verb for call in door.kube.calls] == ["get"], "who sends rubbish does not load the API server"
    await door.secret(key=KEY)
    door.time += 11
    assert (await door.post("/v1/hooks/default/orders", b"1", X_Hub_Signature_256=signature(b"1")))[0] == 202


async def test_what_is_no_webhook_is_not_found(door: Door) -> None:
    uid = await door.put("orders", SIGNED)
    await door.put("wish", MANUAL)
    await door.triggers.delete("default/orders", uid)
    for name in ("orders", "wish", "nobody"):
        status, problem = await door.post(f"/v1/hooks/default/{name}", b"1", X_Hub_Signature_256=signature(b"1"))
        assert (status, problem["type"]) == (404, "urn:perdure:trigger-not-found")


async def test_a_person_fires_by_hand_if_allowed(door: Door) -> None:
    await door.put("wish", MANUAL)
    path = "/v1/namespaces/default/triggers/wish/emit"
    before = await contents(door.pg)
    assert (await door.post(path, b"1"))[0] == 401
    assert (await door.post(path, b"1", Authorization=door.bearer("create", "get")))[0] == 403
    assert (await door.post(path.replace("default", "other"), b"1", Authorization=door.bearer()))[0] == 403
    assert (await door.post(path.replace("wish", "nobody"), b"1", Authorization=door.bearer()))[0] == 404
    assert await contents(door.pg) == before
    status, answer = await door.post(path, b'{"a": 1}', Authorization=door.bearer("emit"), Idempotency_Key="mine")
    assert (status, answer["duplicate"]) == (202, False)
    assert (await door.post(path, b"", Authorization=door.bearer("emit"), Idempotency_Key="mine"))[1]["duplicate"] is True
    await door.round()
    [name] = await door.runs()
    [reason] = json.loads((await door.run(name))["reasons"])
    assert (reason["by"], reason["id"]) == ("jane", answer["delivery"])


async def test_dead_deliveries_are_listed_and_redriven(door: Door) -> None:
    await door.pg.execute("delete from perdure.pools")
    await door.put("wish", MANUAL, retry={"maxAttempts": 1})
    delivery = str((await door.emit("wish")).delivery)
    await door.round()
    base = "/v1/namespaces/default/triggers/wish/deliveries"
    status, page = await door.get(base + "?state=DEAD")
    assert status == 200
    assert [(d["delivery_id"], d["state"], d["message"]) for d in page["items"]] == [
        (delivery, "DEAD", "there is no AgentPool p in namespace default")
    ]
    assert (await door.get(base + "?state=Dead"))[0] == 400
    assert (await door.get(base, ("emit",)))[0] == 403
    assert (await door.get(base + "?state=DONE")) == (200, {"items": [], "next": None})
    status, answer = await door.get("/v1/namespaces/default/triggers/other/deliveries")
    assert (status, answer["type"]) == (404, "urn:perdure:trigger-not-found")
    assert (await door.post(f"{base}/{uuid4()}/redrive", Authorization=door.bearer("emit")))[0] == 404
    assert (await door.post(f"{base}/x/redrive", Authorization=door.bearer("emit")))[0] == 400
    await door.setup()
    assert (await door.post(f"{base}/{delivery}/redrive", Authorization=door.bearer("emit")))[0] == 202
    await door.round()
    assert (await door.get(base + "?limit=1"))[1]["items"][0]["state"] == "DONE"
