"""Puts the parts of each role together. The only place that knows all of them."""

from __future__ import annotations

import asyncio
import signal

import structlog
from aiohttp import web

from perdure_operator.config import GatewayConfig
from perdure_operator.gateway.app import Gateway
from perdure_operator.gateway.auth import LocalTokens, load_secret
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)
SHUTDOWN_SECONDS = 5.0


async def run_gateway(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT. A background loop that breaks ends it with that error."""
    store = await Store.connect(config.dsn, connections=config.connections, prepared_statements=config.prepared_statements)
    gateway = Gateway(store, config.name, LocalTokens(load_secret(config.token_secret_file)), lease_seconds=config.lease_seconds)
    runner = web.AppRunner(gateway.application(), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    loops = asyncio.create_task(gateway.run_loops())
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=1024)
        await site.start()
        log.info("gateway ready", name=config.name, address=runner.addresses[0])
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({loops, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if loops.done():
            loops.result()
    finally:
        loops.cancel()
        await runner.cleanup()
        await asyncio.gather(loops, return_exceptions=True)
        await store.close()
