"""The client against a server that answers as told: what each refusal becomes, and how the client behaves towards the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from perdure_operator.kube.client import AGENTRUNS, CONFIGMAPS, PODS, KubeClient, KubeSettings
from perdure_operator.kube.connection import Connection, Endpoint
from perdure_operator.kube.errors import KubeConflict, KubeError, KubeForbidden, KubeInvalid, KubeNotFound, KubeUnavailable

Answer = tuple[int, Any, dict[str, str]]
OBJECT = {"metadata": {"name": "a", "uid": "1", "resourceVersion": "7"}}


def status(code: int, reason: str = "", message: str = "no", headers: dict[str, str] | None = None, **details: Any) -> Answer:
    return code, {"kind": "Status", "reason": reason, "message": message, "details": details, "code": code}, headers or {}


class Tokens(Connection):
    """``old`` until it is asked for a fresh one."""

    def __init__(self, server: str) -> None:
        super().__init__(1e9)
        self.endpoint = Endpoint(server)
        self.values = iter(("Bearer old", "Bearer new", "Bearer newer"))

    async def _read(self) -> str | None:
        return next(self.values)


@dataclass
class Server:
    """Answers in the order given; the last one for ever."""

    answers: list[Answer] = field(default_factory=lambda: [(200, OBJECT, {})])
    requests: list[web.Request] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    silent: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        text = await request.text()
        self.bodies.append(json.loads(text) if text else None)
        code, body, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if code == 0:
            await self.silent.wait()
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=code or 200, text=text, headers=headers)

    @asynccontextmanager
    async def client(self, settings: KubeSettings = KubeSettings()) -> AsyncIterator[KubeClient]:  # noqa: B008 (frozen)
        async with KubeClient(Tokens(self.address), settings) as client:
            yield client


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", server.handle)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.address = f"http://{host}:{port}"
    yield server
    server.silent.set()
    await runner.cleanup()


# ------------------------------------------------------------------------------------------------------------- refusals

REFUSALS: dict[str, tuple[Answer, type[KubeError], dict[str, Any]]] = {
    "a name that is taken": (status(409, "AlreadyExists"), KubeConflict, {"exists": True}),
    "a precondition": (status(409, "Conflict"), KubeConflict, {"exists": False}),
    "two pods that met at a quota": (status(409, "Conflict", kind="resourcequotas"), KubeUnavailable, {}),
    "another uid": (status(422, "Invalid", causes=[{"field": "metadata.uid"}]), KubeConflict, {"exists": False}),
    "a wrong field": (status(422, "Invalid", causes=[{"field": "spec.x"}]), KubeInvalid, {}),
    "a wrong request": (status(400, "BadRequest"), KubeInvalid, {}),
    "no right": (status(403, "Forbidden", 'pods is forbidden: User "x" cannot create'), KubeForbidden, {"quota": False}),
    "no room": (status(403, "Forbidden", "pods is forbidden: exceeded quota: q, requested: pods=1"), KubeForbidden, {"quota": True}),
    "no limits": (status(403, "Forbidden", "failed quota: q: must specify limits.cpu"), KubeForbidden, {"quota": True}),
    "no such namespace": (status(404, "NotFound", kind="namespaces", name="x"), KubeNotFound, {}),
    "no such kind": ((404, "404 page not found\n", {}), KubeUnavailable, {"retry_after": None}),
    "too many": (status(429, "TooManyRequests", headers={"Retry-After": "2"}), KubeUnavailable, {"retry_after": 2.0}),
    "too many, told in the body": (status(429, "TooManyRequests", retryAfterSeconds=3), KubeUnavailable, {"retry_after": 3}),
    "broken": (status(500, "InternalError"), KubeUnavailable, {"retry_after": None}),
    "a proxy's page": ((502, "<html>Bad Gateway</html>", {}), KubeUnavailable, {}),
    "gone": (status(410, "Expired"), KubeUnavailable, {}),
    "not let in": (status(401, "Unauthorized"), KubeUnavailable, {}),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_refusals_are_typed(server: Server, name: str) -> None:
    answer, kind, attributes = REFUSALS[name]
    server.answers = [answer]
    async with server.client() as client:
        with pytest.raises(kind, match=r"create /api/v1/namespaces/default/pods: \d+ ") as caught:
            await client.create(PODS, "default", {"metadata": {"name": "a"}})
    assert {key: getattr(caught.value, key) for key in attributes} == attributes
    assert caught.value.retryable is (kind in (KubeUnavailable, KubeConflict))


async def test_a_kind_that_is_not_served_is_not_an_absent_object(server: Server) -> None:
    async with server.client() as client:
        server.answers = [status(404, "NotFound", kind="agentruns", name="a")]
        assert await client.get(AGENTRUNS, "default", "a") is None
        assert not await client.delete(AGENTRUNS, "default", "a", uid="1")
        server.answers = [(404, "404 page not found\n", {})]
        for call in (client.get(AGENTRUNS, "default", "a"), client.delete(AGENTRUNS, "default", "a", uid="1")):
            with pytest.raises(KubeUnavailable):
                await call


async def test_a_delete_that_conflicts_looks_whose_uid_it_is(server: Server) -> None:
    async with server.client() as client:
        server.answers = [status(409, "Conflict"), (200, OBJECT, {})]
        assert not await client.delete(PODS, "default", "a", uid="other")
        server.answers = [status(409, "Conflict"), (200, OBJECT, {})]
        with pytest.raises(KubeConflict):
            await client.delete(PODS, "default", "a", uid="1")


async def test_a_server_out_of_reach(server: Server, unused_tcp_port: int) -> None:
    server.address = f"http://127.0.0.1:{unused_tcp_port}"
    async with server.client() as client:
        with pytest.raises(KubeUnavailable, match="did not answer"):
            await client.get(PODS, "default", "a")


async def test_a_server_that_does_not_answer_in_time(server: Server) -> None:
    server.answers = [(0, "", {})]
    async with server.client(KubeSettings(timeout=0.05)) as client:
        with pytest.raises(KubeUnavailable, match="did not answer"):
            await client.get(PODS, "default", "a")


# ------------------------------------------------------------------------------------------------------------- requests


async def test_a_token_that_is_refused_is_read_anew_once(server: Server) -> None:
    server.answers = [status(401), (200, OBJECT, {})]
    async with server.client() as client:
        await client.get(PODS, "default", "a")
        await client.get(PODS, "default", "a")
        server.answers = [status(401)]
        with pytest.raises(KubeUnavailable):
            await client.get(PODS, "default", "a")
    tokens = [request.headers["Authorization"] for request in server.requests]
    assert tokens == ["Bearer old", "Bearer new", "Bearer new", "Bearer new", "Bearer newer"]


async def test_retry_after_holds_the_next_request(server: Server) -> None:
    server.answers = [status(429, headers={"Retry-After": "20"}), (200, OBJECT, {})]
    async with server.client(KubeSettings(timeout=5)) as client:
        for _ in range(2):
            with pytest.raises(KubeUnavailable) as caught:
                await client.get(PODS, "default", "a")
            assert caught.value.retry_after is not None
            assert 19 < caught.value.retry_after <= 20
    assert len(server.requests) == 1


async def test_the_rate_is_limited_here(server: Server) -> None:
    async with server.client(KubeSettings(rate=0.01, burst=3, timeout=5)) as client:
        for _ in range(3):
            await client.get(PODS, "default", "a")
        with pytest.raises(KubeUnavailable, match="this client"):
            await client.get(PODS, "default", "a")


async def test_names_cannot_leave_their_place_in_the_path(server: Server) -> None:
    async with server.client() as client:
        await client.get(PODS, "default", "../secrets/a?x=1#y")
    assert server.requests[0].raw_path == "/api/v1/namespaces/default/pods/..%2Fsecrets%2Fa%3Fx%3D1%23y"


async def test_writes_name_their_manager_and_content(server: Server) -> None:
    async with server.client() as client:
        await client.create(CONFIGMAPS, "default", {"metadata": {"name": "a"}})
        await client.merge_patch(AGENTRUNS, "default", "a", {"status": {"x": "ü"}}, subresource="status")
        await client.json_patch(AGENTRUNS, "default", "a", [{"op": "remove", "path": "/x"}])
        await client.delete(PODS, "default", "a", uid="1", grace_seconds=0, propagation="Background")
    create, merge, operations, delete = server.requests
    assert {request.query.get("fieldManager") for request in (create, merge, operations)} == {"perdure-operator"}
    assert [request.content_type for request in server.requests] == [
        "application/json", "application/merge-patch+json", "application/json-patch+json", "application/json",
    ]  # fmt: skip
    assert server.bodies[0] == {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    assert (merge.path, server.bodies[1]) == ("/apis/perdure.dev/v1alpha1/namespaces/default/agentruns/a/status", {"status": {"x": "ü"}})
    options = {"preconditions": {"uid": "1"}, "gracePeriodSeconds": 0, "propagationPolicy": "Background"}
    assert server.bodies[3] == {"apiVersion": "v1", "kind": "DeleteOptions", **options}
    assert all(request.headers["User-Agent"] == "perdure-operator" for request in server.requests)
    assert delete.method == "DELETE"


async def test_a_status_patch_with_a_uid_is_fenced_by_what_was_read(server: Server) -> None:
    """An apiserver ignores the uid there."""
    async with server.client() as client:
        server.answers = [
            (200, OBJECT, {}),
            status(409, "Conflict"),
            (200, {"metadata": {**OBJECT["metadata"], "resourceVersion": "8"}}, {}),
            (200, OBJECT, {}),
        ]
        await client.merge_patch(AGENTRUNS, "default", "a", {"metadata": {"uid": "1"}, "status": {}}, subresource="status")
        patches = [body for body in server.bodies if body]
        assert [patch["metadata"]["resourceVersion"] for patch in patches] == ["7", "8"]
        server.answers = [(200, OBJECT, {})]
        with pytest.raises(KubeConflict):
            await client.merge_patch(AGENTRUNS, "default", "a", {"metadata": {"uid": "2"}, "status": {}}, subresource="status")
        server.answers = [status(404, "NotFound", name="a")]
        with pytest.raises(KubeNotFound):
            await client.merge_patch(AGENTRUNS, "default", "a", {"metadata": {"uid": "1"}, "status": {}}, subresource="status")


async def test_a_list_whose_pages_expire_is_read_at_once(server: Server) -> None:
    def page(name: str, token: str = "") -> Answer:
        return 200, {"items": [{"metadata": {"name": name}}], "metadata": {"resourceVersion": "5", "continue": token}}, {}

    server.answers = [page("a", "token"), status(410, "Expired"), page("b")]
    async with server.client() as client:
        items, version = await client.list(PODS, None, labels="x=y")
    assert [item["metadata"]["name"] for item in items] == ["b"]
    assert version == "5"
    assert [dict(request.query) for request in server.requests] == [
        {"limit": "500", "labelSelector": "x=y"},
        {"limit": "500", "labelSelector": "x=y", "continue": "token"},
        {"limit": "0", "labelSelector": "x=y"},
    ]


async def test_requests_are_counted(server: Server) -> None:
    def count(verb: str, resource: str, code: str) -> float:
        return REGISTRY.get_sample_value("perdure_kube_requests_total", {"verb": verb, "resource": resource, "code": code}) or 0.0

    before = count("patch", "agentruns/status", "200"), count("create", "pods", "409"), count("get", "pods", "none")
    async with server.client(KubeSettings(timeout=0.5)) as client:
        await client.merge_patch(AGENTRUNS, "default", "a", {"status": {}}, subresource="status")
        server.answers = [status(409, "AlreadyExists")]
        with pytest.raises(KubeConflict):
            await client.create(PODS, "default", {})
        server.answers = [(0, "", {})]
        with pytest.raises(KubeUnavailable):
            await client.get(PODS, "default", "a")
    after = count("patch", "agentruns/status", "200"), count("create", "pods", "409"), count("get", "pods", "none")
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]
