"""A connection to a port of a ready pod behind a Service, through the apiserver, as ``kubectl port-forward`` has it.

    http client ◄─ socket pair ─► this task ◄─ WebSocket ─► apiserver ─► kubelet ─► pod

Each :meth:`PortForward.dial` is one WebSocket to a pod that is ready then, so it outlives gateways that are replaced. There is no local
port, which other users of this machine could connect to, and no child process that could stay behind. (The library's own port-forward is
blocking, has a thread a connection, and costs 6 s of CPU time to import.) Needs the rights to ``get services``, ``list pods``, and both
``get`` and ``create pods/portforward``: up to Kubernetes 1.34 a WebSocket is authorized as a get, from 1.35 on as a create as well.

The protocol ``v4.channel.k8s.io``: every message is binary and begins with its channel, 0 for data and 1 for errors; the first message
of each channel holds the port. Neither side can close only its half.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp

from perdure_operator.kube.errors import KubeError, KubeNotFound, KubeUnavailable
from perdure_operator.kube.port import KubeApi
from perdure_operator.kube.resources import PODS, SERVICES
from perdure_operator.kube.streams import Streams

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = b"\x00", b"\x01"
CHUNK = 1 << 16


class NoReadyPod(KubeUnavailable):
    """No pod behind the Service is ready."""

    action = "Look at its pods: kubectl get pods and kubectl describe pod say why."


class PortForward:
    """``port``: of the Service."""

    def __init__(self, kube: KubeApi, streams: Streams, namespace: str, service: str, port: int) -> None:
        self._kube, self._streams = kube, streams
        self._namespace, self._service, self._port = namespace, service, port
        self._pipes: set[asyncio.Task[None]] = set()
        self.failure = ""
        """What the pod's node said last about a connection that it could not make."""

    async def dial(self) -> socket.socket:
        """A connected socket, for blocking use in another thread. Raises KubeError."""
        self.failure = ""
        pod, port = await self._target()
        theirs, ours = socket.socketpair()
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pipe = asyncio.create_task(self._pipe(pod, port, ours, opened))
        self._pipes.add(pipe)
        pipe.add_done_callback(self._pipes.discard)
        try:
            await opened
        except BaseException:
            theirs.close()
            raise
        return theirs

    async def close(self) -> None:
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _target(self) -> tuple[str, int]:
        """Name of a ready pod, and its port."""
        service = await self._kube.get(SERVICES, self._namespace, self._service)
        if service is None:
            raise KubeNotFound(f"there is no Service {self._service} in the namespace {self._namespace}")
        target = next((port.get("targetPort", port["port"]) for port in service["spec"]["ports"] if port["port"] == self._port), None)
        if target is None:
            raise KubeNotFound(f"the Service {self._namespace}/{self._service} has no port {self._port}")
        selector = ",".join(f"{key}={value}" for key, value in (service["spec"].get("selector") or {}).items())
        pods, _ = await self._kube.list(PODS, self._namespace, labels=selector) if selector else ([], "")
        if not (ready := [pod for pod in pods if _ready(pod)]):
            raise NoReadyPod(f"no pod of the Service {self._namespace}/{self._service} is ready")
        pod = random.choice(ready)
        return pod["metadata"]["name"], _number(pod, target)

    async def _pipe(self, pod: str, port: int, ours: socket.socket, opened: asyncio.Future[None]) -> None:
        path = PODS.path(self._namespace, pod, "portforward")
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with self._streams.websocket(path, {"ports": str(port)}, PROTOCOL) as remote:
                opened.set_result(None)
                ways = [asyncio.create_task(_send(reader, remote)), asyncio.create_task(self._receive(remote, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
        except KubeError as error:
            if not opened.done():
                opened.set_exception(error)
        finally:
            writer.close()

    async def _receive(self, remote: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
        begun = set()
        async for message in remote:
            if message.type is not aiohttp.WSMsgType.BINARY:
                continue
            channel, data = message.data[:1], message.data[1:]
            if channel not in begun:
                begun.add(channel)
            elif channel == DATA:
                writer.write(data)
                await writer.drain()
            elif channel == ERROR:
                self.failure = data.decode(errors="replace").strip()
                return


async def _send(reader: asyncio.StreamReader, remote: aiohttp.ClientWebSocketResponse) -> None:
    while data := await reader.read(CHUNK):
        await remote.send_bytes(DATA + data)


def _ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return "deletionTimestamp" not in pod["metadata"] and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _number(pod: Mapping[str, Any], target: int | str) -> int:
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == target:
                return int(port["containerPort"])
    raise KubeNotFound(f"no container of the pod {pod['metadata']['name']} has a port named {target}")
