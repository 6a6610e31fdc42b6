"""The log of one container, line by line, through cut connections: each line is asked for with its time, and asked for once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from perdure_operator.kube.errors import KubeUnavailable
from perdure_operator.kube.resources import PODS
from perdure_operator.kube.streams import Streams

RETRIES = 10
RETRY_SECONDS = 1.0


async def log_lines(streams: Streams, namespace: str, pod: str, container: str, *, follow: bool) -> AsyncIterator[str]:
    """Lines with their line end. ``follow``: until the container has ended. Raises KubeNotFound when the pod is gone, KubeInvalid while
    its container has not started, KubeForbidden, KubeUnavailable.

    Times are compared as text: RFC 3339 in UTC, with nine digits unless the last ones are zeros, which the kubelet cuts off.
    """
    path = PODS.path(namespace, pod, "log")
    last, failures = "", 0
    while True:
        seen = _sortable(last)
        query = {"container": container, "timestamps": "true"} | ({"follow": "true"} if follow else {})
        if last:
            query["sinceTime"] = last
        try:
            async with streams.read(path, query) as content:
                async for raw in content:
                    at, _, line = raw.decode(errors="replace").partition(" ")
                    if last and _sortable(at) <= seen:
                        continue
                    last, failures = at, 0
                    yield line
                return
        except KubeUnavailable:
            failures += 1
            if failures > RETRIES:
                raise
            await asyncio.sleep(RETRY_SECONDS)


def _sortable(at: str) -> str:
    whole, _, rest = at.rstrip("Z").partition(".")
    return f"{whole}.{rest:0<9}"
