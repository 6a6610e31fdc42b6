"""Worker pods as on a laptop: a sidecar process and an agent process each, real ones.

A crew that is not being measured is stopped (SIGSTOP), so that its heartbeats cost the others nothing. When it goes on, its sidecars find
their gateway gone and connect to the one that is there now, at the same address.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from bench.stage import NAMESPACE, BenchError, Gateway, Stage
from perdure_operator.local.processes import Launch, Leash, WorkerPod

IDLE_SECONDS = 90.0
SIDECARS, AGENTS = "sidecars", "agents"


class Crew:
    """``reuse``: the pods fork a child for each run and live on; otherwise each serves one run and ends."""

    def __init__(self, stage: Stage, pool: str, *, reuse: bool) -> None:
        self.pool = pool
        self._stage = stage
        self._reuse = reuse
        self._folder = stage.folder / pool
        self._leash: Leash | None = None
        self._pods: list[WorkerPod] = []

    async def grow(self, gateway: Gateway, count: int) -> None:
        """Starts ``count`` more pods."""
        self._folder.mkdir(exist_ok=True)
        if self._leash is None:
            self._leash = await Leash.start()
        for _ in range(count):
            self._pods.append(await self._start(gateway, self._leash))
        self._watch()

    async def idle(self, gateway: Gateway, count: int) -> None:
        """Returns when ``count`` pods of the pool wait for a run. Raises BenchError."""
        with self.explained():
            async with asyncio.timeout(IDLE_SECONDS):
                while True:
                    await self._replace(gateway)
                    items = (await gateway.call("GET", "pools"))["items"]
                    if any(item["pool"] == f"{NAMESPACE}/{self.pool}" and item["idle"] >= count for item in items):
                        return
                    await asyncio.sleep(0.02)

    async def _replace(self, gateway: Gateway) -> None:
        """Who was stopped for minutes was given up meanwhile, and ends when it hears of it. A fleet starts others; here we do."""
        gone = [pod for pod in self._pods if pod.agent.code is not None and pod.sidecar.code is not None]
        if gone:
            self._pods = [pod for pod in self._pods if pod not in gone]
            await self.grow(gateway, len(gone))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What takes too long inside ends in a BenchError with the last words of these pods."""
        try:
            yield
        except TimeoutError:
            ended = sum(pod.agent.code is not None or pod.sidecar.code is not None for pod in self._pods)
            words = (log.read_text(errors="replace")[-2000:] for log in self._folder.glob("*/log"))
            said = next(filter(None, words), "(nothing)")
            raise BenchError(f"the pods of {self.pool} do not get on; {ended} of {len(self._pods)} have ended; one said: {said}") from None

    def stop(self) -> None:
        self._send(signal.SIGSTOP)
        self._stage.parts.pop(SIDECARS, None)
        self._stage.parts.pop(AGENTS, None)

    def go_on(self) -> None:
        self._watch()
        self._send(signal.SIGCONT)

    async def ended(self) -> None:
        """Single-use pods: all have ended by themselves. Raises BenchError if one did not end well."""
        ends = await asyncio.gather(*(pod.wait() for pod in self._pods))
        self._pods.clear()
        if any(end.agent != 0 or end.sidecar != 0 for end in ends):
            raise BenchError(f"a pod of {self.pool} ended with agent {ends[0].agent}, sidecar {ends[0].sidecar}")

    async def close(self) -> None:
        self.go_on()
        for pod in self._pods:
            pod.stop(grace=1.0)
        await asyncio.gather(*(pod.wait() for pod in self._pods))
        if self._leash is not None:
            await self._leash.release()

    async def _start(self, gateway: Gateway, leash: Leash) -> WorkerPod:
        pod_id = uuid4()
        folder = self._folder / pod_id.hex[:8]
        folder.mkdir()
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(gateway.pod_token(pod_id, self.pool))
        shared = os.environ | {
            "PERDURE_SOCKET": str(folder / "agent.sock"),
            "PERDURE_POD_REUSE": "ForkPerRun" if self._reuse else "Never",
            "PERDURE_LOG_LEVEL": "warning",
        }
        private = {"PERDURE_GATEWAY_URLS": gateway.url, "PERDURE_TOKEN_FILE": str(token), "PERDURE_PORT": "off"}
        here, log = Path.cwd(), folder / "log"
        return await WorkerPod.start(
            pod_id, folder.name, f"{NAMESPACE}/{self.pool}", leash=leash,
            sidecar=Launch((sys.executable, "-m", "perdure.sidecar"), shared | private, here, log),
            agent=Launch((sys.executable, "-m", "bench.agent"), shared, here, log),
        )  # fmt: skip

    def _send(self, number: signal.Signals) -> None:
        for pod in self._pods:
            pod.agent.send(number)
            pod.sidecar.send(number)

    def _watch(self) -> None:
        self._stage.parts[SIDECARS] = [pod.sidecar.pid for pod in self._pods]
        self._stage.parts[AGENTS] = [pod.agent.pid for pod in self._pods]
