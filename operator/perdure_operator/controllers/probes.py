"""What kubelet and Prometheus ask the operator.

Alive: the loop turns. Ready: the store answers; a replica that stands by is as ready as the one that leads.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from perdure_operator.domain.errors import PerdureError
from perdure_operator.services.elector import Elector
from perdure_operator.store.store import Store


def probes(store: Store, elector: Elector) -> web.Application:
    async def alive(_: web.Request) -> web.Response:
        return _json(200, {"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        try:
            await store.pools()
        except PerdureError as error:
            return _json(503, {"status": "the store does not answer", "detail": str(error)})
        return _json(200, {"status": "ready", "leading": elector.term is not None})

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", scrape)])
    return app


def _json(status: int, body: dict[str, object]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
