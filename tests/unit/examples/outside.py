"""The sinks of the report example, as a test talks to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from examples.report.backstage import Sinks, running_sinks


@dataclass(frozen=True)
class Outside:
    at: Sinks
    client: ClientSession

    async def effects(self, kind: str, **query: str) -> list[dict[str, Any]]:
        async with self.client.get(f"{self.at.http}/{kind}", params=query) as response:
            items: list[dict[str, Any]] = (await response.json())["items"]
            return items

    async def put(self, name: str, body: bytes, key: str) -> int:
        """The status of the answer."""
        async with self.client.put(f"{self.at.http}/objects/{name}", data=body, headers={"Idempotency-Key": key}) as response:
            return response.status

    async def object(self, name: str) -> bytes | None:
        async with self.client.get(f"{self.at.http}/objects/{name}") as response:
            return await response.read() if response.status == 200 else None


@asynccontextmanager
async def outside(folder: Path, *options: str) -> AsyncIterator[Outside]:
    async with running_sinks(folder, *options) as at, ClientSession() as client:
        yield Outside(at, client)
