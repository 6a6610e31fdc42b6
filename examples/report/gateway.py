"""The few calls of Perdure's public API that the demo makes. Any HTTP client can do the same; the command line `perdure` does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout

NAMESPACE = "default"


class GatewayError(Exception):
    """The gateway said no; ``str()`` is what it said."""


@dataclass(frozen=True)
class Event:
    """One line of a run's log. ``at``: RFC 3339, the database's clock."""

    seq: int
    at: str
    epoch: int
    kind: str
    data: Any


class Gateway:
    """``base`` like http://127.0.0.1:8080. Use it as an asynchronous context manager."""

    def __init__(self, base: str, token: str) -> None:
        self._base = f"{base}/v1/namespaces/{NAMESPACE}"
        self._session = ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=ClientTimeout(total=None, connect=5))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        await self._session.close()

    async def submit(self, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        return await self._call("POST", "/runs", json={"name": name, "spec": spec})

    async def run(self, run: str) -> dict[str, Any]:
        return await self._call("GET", f"/runs/{run}")

    async def descendants(self, run: str) -> list[dict[str, Any]]:
        descendants: list[dict[str, Any]] = (await self._call("GET", f"/runs/{run}/tree"))["descendants"]
        return descendants

    async def records(self, run: str, what: str) -> list[dict[str, Any]]:
        """``what``: journal or ledger."""
        items: list[dict[str, Any]] = (await self._call("GET", f"/runs/{run}/{what}"))["items"]
        return items

    async def signal(self, run: str, name: str, payload: object, key: str) -> None:
        await self._call("POST", f"/runs/{run}/signals/{name}", json=payload, headers={"Idempotency-Key": key})

    async def until_pool(self, name: str, *, idle: int = 0) -> None:
        """Returns when the pool is known and has so many warm workers, ready to take a run at once."""
        while True:
            for view in (await self._call("GET", "/pools"))["items"]:
                if view["pool"] == f"{NAMESPACE}/{name}" and view["idle"] >= idle:
                    return
            await asyncio.sleep(0.05)

    async def put_pool(self, name: str, spec: dict[str, Any]) -> None:
        await self._call("PUT", f"/pools/{name}", json={"spec": spec})

    async def tail(self, run: str) -> AsyncIterator[Event]:
        """Every event of the run from its first one, live, across dropped connections, until the run is over."""
        last = 0
        while True:
            try:
                async with self._session.get(f"{self._base}/runs/{run}/tail", params={"from": last + 1}) as response:
                    async for kind, data in _server_sent(response.content):
                        if kind == "end":
                            return
                        body = json.loads(data)
                        last = body["seq"]
                        yield Event(last, body["at"], body["epoch"], kind, body.get("data"))
            except ClientError:
                await asyncio.sleep(0.2)

    async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        async with self._session.request(method, self._base + path, **request) as response:
            body: dict[str, Any] = await response.json(content_type=None)
            if response.status >= 400:
                raise GatewayError(f"{method} {path}: {body.get('detail', body)}")
            return body


async def _server_sent(lines: AsyncIterable[bytes]) -> AsyncIterator[tuple[str, str]]:
    kind, data = "message", ""
    async for line in lines:
        field, _, value = line.decode().rstrip("\r\n").partition(": ")
        if field == "event":
            kind = value
        elif field == "data":
            data += value
        elif not field and (data or kind == "end"):
            yield kind, data
            kind, data = "message", ""
