"""A person's client of the public API: typed where a test reads, raw where a test sends what is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from tests.harness.gateways import PATIENCE, Gateway

from perdure import protocol as wire
from perdure_operator.domain.run import TERMINAL
from perdure_operator.gateway.views import RunView

_problem = msgspec.json.Decoder(wire.Problem)


class View(RunView, kw_only=True):
    """A run as a client reads it."""

    spec: Any = None
    input: Any = None
    result: Any = None


class Refused(Exception):
    """The other side answered with a problem."""

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(f"{problem.type}: {problem.detail}")
        self.problem = problem

    @property
    def code(self) -> str:
        return self.problem.type.removeprefix("urn:perdure:")


@dataclass(frozen=True)
class Reply:
    status: int
    type: str
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def problem(self) -> wire.Problem:
        assert self.type == "application/problem+json", (self.status, self.type, self.body[:500])
        problem = _problem.decode(self.body)
        assert problem.status == self.status
        return problem


@dataclass(frozen=True)
class Sent:
    """One server-sent event."""

    event: str
    id: str
    data: Any


class Api:
    """One person at one gateway; ``namespace`` is part of every path."""

    def __init__(self, gateway: Gateway, token: str, namespace: str = "default") -> None:
        self.gateway = gateway
        self.token = token
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.base = f"/v1/namespaces/{namespace}"

    async def raw(self, method: str, path: str, *, data: bytes | None = None, headers: Mapping[str, str] | None = None) -> Reply:
        """``path`` below the namespace, or from the root with a leading ``//``."""
        url = self.gateway.url + (path[1:] if path.startswith("//") else self.base + path)
        async with self.gateway.http.request(method, url, data=data, headers={**self.headers, **(headers or {})}) as response:
            return Reply(response.status, response.content_type, await response.read())

    async def call(self, method: str, path: str, body: object = None, *, key: str | None = None) -> Any:
        """Decoded answer. Raises Refused."""
        data = wire.encode_json(body) if body is not None else None
        reply = await self.raw(method, path, data=data, headers={"Idempotency-Key": key} if key else None)
        if reply.status >= 400:
            raise Refused(reply.problem)
        return reply.json

    async def create(self, name: str | None = None, *, pool: str = "p", key: str | None = None, **spec: Any) -> str:
        """Creates a run and gives its id. ``spec``: fields of the AgentRun's spec."""
        body: dict[str, Any] = {"spec": {"agent": {"poolRef": {"name": pool}}, **spec}}
        if name is not None:
            body["name"] = name
        return str((await self.call("POST", "/runs", body, key=key))["runId"])

    async def create_many(self, names: list[str], *, pool: str = "p", **spec: Any) -> list[str]:
        runs = [{"name": name, "spec": {"agent": {"poolRef": {"name": pool}}, **spec}} for name in names]
        return [run["runId"] for run in (await self.call("POST", "/runs", {"runs": runs}))["items"]]

    async def view(self, run: str) -> View:
        return msgspec.convert(await self.call("GET", f"/runs/{run}"), View)

    async def verb(self, run: str, verb: str) -> View:
        return msgspec.convert(await self.call("POST", f"/runs/{run}/{verb}"), View)

    async def signal(self, run: str, name: str, payload: object = None, *, key: str | None = None) -> dict[str, Any]:
        """``{"seq", "duplicate", "id"}``"""
        answer: dict[str, Any] = await self.call("POST", f"/runs/{run}/signals/{name}", payload, key=key)
        return answer

    async def events(self, run: str) -> list[dict[str, Any]]:
        return list((await self.call("GET", f"/runs/{run}/events?limit=5000"))["items"])

    async def kinds(self, run: str) -> list[str]:
        return [event["kind"] for event in await self.events(run)]

    async def until(self, run: str, *states: str, seconds: float = PATIENCE) -> View:
        """The run when it is in one of these states (any terminal one when none is named)."""
        wanted = states or tuple(TERMINAL)
        deadline = time.monotonic() + seconds
        while (view := await self.view(run)).state not in wanted:
            assert time.monotonic() < deadline, f"run is {view.state} ({view.reason}: {view.message}), not {wanted}"
            await asyncio.sleep(0.01)
        return view

    async def tail(self, run: str, *, start: int = 1, last_event_id: str | None = None) -> AsyncIterator[Sent]:
        """The stream of server-sent events, until it ends. Raises Refused."""
        headers = {**self.headers, **({"Last-Event-ID": last_event_id} if last_event_id is not None else {})}
        url = f"{self.gateway.url}{self.base}/runs/{run}/tail?from={start}"
        async with self.gateway.http.get(url, headers=headers) as response:
            if response.status >= 400:
                raise Refused(_problem.decode(await response.read()))
            assert response.content_type == "text/event-stream"
            fields: dict[str, str] = {}
            async for line in response.content:
                text = line.decode().rstrip("\n")
                if text and not text.startswith(":"):
                    name, _, value = text.partition(": ")
                    fields[name] = value
                elif fields:
                    yield Sent(fields.get("event", ""), fields.get("id", ""), msgspec.json.decode(fields.get("data", "null")))
                    fields = {}

    async def tail_of(self, run: str, count: int, **options: Any) -> list[Sent]:
        """The first ``count`` events of a tail, which is then cut."""
        found: list[Sent] = []
        async with aclosing(self.tail(run, **options)) as events:  # type: ignore[type-var]
            async for event in events:
                found.append(event)
                if len(found) == count:
                    break
        return found
