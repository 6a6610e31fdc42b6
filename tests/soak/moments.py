"""The side channel of the soak: who carries out an effect announces where it is, and a worker that the plan means stands still right there.

An announcement is answered when the worker goes on again, so nothing of it happens behind the soak's back: before the call, between
effect and answer, or after the answer and before the receipt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from uuid import UUID

import psutil
from aiohttp import web
from tests.soak.plan import Freeze

from perdure_operator.local.processes import WorkerPod

LEFT_SECONDS = 110.0
"""A worker that was left to the fleet is ended by it within so long: a minute until it counts as gone, and what a stubborn process gets."""
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

    async def freeze(self, pod: WorkerPod, agent: int, freeze: Freeze, kind: str) -> None:
        """Returns when the worker goes on, or has ended."""
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
            ends = asyncio.create_task(self._over.wait() if freeze.seconds is not None else self._left(pod))
            await asyncio.wait([ends], timeout=freeze.seconds or LEFT_SECONDS)
            if not ends.done() and freeze.seconds is None:
                self._counts["left standing"] += 1
            ends.cancel()
        finally:
            self._standing.difference_update(still)
            for process in still:
                _quietly(process.resume)

    async def _left(self, pod: WorkerPod) -> None:
        over, gone = asyncio.create_task(self._over.wait()), asyncio.create_task(pod.wait())
        try:
            await asyncio.wait([over, gone], return_when=asyncio.FIRST_COMPLETED)
            self._counts["ended by the fleet"] += gone.done()
        finally:
            over.cancel()
            gone.cancel()

    def thaw(self) -> None:
        """All go on, and nothing stands still any more."""
        self._over.set()


def _quietly(do: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.Error):
        do()


class Moments:
    """``freezes``: by business identity; each is met once."""

    def __init__(self, freezes: Mapping[str, Freeze]) -> None:
        self._freezes = dict(freezes)
        self.freezer: Freezer | None = None
        self.url = ""

    async def announced(self, request: web.Request) -> web.Response:
        said = await request.json()
        freeze = self._freezes.pop(said["identity"], None)
        if freeze is not None and self.freezer is not None:
            pod = self.freezer.pod_of(said["pid"])
            if pod is not None:
                await self.freezer.freeze(pod, said["pid"], freeze, f"{said['moment']} an effect")
        return web.json_response({})


@asynccontextmanager
async def listening(freezes: Mapping[str, Freeze]) -> AsyncIterator[Moments]:
    moments = Moments(freezes)
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
