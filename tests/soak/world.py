"""The outside world: a process of its own that carries out whatever it is asked for, and writes each request down before its answer.

It deduplicates nothing, but for the provider of ``retry-same-key``, which knows a key that it has seen; it writes down both requests.
Nothing of the soak kills it. ``python -m tests.soak.world LOG SOAK`` prints its URL, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

SLOWEST = 0.25
"""Seconds between an effect and its answer, at most."""


class World:
    def __init__(self, log: int, soak: str, http: aiohttp.ClientSession) -> None:
        self._log, self._soak, self._http = log, soak, http
        self._by_key: dict[str, str] = {}
        self._executed: set[str] = set()
        self._count = 0

    def _write(self, what: str, about: dict[str, Any]) -> None:
        os.write(self._log, (json.dumps({"what": what, "at": time.time(), **about}) + "\n").encode())

    async def carry_out(self, request: web.Request) -> web.Response:
        order = await request.json()
        key = order["key"]
        known = self._by_key.get(key)
        repeated = order["policy"] == "retry-same-key" and known is not None
        if repeated:
            ref = str(known)
        else:
            self._count += 1
            ref = f"ref-{self._count}"
            self._by_key.setdefault(key, ref)
            self._executed.add(order["identity"])
        self._write("effect", {**order, "ref": ref, "repeated": repeated})
        if order["freeze"] == "in":
            moment = {"identity": order["identity"], "moment": "in", "pid": order["pid"]}
            async with self._http.post(f"{self._soak}/moments", json=moment) as answer:
                await answer.read()
        await asyncio.sleep(zlib.crc32(order["identity"].encode()) % 1000 / 1000 * SLOWEST)
        return web.json_response({"ref": ref})

    async def find(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        ref = self._by_key.get(key)
        self._write("asked", {"key": key, "ref": ref})
        if ref is None:
            raise web.HTTPNotFound
        return web.json_response({"ref": ref})

    async def executed(self, request: web.Request) -> web.Response:
        """Asked by the soak itself: 200 if this was done by now."""
        return web.Response(status=200 if request.query["identity"] in self._executed else 404)

    async def step(self, request: web.Request) -> web.Response:
        self._write("step", await request.json())
        return web.json_response({})


async def main(log: Path, soak: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0)) as http:
        world = World(descriptor, soak, http)
        app = web.Application()
        app.add_routes([
            web.post("/effects", world.carry_out), web.get("/effects/{key}", world.find), web.get("/executed", world.executed),
            web.post("/steps", world.step),
        ])  # fmt: skip
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
