"""A :class:`FakeKube` behind HTTP, as far as informers need: discovery, lists and watches, and the ways in which watches break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from tests.harness.fake_kube import FakeKube
from tests.harness.selectors import selects

from perdure_operator.kube.client import Object, Resource
from perdure_operator.kube.connection import Connection, Endpoint
from perdure_operator.kube.resources import NAMESPACES

_CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
_END = object()


class _Known(Connection):
    def __init__(self, server: str) -> None:
        super().__init__(0.0)
        self.endpoint = Endpoint(server, verify=False)
        self.tokens = iter(range(1, 1_000_000))

    async def _read(self) -> str:
        return f"Bearer {next(self.tokens)}"


class FakeApiServer:
    """``tokens``: what requests were authorized by. ``refuse``: answered to lists and watches instead, until it is None again."""

    def __init__(self, kube: FakeKube, resources: Sequence[Resource]) -> None:
        self.kube = kube
        self.tokens: list[str] = []
        self.refuse: int | None = None
        self.deaf = False
        """New events reach nobody: the connection is there, and dead."""
        self.watches = 0
        self.news = asyncio.Condition()
        self._resources = (*resources, NAMESPACES, _CRDS)
        self._streams: dict[asyncio.Queue[Any], tuple[Resource, str | None, str]] = {}
        self._history: list[tuple[int, str, Resource, Object]] = []
        self._forgotten = 0
        kube.subscribe(self._happened)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeApiServer]:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._get)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.server = f"http://{host}:{port}"
        try:
            yield self
        finally:
            self.cut()
            await runner.cleanup()

    async def connection(self) -> Connection:
        return _Known(self.server)

    async def watched(self, times: int) -> None:
        """Returns when so many watches have begun since the start."""
        async with self.news:
            await self.news.wait_for(lambda: self.watches >= times)

    async def asked(self, times: int) -> None:
        """Returns when there were so many requests since the start."""
        async with self.news:
            await self.news.wait_for(lambda: len(self.tokens) >= times)

    def cut(self) -> None:
        """Ends all watches, as a restart or a load balancer does."""
        for stream in [*self._streams]:
            stream.put_nowait(_END)

    def expire(self) -> None:
        """Ends all watches, and forgets what happened so far: they cannot go on from where they were."""
        self._forgotten = self.kube.version
        self.cut()

    def _happened(self, what: str, resource: Resource, found: Object) -> None:
        event = (int(found["metadata"]["resourceVersion"]), what, resource, found)
        self._history.append(event)
        if not self.deaf:
            for stream, place in self._streams.items():
                if _fits(event, *place):
                    stream.put_nowait(event)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        async with self.news:
            self.news.notify_all()
        if (found := self._discovery(request.path)) is not None:
            return web.json_response(found)
        for resource in self._resources:
            namespace = request.path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in request.path else None
            if request.path == resource.path(namespace):
                if self.refuse is not None:
                    return web.json_response({"kind": "Status", "code": self.refuse, "message": "refused"}, status=self.refuse)
                labels = request.query.get("labelSelector", "")
                if "watch" in request.query:
                    return await self._watch(request, resource, namespace, labels)
                items, version = await self.kube.list(resource, namespace, labels=labels)
                return web.json_response({"kind": f"{resource.kind}List", "items": items, "metadata": {"resourceVersion": version}})
        return web.json_response({"kind": "Status", "code": 404}, status=404)

    def _discovery(self, path: str) -> Object | None:
        groups = {resource.group: resource.version for resource in self._resources if resource.group}
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            versions = {group: {"version": version} for group, version in groups.items()}
            return {"groups": [{"name": group, "versions": [one], "preferredVersion": one} for group, one in versions.items()]}
        found = [
            resource
            for resource in self._resources
            if path in (f"/apis/{resource.group}/{resource.version}", f"/api/{resource.api_version}")
        ]
        if not found:
            return None
        return {
            "resources": [
                {"name": one.plural, "singularName": "", "kind": one.kind, "namespaced": one.namespaced, "verbs": ["list", "watch"]}
                for one in found
            ]
        }

    async def _watch(self, request: web.Request, resource: Resource, namespace: str | None, labels: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self._forgotten:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        stream: asyncio.Queue[Any] = asyncio.Queue()
        for event in self._history:
            if event[0] > since and _fits(event, resource, namespace, labels):
                stream.put_nowait(event)
        self._streams[stream] = (resource, namespace, labels)
        async with self.news:
            self.watches += 1
            self.news.notify_all()
        try:
            while (event := await stream.get()) is not _END:
                await response.write(json.dumps({"type": event[1], "object": event[3]}).encode() + b"\n")
        finally:
            del self._streams[stream]
        return response


def _fits(event: tuple[int, str, Resource, Object], resource: Resource, namespace: str | None, labels: str) -> bool:
    metadata = event[3]["metadata"]
    return event[2] == resource and namespace in (None, metadata.get("namespace")) and selects(labels, metadata.get("labels", {}))
