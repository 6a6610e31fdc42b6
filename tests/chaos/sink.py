"""The world outside: a little HTTP service that keeps every call made to it, and can be slow on purpose."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True)
class Call:
    """``what``: whose effect; ``part``: which of them."""

    key: str
    what: str
    part: str


class Sink:
    """Does not deduplicate: each request is an effect, in the order in which it was carried out."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[Call] = []
        self.arrived: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """By ``what``: a call has come, and is carried out or held."""
        self._gates: dict[str, asyncio.Event] = {}
        self.at_the_door: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """By ``what``: somebody is about to call, and waits at the door."""
        self.doors: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def parts(self, what: str) -> list[str]:
        return sorted(call.part for call in self.calls if call.what == what)

    @contextmanager
    def held(self, what: str) -> Iterator[asyncio.Event]:
        """Calls of ``what`` have their effect, and no answer before the event is set or the block ends."""
        gate = self._gates[what] = asyncio.Event()
        try:
            yield gate
        finally:
            gate.set()

    def open(self, what: str) -> None:
        """Calls that come from now on are not held; those that are, still are."""
        self._gates.pop(what, None)

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        call = Call(request.match_info["key"], body["what"], body["part"])
        self.calls.append(call)
        self.arrived[call.what].set()
        if (gate := self._gates.get(call.what)) is not None:
            await gate.wait()
        return web.json_response({"ref": f"ref-{call.part}"})

    async def _door(self, request: web.Request) -> web.Response:
        what = request.match_info["what"]
        self.at_the_door[what].set()
        await self.doors[what].wait()
        return web.json_response({"open": True})

    async def _get(self, request: web.Request) -> web.Response:
        for call in self.calls:
            if call.key == request.match_info["key"]:
                return web.json_response({"ref": f"ref-{call.part}"})
        raise web.HTTPNotFound


@asynccontextmanager
async def sink() -> AsyncIterator[Sink]:
    found = Sink()
    app = web.Application()
    app.router.add_post("/effects/{key}", found._post)
    app.router.add_get("/effects/{key}", found._get)
    app.router.add_get("/doors/{what}", found._door)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        await runner.cleanup()
