"""Keeps the leases of connected pods alive: one statement a gateway a beat, not one a pod.

A connection is no proof of life: a stopped process keeps its socket. So a lease is renewed only for a pod that has sent a frame since the
last time. What the store does not confirm is lost, and the pod is told. A beat passes over what a batch is working on; under a storm of
signals that could be a whole lease long, so the second time it waits a moment; of a few at once, because all others wait for that.
"""

from __future__ import annotations

import asyncio

import structlog

from perdure import protocol as wire
from perdure_operator.domain.errors import PerdureError
from perdure_operator.gateway.pods import Hub
from perdure_operator.store.store import Beat, Store

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 0.5
RENEWED_AT_ONCE = 8
"""The least silent first: what has been locked for longest will most likely be so again."""


class Heartbeats:
    def __init__(self, store: Store, gateway: str, hub: Hub, *, lease_seconds: float) -> None:
        self._store = store
        self._gateway = gateway
        self._hub = hub
        self._interval = lease_seconds / 4
        self._before = 0.0

    async def run(self) -> None:
        pause = self._interval
        while True:
            await asyncio.sleep(pause)
            pause = self._interval
            try:
                await self.beat()
            except PerdureError as error:
                log.warning("heartbeats could not be written", error=str(error))
                # By then no lease has been renewed for an interval and an outage: the first moment that it can be counts.
                pause = min(self._interval, AGAIN_SECONDS)

    async def beat(self) -> None:
        since, self._before = self._before, asyncio.get_running_loop().time()
        leases = self._hub.leases(heard_since=since)
        waiting = [pod.id for pod in self._hub.pods.values() if pod.held is None]
        beats = [Beat(run, fence.epoch, fence.holder) for run, fence in leases]
        alive = {a.run: a for a in await self._store.heartbeat(self._gateway, beats, waiting)}
        silent = {beat: alive[beat.run].silent_seconds for beat in beats if beat.run in alive}
        passed_over = sorted((b for b in silent if silent[b] > 1.5 * self._interval), key=lambda b: silent[b])
        await asyncio.gather(*(self._store.renew(beat) for beat in passed_over[:RENEWED_AT_ONCE]))
        for run, fence in leases:
            state = alive.get(run)
            if state is None:
                self._hub.lost(run, fence, "the lease was not renewed in time")
            elif state.cancel or state.pause:
                pod = self._hub.holder(run)
                if pod is not None:
                    poke = wire.encode_json(wire.Poke(cancel=state.cancel, pause=state.pause))
                    pod.send(wire.Push(run=str(run), epoch=fence.epoch, poke=poke))
        for fate in await self._store.fates(waiting) if waiting else []:
            pod = self._hub.pods.get(fate.pod) if fate.pod else None
            if pod is None or pod.held is not None:
                continue
            if fate.run is not None and fate.epoch is not None:
                # The commit of the lease was not answered: nobody here knew of it.
                self._hub.granted(fate.run, fate.epoch, pod.id, "found")
            elif fate.status == "free":
                # One that heard of its run is cleaning up, and will say when it is done.
                if self._hub.waits(pod):
                    await self._hub.restore(pod)
            else:
                self._hub.not_idle(pod)
                pod.send(wire.Retire(reason="the pool has more idle pods than it needs"))
