"""``python -m perdure.sidecar``: reads the environment, listens, connects, and ends when the pod's work is over."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys

from perdure.sidecar import log as logs
from perdure.sidecar.app import Api, make_metrics
from perdure.sidecar.config import ConfigError, Settings, from_environment
from perdure.sidecar.gateway_client import GatewayClient
from perdure.sidecar.heartbeat import Heartbeat
from perdure.sidecar.http_server import HttpServer
from perdure.sidecar.pod import Pod
from perdure.sidecar.receipts import Receipts
from perdure.sidecar.spool import Spool

DRAIN_SECONDS = 30.0
PLAIN_LINGER_SECONDS = 1.0
"""Of an agent without a session or a stream, and of a parent that forks agents, nothing tells the end: what they still do after the
pod's last answer must fit into this."""

_LOOK_SECONDS = 0.02

log = logging.getLogger("perdure.sidecar")


async def serve(settings: Settings) -> None:
    """Until the pod's work is over, and the kubelet says so where there is one. Raises OSError when a listener cannot be bound."""
    loop = asyncio.get_running_loop()
    pod = Pod(reuse=settings.reuse, metrics=make_metrics(), time=loop.time)
    gateway = GatewayClient(settings, pod)
    receipts = Receipts(Spool(settings.spool_dir)) if settings.spool_dir is not None else None
    if receipts is not None:
        receipts.replay(pod.submit)
    server = HttpServer(Api(pod, gateway, receipts, reuse=settings.reuse, parent_secret=settings.parent_secret))
    terminated = asyncio.Event()

    def terminate() -> None:
        terminated.set()
        pod.drain("the sidecar was told to terminate")

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, terminate)
    # The connection first: a run may be waiting for this pod.
    tasks: list[asyncio.Task[None]] = [loop.create_task(gateway.run()), loop.create_task(Heartbeat(pod).run())]
    waits = [loop.create_task(event.wait()) for event in (pod.over, terminated)]
    gc.freeze()
    listeners: list[asyncio.Server] = []
    try:
        if settings.only_spool:
            await emptied(pod, receipts, terminated)
        else:
            listeners += await listen(settings, server)
            await asyncio.wait([*waits, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await drain(pod, server, terminated)
    finally:
        for listener in listeners:
            listener.close()
        for waiting in waits:
            waiting.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        if receipts is not None:
            receipts.close()
    if settings.await_sigterm:
        await terminated.wait()


async def emptied(pod: Pod, receipts: Receipts | None, terminated: asyncio.Event) -> None:
    """The gateway has what was in the spool, or has not taken it in ``DRAIN_SECONDS``: then it stays there."""
    pod.drain("the pod's agent has ended")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            # Looked for like the end of an agent in ``drain``: it is rare, and short.
            while receipts is not None and receipts.unacknowledged and not terminated.is_set():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)


async def listen(settings: Settings, server: HttpServer) -> list[asyncio.Server]:
    loop = asyncio.get_running_loop()
    listeners: list[asyncio.Server] = []
    if settings.socket is not None:
        path = settings.socket
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            early = path.with_name(f".{os.getpid()}")
            listeners.append(await loop.create_unix_server(server.factory(unix=True), str(early)))
            # The agent's container may run as another user; who may reach the folder may use the socket.
            early.chmod(0o666)
            # Under its name only now: an agent that waits for the file must not be refused.
            early.replace(path)
            log.info("listening", extra={"socket": str(path)})
        except OSError as error:
            if settings.socket_required or settings.port is None:
                raise
            log.warning("no unix socket", extra={"socket": str(path), "error": str(error)})
    if settings.port is not None:
        listeners.append(await loop.create_server(server.factory(unix=False), "127.0.0.1", settings.port))
        log.info("listening", extra={"host": "127.0.0.1", "port": listeners[-1].sockets[0].getsockname()[1]})
    return listeners


async def drain(pod: Pod, server: HttpServer, terminated: asyncio.Event) -> None:
    """Lets the agent go first: what it waits for is answered, its channels are closed by itself. Bounded by the run's grace period."""
    loop = asyncio.get_running_loop()
    started = last_there = loop.time()
    grace = pod.held.grace_seconds if pod.held is not None else DRAIN_SECONDS
    leaves_visibly = not pod.reuse and (pod.channels or pod.held is None)
    linger = 0.0 if leaves_visibly else PLAIN_LINGER_SECONDS
    while (now := loop.time()) < started + grace:
        agent_there = bool(pod.channels) or server.busy
        owed = pod.supervisor.undecided or bool(pod.outbox.unanswered("activity.end")) or (len(pod.outbox) > 0 and not pod.over.is_set())
        if agent_there or owed:
            last_there = now
        elif now - last_there >= linger or terminated.is_set():
            return
        await asyncio.sleep(_LOOK_SECONDS)


def main() -> int:
    try:
        settings = from_environment(os.environ)
    except ConfigError as error:
        sys.stderr.write(f"perdure-sidecar: {error}\n")
        return 2
    logs.configure(settings.log_level)
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run  # type: ignore[assignment]
    try:
        run(serve(settings))
    except OSError as error:
        log.error("cannot listen", extra={"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
