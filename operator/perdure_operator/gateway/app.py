"""The gateway as one HTTP application: pods on /v1/pod, people and programs below /v1/namespaces, and the background loops beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from perdure import protocol as wire
from perdure_operator.domain.errors import PerdureError, Unavailable
from perdure_operator.domain.run import TERMINAL
from perdure_operator.gateway.auth import Authenticator
from perdure_operator.gateway.batching import Batcher
from perdure_operator.gateway.dispatch import Dispatcher
from perdure_operator.gateway.heartbeats import Heartbeats
from perdure_operator.gateway.http import AUTHENTICATOR, ENDING, bearer, problems, reply
from perdure_operator.gateway.openapi import openapi
from perdure_operator.gateway.pods import Hub
from perdure_operator.gateway.pools import Pools
from perdure_operator.gateway.routes.history import History
from perdure_operator.gateway.routes.pools import PoolRoutes
from perdure_operator.gateway.routes.runs import Runs
from perdure_operator.gateway.routes.triggers import TriggerRoutes
from perdure_operator.gateway.secrets import NoSecrets, SecretReader
from perdure_operator.observability import metrics
from perdure_operator.services.delivery_router import DeliveryRouter
from perdure_operator.services.reaper import Reaper
from perdure_operator.services.sweeper import Sweeper
from perdure_operator.services.timers import Timers
from perdure_operator.services.trigger_scheduler import TriggerScheduler
from perdure_operator.services.wakeups import WakeupApplier
from perdure_operator.store.operations import Control, Outcome
from perdure_operator.store.store import Store
from perdure_operator.store.triggers import Triggers

log = structlog.get_logger(__name__)
CLOSE_SECONDS = 1.0
"""For which a pod is waited for that was told that its connection ends."""
_TERMINAL = frozenset(str(state) for state in TERMINAL)


class Gateway:
    """One gateway process. All its replicas are alike; there is no leader."""

    def __init__(
        self, store: Store, name: str, authenticator: Authenticator, *, lease_seconds: float, secrets: SecretReader | None = None
    ) -> None:
        """``secrets``: where the keys of webhooks are; without it no webhook is answered."""
        self._store = store
        self._authenticator = authenticator
        self._dispatcher = Dispatcher(store, name)
        self._pools = Pools(store)
        self._hub = Hub(store, name, self._pools, lease_seconds=lease_seconds, kick=self._dispatcher.kick)
        self._batcher = self._hub.batcher = Batcher(store, name, self._hub.idle_pods, self._observe)
        self._wakeups = WakeupApplier(store, self._settle)
        triggers = Triggers(store)
        router = DeliveryRouter(triggers, name, lambda: self._pools.specs, self._pools.refresh, made=self._dispatcher.kick)
        self._trigger_routes = TriggerRoutes(triggers, secrets or NoSecrets(), emitted=router.kick)
        self._loops = {
            "batcher": self._batcher.run,
            "pools": self._pools.run,
            "dispatcher": lambda: self._dispatcher.run(self._hub),
            "news": lambda: self._dispatcher.run_news(self._hub),
            "heartbeats": Heartbeats(store, name, self._hub, lease_seconds=lease_seconds).run,
            "timers": Timers(store, self._settle).run,
            "wakeups": self._wakeups.run,
            "reaper": Reaper(store, self._batcher.apply, lease_seconds=lease_seconds).run,
            "sweeper": Sweeper(store, self._settle).run,
            "triggers": TriggerScheduler(triggers, fired=router.kick).run,
            "deliveries": router.run,
        }

    async def run_loops(self) -> None:
        """The background loops. Each survives outages of the store; any other error in one ends the process, which is then restarted."""
        async with asyncio.TaskGroup() as group:
            for name, loop in self._loops.items():
                group.create_task(loop(), name=name)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[problems], client_max_size=1 << 24)
        app[AUTHENTICATOR] = self._authenticator
        app[ENDING] = asyncio.Event()
        app.on_shutdown.append(self._let_go)
        app.add_routes(
            [
                web.get("/v1/pod", self._pod),
                *Runs(self._store, self._batcher, self._pools, self._dispatcher).routes(),
                *History(self._store).routes(),
                *PoolRoutes(self._store, self._pools).routes(),
                *self._trigger_routes.routes(),
                *self._probes(),
                web.get("/openapi.json", self._openapi),
            ]
        )
        return app

    def probes(self) -> web.Application:
        """Only what kubelets and scrapers ask, for a listener of its own without TLS: they have neither our authority nor a token."""
        app = web.Application(middlewares=[problems])
        app.add_routes(self._probes())
        return app

    def _probes(self) -> list[web.RouteDef]:
        return [web.get("/healthz", self._alive), web.get("/readyz", self._ready), web.get("/metrics", self._metrics)]

    async def _let_go(self, app: web.Application) -> None:
        """Comes when nobody can connect any more. Requests that are being answered are waited for, those that last are not."""
        app[ENDING].set()
        await self._hub.close()

    # ---------------------------------------------------------------------------------------------------------- joints

    def _observe(self, operation: Control, outcome: Outcome) -> None:
        """After every commit of a control operation: who must hear of it in this process."""
        if outcome.code != "ok":
            return
        if (operation.fence is None and outcome.state != "Running") or outcome.leased is not None:
            pod = self._hub.holder(operation.run)
            if operation.fence is None and pod is not None and pod.held is not None:
                self._hub.lost(operation.run, pod.held.fence, f"the run is {outcome.state}")
        if outcome.leased is not None and outcome.epoch is not None:
            self._hub.granted(operation.run, outcome.epoch, outcome.leased, "direct")
        elif outcome.state == "Pending" or operation.kind == "spawn":
            self._dispatcher.kick()
        elif outcome.state == "Running" and operation.fence is None:
            self._dispatcher.kick_news()
        if outcome.state in _TERMINAL:
            self._wakeups.kick()

    async def _settle(self, runs: Sequence[UUID]) -> None:
        results = await asyncio.gather(*(self._batcher.apply(Control(run, "settle", {})) for run in runs), return_exceptions=True)
        for result in results:
            if isinstance(result, Unavailable):
                raise result
            if isinstance(result, BaseException):
                log.error("a run could not be settled", error=str(result))

    # ---------------------------------------------------------------------------------------------------------- routes

    async def _pod(self, request: web.Request) -> web.StreamResponse:
        identity = await self._authenticator.pod(bearer(request))
        socket = web.WebSocketResponse(max_msg_size=wire.MAX_FRAME_BYTES, compress=False, heartbeat=20.0, timeout=CLOSE_SECONDS)
        await socket.prepare(request)
        await self._hub.serve(identity, socket)
        return socket

    async def _alive(self, request: web.Request) -> web.Response:
        return reply({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Ready means that the store answers: a gateway without it can do nothing."""
        try:
            await self._store.pools()
        except PerdureError as error:
            raise Unavailable(str(error)) from error
        return reply({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        pods = self._hub.pods.values()
        metrics.PODS.labels("idle").set(len(self._hub.idle_pods()))
        metrics.PODS.labels("leased").set(sum(pod.held is not None for pod in pods))
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _openapi(self, request: web.Request) -> web.Response:
        return reply(openapi())
