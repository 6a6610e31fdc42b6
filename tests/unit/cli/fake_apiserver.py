"""As much of an apiserver as the command line asks for: objects, tokens of service accounts, logs, and port-forwards to a real port."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from aiohttp import WSMsgType, web
from tests.unit.cli.fake_gateway import Server

Object = dict[str, Any]
_PATH = re.compile(
    r"/(?:api/v1|apis/perdure\.dev/v1alpha1)(?:/namespaces/(?P<ns>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    authorization: str
    body: Any
    query: dict[str, str]


class FakeApiServer(Server):
    """``objects`` by plural, namespace and name. ``forbidden``: "METHOD path". ``logs``: text by pod and container. ``target``: the port of
    this machine that every port-forward reaches; ``refuse``: what the node says instead. ``tokens``: the credentials that it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.forbidden: set[str] = set()
        self.logs: dict[tuple[str, str], str] = {}
        self.target = 0
        self.refuse = ""
        self.tokens = {"the-token"}
        self.asked: list[Asked] = []
        self.forwards: list[str] = []

    def add(self, plural: str, namespace: str, name: str, **content: Any) -> Object:
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", **content.pop("metadata", {})}
        made = self.objects[plural, namespace, name] = {"metadata": metadata, **content}
        return made

    def paths(self, method: str = "GET") -> list[str]:
        return [asked.path for asked in self.asked if asked.method == method]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.text() if request.method in ("POST", "PUT") else ""
        authorization = request.headers.get("Authorization", "")
        self.asked.append(Asked(request.method, request.path, authorization, json.loads(raw) if raw else None, dict(request.query)))
        if authorization.removeprefix("Bearer ") not in self.tokens:
            return status(401, "Unauthorized", "Unauthorized")
        if f"{request.method} {request.path}" in self.forbidden:
            return status(403, "Forbidden", f'User "ada" cannot {request.method} {request.path}')
        found = _PATH.fullmatch(request.path)
        assert found is not None, request.path
        place, plural, name, sub = found["ns"], found["plural"], found["name"], found["sub"]
        if sub == "portforward":
            return await self._forward(request, name)
        if sub == "log":
            return await self._log(request, name)
        if sub == "token":
            token = f"token-of-{place}-{name}-{len(self.tokens)}"
            self.tokens.add(token)
            return web.json_response({"status": {"token": token}}, status=201)
        if request.method == "POST":
            return self._create(plural, place, json.loads(raw))
        if name is None:
            return self._list(plural, place, request.query.get("labelSelector", ""))
        one = self.objects.get((plural, place, name))
        return web.json_response(one) if one is not None else status(404, "NotFound", f'{plural} "{name}" not found')

    def _create(self, plural: str, namespace: str, body: Object) -> web.Response:
        name = body["metadata"]["name"]
        if (plural, namespace, name) in self.objects:
            return status(409, "AlreadyExists", f'{plural} "{name}" already exists')
        content = {key: value for key, value in body.items() if key != "metadata"}
        return web.json_response(self.add(plural, namespace, metadata=body["metadata"], name=name, **content), status=201)

    def _list(self, plural: str, namespace: str | None, selector: str) -> web.Response:
        wanted = dict(pair.split("=") for pair in selector.split(",") if pair)
        items = [
            item
            for (kind, place, _), item in self.objects.items()
            if kind == plural and namespace in (None, place) and wanted.items() <= item["metadata"].get("labels", {}).items()
        ]
        return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})

    async def _log(self, request: web.Request, pod: str) -> web.StreamResponse:
        if (text := self.logs.get((pod, request.query["container"]))) is None:
            return status(404, "NotFound", f'pods "{pod}" not found')
        lines = [line for line in text.splitlines(keepends=True) if line.split(" ", 1)[0] >= request.query.get("sinceTime", "")]
        response = web.StreamResponse()
        await response.prepare(request)
        for number, line in enumerate(lines):
            await response.write(line.encode())
            if line.endswith("CUT\n") and number > 0 and request.transport is not None:
                # What a proxy does that restarts; the line itself has arrived.
                self.logs[pod, request.query["container"]] = text.replace("CUT\n", "\n")
                await asyncio.sleep(0)
                request.transport.abort()
                break
        return response

    async def _forward(self, request: web.Request, pod: str) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        self.forwards.append(pod)
        port = int(request.query["ports"]).to_bytes(2, "little")
        await socket.send_bytes(b"\x00" + port)
        await socket.send_bytes(b"\x01" + port)
        if self.refuse:
            await socket.send_bytes(b"\x01" + self.refuse.encode())
            await socket.close()
            return socket
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target)

        async def back() -> None:
            while data := await reader.read(65536):
                await socket.send_bytes(b"\x00" + data)
            await socket.close()

        returning = asyncio.create_task(back())
        async for message in socket:
            assert message.type is WSMsgType.BINARY
            assert message.data[:1] == b"\x00"
            writer.write(message.data[1:])
        returning.cancel()
        writer.close()
        return socket


def status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message, "details": {"kind": "x"}}
    return web.json_response(body, status=code)
