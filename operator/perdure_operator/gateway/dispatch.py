"""Brings runnable runs to the idle pods connected here, straight from Postgres.

While there are idle pods it asks every few milliseconds (an index probe when nothing is queued), and at once when something in this
process made a run runnable or a pod idle. No NOTIFY: it serializes commits. With no idle pod it asks for nothing. Also carries news
to the holders of leases: what another gateway or a service did to a run that is held here.
"""

from __future__ import annotations

from uuid import UUID

import structlog

from perdure import protocol as wire
from perdure_operator.domain.errors import CorruptPayload, LeaseTooLarge, PerdureError
from perdure_operator.gateway.pods import Hub
from perdure_operator.gateway.translate import outcome
from perdure_operator.services.polling import Kick
from perdure_operator.store.store import News, Store

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.015
IN_VAIN_SECONDS = 0.06
"""After a look that found runs and could grant none: a limit holds them, which takes longer to find out than that there is nothing."""
NEWS_SECONDS = 0.05
OUTAGE_SECONDS = 0.5
PODS_A_CLAIM = 64


class Dispatcher:
    def __init__(self, store: Store, gateway: str) -> None:
        self._store = store
        self._gateway = gateway
        self.kick = Kick()
        """Something became runnable or idle: look now."""
        self.kick_news = Kick()
        """Something happened to a run that is held: tell its holder now, if it is ours."""

    async def run(self, hub: Hub) -> None:
        while True:
            pause: float | None = None
            if idle := hub.idle_by_pool():
                pause = POLL_SECONDS
                try:
                    granted = await self._claim(hub, idle)
                    if granted:
                        continue
                    if granted is not None:
                        pause = IN_VAIN_SECONDS
                except PerdureError as error:
                    log.warning("dispatch failed", error=str(error))
                    pause = OUTAGE_SECONDS
            await self.kick.pause(pause)

    async def _claim(self, hub: Hub, idle: dict[str, list[UUID]]) -> int | None:
        """How many runs were granted; None: none could be."""
        pools = await self._store.runnable_pools(list(idle))
        if not pools:
            return None
        grants = await self._store.dispatch(self._gateway, [pod for pool in pools for pod in idle[pool][:PODS_A_CLAIM]])
        for grant in grants:
            hub.granted(grant.run, grant.epoch, grant.pod, "dispatch")
        return len(grants)

    async def run_news(self, hub: Hub) -> None:
        missed = False
        while True:
            pause = NEWS_SECONDS
            if hub.leases():
                try:
                    if missed:
                        await self._store.tell_again(self._gateway)
                        missed = False
                    for news in await self._store.news(self._gateway):
                        await self._tell(hub, news)
                except PerdureError as error:
                    # What was taken counts as told.
                    missed = True
                    log.warning("news could not be brought", error=str(error))
                    pause = OUTAGE_SECONDS
            await self.kick_news.pause(pause)

    async def _tell(self, hub: Hub, news: News) -> None:
        pod = hub.hearer(news.run, news.epoch)
        if pod is None:
            return
        try:
            payloads = await self._store.outcomes(news.outcomes.values(), pod.portion)
        except (LeaseTooLarge, CorruptPayload) as error:
            await hub.undeliverable(pod, news.run, news.epoch, error)
            return
        pod = hub.hearer(news.run, news.epoch)  # asked again: it may have connected anew meanwhile
        if pod is None:
            return
        poke = wire.Poke(
            cancel=news.cancel,
            pause=news.pause,
            outcomes={key: outcome(raw, payloads) for key, raw in news.outcomes.items()},
            signals=news.signals,
        )
        pod.send(wire.Push(run=str(news.run), epoch=news.epoch, poke=wire.encode_json(poke)))
