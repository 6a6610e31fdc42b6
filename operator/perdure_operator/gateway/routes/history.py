"""What happened: events, journal and ledger of a run, and its live tail as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from uuid import UUID

from aiohttp import web

from perdure import protocol as wire
from perdure_operator.domain.errors import Unavailable
from perdure_operator.domain.run import State
from perdure_operator.gateway.http import ENDING, authorize, integer, reply, whole
from perdure_operator.gateway.views import event_view, record
from perdure_operator.store.store import Store

PAGE, MOST = 500, 5000
TAIL_SECONDS = 0.1
KEEPALIVE_SECONDS = 15.0


class History:
    def __init__(self, store: Store) -> None:
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        base = "/v1/namespaces/{ns}/runs/{run}"
        return [
            web.get(base + "/events", self.events),
            web.get(base + "/journal", self.journal),
            web.get(base + "/ledger", self.ledger),
            web.get(base + "/tail", self.tail),
        ]

    async def events(self, request: web.Request) -> web.Response:
        await authorize(request, "get")
        start, limit = integer(request, "from", 1, 1, 1 << 62), integer(request, "limit", PAGE, 1, MOST)
        async with self._store.reader() as reader:
            events, more = await reader.events(await reader.find(request.match_info["ns"], request.match_info["run"]), start, limit)
        return reply({"items": [event_view(e) for e in events], "next": events[-1].seq + 1 if more else None})

    async def journal(self, request: web.Request) -> web.Response:
        await authorize(request, "get")
        start, limit = integer(request, "from", 1, 1, 1 << 62), integer(request, "limit", MOST, 1, MOST)
        async with self._store.reader() as reader:
            rows, following = await reader.journal(await reader.find(request.match_info["ns"], request.match_info["run"]), start, limit)
        return reply({"items": [record(row) for row in rows], "next": following})

    async def ledger(self, request: web.Request) -> web.Response:
        await authorize(request, "get")
        start, limit = integer(request, "from", 1, 1, 1 << 62), integer(request, "limit", MOST, 1, MOST)
        async with self._store.reader() as reader:
            rows, following = await reader.ledger(await reader.find(request.match_info["ns"], request.match_info["run"]), start, limit)
        return reply({"items": [record(row) for row in rows], "next": following})

    async def tail(self, request: web.Request) -> web.StreamResponse:
        """Events from a sequence on, then each new one; ends with the event ``end`` when the run is terminal. ``Last-Event-ID`` resumes."""
        await authorize(request, "get")
        start = integer(request, "from", 1, 1, 1 << 62)
        if (last := request.headers.get("Last-Event-ID")) is not None:
            start = whole(last, "Last-Event-ID", 0, 1 << 62) + 1
        async with self._store.reader() as reader:
            run = await reader.find(request.match_info["ns"], request.match_info["run"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError, Unavailable):  # the reader has gone, or comes back with Last-Event-ID
            await self._follow(run, start, response, request.app[ENDING])
        return response

    async def _follow(self, run: UUID, start: int, response: web.StreamResponse, ending: asyncio.Event) -> None:
        quiet = 0.0
        while not ending.is_set():
            async with self._store.reader() as reader:
                # State first: whatever is terminal here has all its events below.
                _, state = await reader.last_seq(run)
                events, more = await reader.events(run, start, PAGE)
            for event in events:
                start = event.seq + 1
                data = wire.encode_json(event_view(event)).decode()
                await response.write(f"id: {event.seq}\nevent: {event.kind}\ndata: {data}\n\n".encode())
            if more:
                continue
            if State(state).terminal:
                await response.write(f'event: end\ndata: {{"state":"{state}"}}\n\n'.encode())
                return
            quiet = 0.0 if events else quiet + TAIL_SECONDS
            if quiet >= KEEPALIVE_SECONDS:
                quiet = 0.0
                await response.write(b": still here\n\n")
            await asyncio.sleep(TAIL_SECONDS)
