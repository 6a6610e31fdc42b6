"""Signals without the Kubernetes API, for while that, or a gateway, is away: token and addresses are asked for at the beginning."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

from tests.cluster.errors import ClusterError
from tests.e2e.installation import NAMESPACE, PODS, RELEASE, Installation

Json = dict[str, Any]

PATIENCE = 60.0
AGAIN_SECONDS = 0.2
GATEWAY_PORT = 8443


class Inside:
    def __init__(self, perdure: Installation, namespace: str) -> None:
        self._cluster, self._namespace = perdure.cluster, namespace
        self._token = perdure.cluster.kubectl("create", "token", "tester", "-n", namespace, "--duration=30m").strip()
        self._authority = perdure.cluster.folder / f"gateway-ca-{namespace}.pem"
        self._authority.write_text(
            perdure.cluster.kubectl("get", "configmap", "perdure-cli", "-n", NAMESPACE, "-o", "jsonpath={.data.ca\\.crt}")
        )
        address = perdure.cluster.kubectl("get", "service", f"{RELEASE}-gateway", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}")
        self._service = f"{address.strip()}:443"
        gateways = perdure.all(PODS, NAMESPACE, labels="app.kubernetes.io/component=gateway")
        self.gateways = [f"{pod['status']['podIP']}:{GATEWAY_PORT}" for pod in gateways]

    def signal(self, name: str, signal: str, payload: Any = None, *, key: str | None = None, gateway: str = "") -> Json:
        """One try. ``gateway``: one of ``gateways``; else whichever the Service gives. Raises ClusterError with the answer."""
        host = f"{RELEASE}-gateway.{NAMESPACE}.svc"
        headers = [f"Authorization: Bearer {self._token}", "Content-Type: application/json", *([f"Idempotency-Key: {key}"] if key else [])]
        return json.loads(
            self._cluster.exec(
                [
                    "curl", "-sS", "--fail-with-body", "--max-time", "10", "--cacert", str(self._authority),
                    "--connect-to", f"{host}:443:{gateway or self._service}",
                    *(part for header in headers for part in ("-H", header)), "-d", json.dumps(payload),
                    f"https://{host}/v1/namespaces/{self._namespace}/runs/{name}/signals/{signal}",
                ]
            )
        )  # fmt: skip

    def insist(self, name: str, signal: str, payload: Any, key: str) -> int:
        """As a program should that must not lose a signal: the same key until there is an answer. How many tries had none."""
        deadline = time.monotonic() + PATIENCE
        failed = 0
        while True:
            try:
                self.signal(name, signal, payload, key=key)
                return failed
            except ClusterError:
                if time.monotonic() > deadline:
                    raise
            failed += 1
            time.sleep(AGAIN_SECONDS)

    @contextmanager
    def flow(self, name: str) -> Iterator[Flow]:
        """Numbered signals to a collector without a pause, every third of them twice; then the one that ends it."""
        flow, stop = Flow(), Event()

        def send() -> None:
            for n in itertools.count():
                if stop.is_set():
                    break
                for _ in range(2 if n % 3 == 0 else 1):
                    flow.unanswered += self.insist(name, "item", n, f"item-{n}")
                flow.sent = n + 1
            self.insist(name, "item", None, "end")

        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(send)
            try:
                yield flow
            finally:
                stop.set()
            sending.result()


@dataclass
class Flow:
    """``sent``: how many signals were answered; ``unanswered``: tries that were not."""

    sent: int = 0
    unanswered: int = 0
