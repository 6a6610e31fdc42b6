"""Puts the parts of each role together. The only place that knows all of them."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web

from perdure_operator.config import Address, ConfigError, GatewayConfig, OperatorConfig, TlsFiles
from perdure_operator.controllers.operator import Operator, OperatorSettings
from perdure_operator.controllers.probes import probes
from perdure_operator.controllers.release import end_workers, release_finalizers
from perdure_operator.gateway.app import Gateway
from perdure_operator.gateway.auth import Authenticator, LocalTokens, load_secret
from perdure_operator.gateway.kubernetes_auth import KubernetesAuthenticator
from perdure_operator.gateway.secrets import KubeSecrets
from perdure_operator.gateway.tls import Certificate
from perdure_operator.kube.client import KubeClient, KubeSettings
from perdure_operator.kube.specs.pod import PodSettings
from perdure_operator.services.elector import Elector
from perdure_operator.store.operations import Limits
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)
SHUTDOWN_SECONDS = 5.0
OPERATOR_CONNECTIONS = 12
API_RATE, API_BURST = 300.0, 300
"""Requests a second of one process to the apiserver, whose priority and fairness decides beyond that."""


async def run_gateway(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT. A background loop that breaks ends it with that error."""
    certificate = _certificate(config.tls) if config.tls else None
    stop = _stop_signals()
    async with AsyncExitStack() as parts:
        limits = Limits(config.run_bytes, config.run_stored_bytes)
        store = await Store.connect(
            config.dsn, connections=config.connections, prepared_statements=config.prepared_statements, limits=limits
        )
        parts.push_async_callback(store.close)
        kube = None
        if config.auth == "kubernetes":
            kube = await parts.enter_async_context(await KubeClient.connect(settings=KubeSettings(rate=API_RATE, burst=API_BURST)))
        secrets = KubeSecrets(kube) if kube is not None else None
        gateway = Gateway(store, config.name, _authenticator(config, store, kube), lease_seconds=config.lease_seconds, secrets=secrets)
        if config.metrics_listen:
            await parts.enter_async_context(_serving(gateway.probes(), config.metrics_listen))
        # Before serving, so that they end after it: requests that are being answered need them.
        loops = await parts.enter_async_context(_running(gateway.run_loops(), *([certificate.run()] if certificate else [])))
        tls = certificate.context if certificate else None
        address = await parts.enter_async_context(_serving(gateway.application(), config.listen, tls))
        log.info("gateway ready", name=config.name, address=address, tls=tls is not None)
        stopped = asyncio.create_task(stop.wait())
        ended, _ = await asyncio.wait({*loops, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()


async def run_operator(config: OperatorConfig) -> None:
    """Stands by or leads until SIGTERM or SIGINT; then gives the lead back."""
    stop = _stop_signals()
    async with AsyncExitStack() as parts:
        store = await Store.connect(config.dsn, connections=OPERATOR_CONNECTIONS)
        parts.push_async_callback(store.close)
        kube = await parts.enter_async_context(await KubeClient.connect(settings=KubeSettings(rate=API_RATE, burst=API_BURST)))
        pods = PodSettings(
            sidecar_image=config.sidecar_image, gateway_urls=(config.gateway_url,), installation=config.installation,
            gateway_ca=config.gateway_ca or "", sidecar_pull_policy=config.sidecar_pull_policy, token_audience=config.token_audience,
        )  # fmt: skip
        if config.sidecar_resources is not None:
            pods = replace(pods, sidecar_resources=config.sidecar_resources)
        settings = OperatorSettings(pods, config.watch_namespaces, config.inline_templates, config.resync_seconds)
        elector = Elector(Resources(store), config.name, lambda term: Operator(store, kube, settings).lead(term))
        if config.metrics_listen:
            await parts.enter_async_context(_serving(probes(store, elector), config.metrics_listen))
        loops = await parts.enter_async_context(_running(elector.run()))
        log.info("operator ready", name=config.name)
        stopped = asyncio.create_task(stop.wait())
        ended, _ = await asyncio.wait({*loops, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()


async def run_release(namespaces: Sequence[str], installation: str) -> None:
    async with await KubeClient.connect() as kube:
        await release_finalizers(kube, namespaces)
        await end_workers(kube, namespaces, installation)


def _stop_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@asynccontextmanager
async def _running(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _serving(app: web.Application, at: Address, tls: ssl.SSLContext | None = None) -> AsyncIterator[object]:
    """Gives the address that was bound. Raises OSError."""
    # A compressed body is refused (gateway/http.py): a bomb costs nothing then, and a signature is one of the bytes that were sent.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS, auto_decompress=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, at.host, at.port, backlog=1024, ssl_context=tls).start()
        yield runner.addresses[0]
    finally:
        await runner.cleanup()


def _certificate(files: TlsFiles) -> Certificate:
    try:
        return Certificate(files.certificate, files.key)
    except OSError as error:
        raise ConfigError(f"PERDURE_TLS_CERT_FILE and PERDURE_TLS_KEY_FILE are no certificate and its key: {error}") from error


def _authenticator(config: GatewayConfig, store: Store, kube: KubeClient | None) -> Authenticator:
    if kube is not None:
        return KubernetesAuthenticator(kube, store, audience=config.token_audience)
    if config.token_secret_file is None:
        raise ConfigError("PERDURE_AUTH is local: set PERDURE_TOKEN_SECRET_FILE")
    try:
        return LocalTokens(load_secret(config.token_secret_file))
    except ValueError as error:
        raise ConfigError(f"PERDURE_TOKEN_SECRET_FILE: {error}") from error
