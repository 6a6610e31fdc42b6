"""The side channel of the soak: who carries out an effect announces where it is, and a worker that the plan means stands still right there.

An announcement is answered when the worker goes on again, so nothing of it happens behind the soak's back: before the call, between
effect and answer, or after the answer and before the receipt.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import aiohttp
import psutil
from aiohttp import web
from tests.soak.plan import Freeze

from perdure_operator.local.processes import WorkerPod

LEFT_SECONDS = 110.0
"""A worker that was left to the fleet is ended by it within so long: a minute until it counts as gone, and what a stubborn process gets."""
LOOK_SECONDS = 0.1
AT_ONCE = 3
"""Workers that stand still at a time; more would leave none to go on with."""


class Freezer:
    """Stops processes of workers. ``pods``: those of the fleet."""

    def __init__(self, pods: Callable[[], Mapping[UUID, WorkerPod]], counts: Counter[str]) -> None:
        self._pods, self._counts = pods, counts
        self._standing: set[psutil.Process] = set()
        self._over = asyncio.Event()

    def pod_of(self, pid: int) -> WorkerPod | None:
        """The worker that this process, or one of its parents, is the agent of."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            family = {pid, *(parent.pid for parent in process.parents())}
            return next((pod for pod in self._pods().values() if pod.agent.pid in family), None)
        return None

    async def freeze(
        self, pod: WorkerPod, agent: int, freeze: Freeze, kind: str, until: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Returns when the worker goes on, or has ended. ``until``: it stands still for this, for twice as long at most."""
        if self._over.is_set() or (not freeze.kills and len(self._standing) >= 2 * AT_ONCE):
            return
        pids = {"agent": [agent], "sidecar": [pod.sidecar.pid], "both": [agent, pod.sidecar.pid]}[freeze.who]
        still = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                process.kill() if freeze.kills else process.suspend()
                still.append(process)
        self._counts[f"{freeze.who} {'killed' if freeze.kills else 'frozen'} {kind}"] += 1
        if freeze.kills:
            return
        self._standing.update(still)
        try:
            if freeze.seconds is None:
                if not await self._first(LEFT_SECONDS, pod.wait()):
                    self._counts["left standing"] += 1
                self._counts["ended by the fleet"] += pod.agent.code is not None
                for process in still:
                    _quietly(process.kill)
            elif until is None:
                await self._first(freeze.seconds)
            else:
                await self._first(2 * freeze.seconds, until())
        finally:
            self._standing.difference_update(still)
            for process in still:
                _quietly(process.resume)

    async def _first(self, seconds: float, *works: Coroutine[Any, Any, object]) -> bool:
        """Whether one of these, or the end of all freezes, comes within so long."""
        tasks = [asyncio.create_task(work) for work in (self._over.wait(), *works)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            for task in tasks:
                task.cancel()

    def thaw(self) -> None:
        """All go on, and nothing stands still any more."""
        self._over.set()


def _quietly(do: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.Error):
        do()


class Moments:
    """``freezes``: by business identity; each is met once. ``world``: URL of the outside world."""

    def __init__(self, freezes: Mapping[str, Freeze], http: aiohttp.ClientSession) -> None:
        self._freezes, self._http = dict(freezes), http
        self.world = ""
        self.freezer: Freezer | None = None
        self.url = ""

    async def announced(self, request: web.Request) -> web.Response:
        said = await request.json()
        freeze = self._freezes.pop(said["identity"], None)
        if freeze is not None and self.freezer is not None:
            pod = self.freezer.pod_of(said["pid"])
            if pod is not None:
                until = functools.partial(self._executed, said["identity"]) if said["moment"] == "before" else None
                await self.freezer.freeze(pod, said["pid"], freeze, f"{said['moment']} an effect", until)
        return web.json_response({})

    async def _executed(self, identity: str) -> None:
        """Somebody else has done it: the worst moment for one who stands still in front of it to go on."""
        while True:
            async with self._http.get(f"{self.world}/executed", params={"identity": identity}) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def listening(freezes: Mapping[str, Freeze]) -> AsyncIterator[Moments]:
    http = aiohttp.ClientSession()
    moments = Moments(freezes, http)
    app = web.Application()
    app.add_routes([web.post("/moments", moments.announced)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    moments.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield moments
    finally:
        await runner.cleanup()
        await http.close()
