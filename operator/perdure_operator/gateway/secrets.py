"""Where the keys of webhooks come from: a port, and its adapter on the Secrets of a cluster."""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Callable
from typing import Protocol

from perdure_operator.kube.client import SECRETS, KubeApi

KEPT_SECONDS = 10.0
MAX_KEPT = 10_000


class SecretReader(Protocol):
    async def get(self, namespace: str, name: str, key: str) -> bytes | None:
        """None: there is no such key. Raises PerdureError when that cannot be told now."""
        ...


class NoSecrets:
    """For a gateway without a cluster: it knows none."""

    async def get(self, namespace: str, name: str, key: str) -> bytes | None:
        return None


class KubeSecrets:
    """Remembers what it has read, and that there was nothing, for some seconds: who sends rubbish shall not load the API server."""

    def __init__(self, kube: KubeApi, *, now: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._now = kube, now
        self._kept: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}

    async def get(self, namespace: str, name: str, key: str) -> bytes | None:
        at, data = self._kept.get((namespace, name), (0.0, None))
        if data is None or self._now() - at > KEPT_SECONDS:
            found = await self._kube.get(SECRETS, namespace, name)
            data = (found or {}).get("data") or {}
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[namespace, name] = self._now(), data
        value = data.get(key)
        return b64decode(value) if value is not None else None
