"""Makes the faults of the plan at their times: kills and restarts what the stack is made of, and lets workers stand still."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import psutil
from tests.soak.moments import Freezer
from tests.soak.plan import Fault
from tests.soak.stack import SoakStack

from perdure_operator.local.embedded_postgres import PostgresFailed
from perdure_operator.local.processes import WorkerPod

T = TypeVar("T")

START_SECONDS = 60.0
"""What does not start in so long has broken."""


class Faults:
    def __init__(self, stack: SoakStack, freezer: Freezer, counts: Counter[str]) -> None:
        self._stack, self._freezer, self._counts = stack, freezer, counts
        self._tasks: set[asyncio.Task[None]] = set()
        self._down = asyncio.Lock()
        """One gateway at a time is down: with both, nothing but time would pass."""

    async def run(self, faults: Sequence[Fault], began: float) -> None:
        """Returns when all have been made and are over."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, began + fault.at - loop.time()))
                group.create_task(self._make(fault))

    async def _make(self, fault: Fault) -> None:
        match fault.kind:
            case "postgres":
                await self._postgres(fault)
            case "gateway":
                async with self._down:
                    gateway = _pick(sorted(self._stack.gateways.items()), fault.choice)[1]
                    await gateway.kill()
                    self._counts["gateway killed"] += 1
                    await asyncio.sleep(fault.pause)  # the length of the outage
                    await self._start(gateway.start, gateway.kill)
            case "sidecar" | "agent" | "freeze":
                if pods := self._pods():
                    await self._worker(_pick(pods, fault.choice), fault)

    def _pods(self) -> list[WorkerPod]:
        pods = [pod for pod in self._stack.fleet.pods.values() if isinstance(pod, WorkerPod)]
        alive = [pod for pod in pods if pod.agent.code is None and pod.sidecar.code is None]
        return sorted(alive, key=lambda pod: pod.name)

    async def _postgres(self, fault: Fault) -> None:
        async with self._stack.breaking:
            await self._stack.postgres.kill()
            self._counts["Postgres killed"] += 1
            await asyncio.sleep(fault.pause)  # the length of the outage
            await self._start(self._stack.postgres.start, self._stack.postgres.kill)

    async def _start(self, start: Callable[[], Awaitable[object]], end: Callable[[], Awaitable[object]]) -> None:
        """Again and again, as a kubelet does: a gateway does not start while Postgres is down. ``end``: what has not come up in time."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                try:
                    await start()
                except (PostgresFailed, AssertionError):
                    await end()
                    self._counts["started in vain"] += 1
                    await asyncio.sleep(0.3)
                else:
                    return

    async def _worker(self, pod: WorkerPod, fault: Fault) -> None:
        if fault.kind == "sidecar":
            pod.sidecar.send(signal.SIGKILL)
            self._counts["sidecar killed"] += 1
            return
        agent = _agent_of(pod, fault.choice)
        if agent is None:
            return
        if fault.freeze is not None:
            await self._freezer.freeze(pod, agent.pid, fault.freeze, "at any time")
            return
        with contextlib.suppress(psutil.Error):
            agent.kill()
            self._counts["agent killed"] += 1


def _agent_of(pod: WorkerPod, choice: float) -> psutil.Process | None:
    """The process of the run; now and then the one that it was forked from."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pod.agent.pid)
        children = parent.children()
        return children[0] if children and choice * 1000 % 1 < 0.8 else parent
    return None


def _pick(among: Sequence[T], choice: float) -> T:
    return among[int(choice * len(among))]
