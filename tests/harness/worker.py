"""Load that behaves: pods whose agent does a fixed piece of work; they reconnect, resend what was not answered, are replaced at their end.

What the outside world saw is kept here (:class:`World`): which steps were acknowledged, and how often each effect happened.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec
from tests.harness.api import Refused
from tests.harness.cluster import Cluster
from tests.harness.gateways import Gateway
from tests.harness.pods import CutError, FakePod, answer, signal

from perdure import protocol as wire
from perdure_operator.domain.errors import PerdureError

T = TypeVar("T")
STEPS = 4


class DiedError(Exception):
    """The agent's process ended here."""


@dataclass
class World:
    """``acknowledged``: (run, key) and the sequence that was answered. ``effects``: how often each run's effect happened outside."""

    rng: random.Random
    dies: float = 0.0
    acknowledged: dict[tuple[str, str], int] = field(default_factory=dict)
    effects: Counter[str] = field(default_factory=Counter)


class Worker(FakePod):
    """One pod and the agent in it. ``over`` is set when it has to be replaced."""

    def __init__(self, token: str, pod_id: uuid.UUID, world: World) -> None:
        super().__init__(token, pod_id)
        self.world = world
        self.over = asyncio.Event()
        self._ready = asyncio.Event()
        self._agent: asyncio.Task[None] | None = None

    async def live(self, gateways: Sequence[Gateway]) -> None:
        """From the first connection to the end of the pod, over any number of connections."""
        ended = asyncio.create_task(self.over.wait())
        try:
            while not self.over.is_set():
                try:
                    await self.connect(self.world.rng.choice([g for g in gateways if g.pid] or gateways))
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.03)
                    continue
                await asyncio.wait([self._tasks[0], ended], return_when=asyncio.FIRST_COMPLETED)
                self._ready.clear()
                await self.cut()
        finally:
            ended.cancel()
            if self._agent is not None:
                self._agent.cancel()
                await asyncio.gather(self._agent, return_exceptions=True)
            await self.cut()

    def on_frame(self, frame: wire.FromGateway) -> None:
        if isinstance(frame, wire.Lease):
            if self._agent is None:
                self.run, self.epoch = frame.run, frame.epoch
                self._agent = asyncio.create_task(self._work(msgspec.json.decode(frame.context, type=wire.RunContext)))
            self._ready.set()
        elif isinstance(frame, wire.Retire) and self._agent is not None:
            self._ready.set()  # the last answer may still be due: it is asked for again
        elif isinstance(frame, wire.LeaseLost | wire.Retire):
            self.over.set()

    async def _ask(self, kind: type[T], body: wire.Body) -> T:
        """The answer, however many connections it takes. Raises Refused."""
        req = str(uuid.uuid4())
        while True:
            await self._ready.wait()
            try:
                frame = await self.ask(body, req=req)
            except CutError:
                self._ready.clear()
                continue
            if isinstance(frame, wire.Refusal) and frame.problem.retryable:
                await asyncio.sleep(0.05)
                continue
            return answer(kind, frame)

    # ----------------------------------------------------------------------------------------------------- the agent

    async def _work(self, context: wire.RunContext) -> None:
        try:
            await self._agent_code(context)
        except (DiedError, Refused):
            pass
        finally:
            self.over.set()

    async def _agent_code(self, context: wire.RunContext) -> None:
        done = {entry.key for entry in context.journal if entry.state != "open"}
        await asyncio.gather(*(self._step(f"step:a#{n}", done) for n in range(STEPS)))
        await self._effect(context.run_id)
        if "wait:go#0" not in done:
            waited = await self._ask(wire.WaitAnswer, wire.WaitBegin(key="wait:go#0", on=[signal("go")], suspend=True))
            if waited.status == "suspended":
                return
        await self._step("step:b#0", done)
        await self._ask(wire.Finished, wire.Finish(outcome="succeeded", output=msgspec.Raw(b'"done"')))

    async def _step(self, key: str, done: set[str]) -> None:
        if key not in done:
            recorded = await self._ask(wire.Recorded, wire.StepEnd(key=key, name="s", output=msgspec.Raw(b"1")))
            self.world.acknowledged[self.run or "", key] = recorded.seq

    async def _effect(self, run: str) -> None:
        """Something that may happen once: asks the world itself when nobody knows."""
        begin = wire.ActivityBegin(tool="send_mail", arguments=msgspec.Raw(b'{"to":"x"}'), on_unknown="query", timeout_seconds=0.5)
        while True:
            decision = await self._ask(wire.ActivityDecision, begin)
            if decision.decision == "unknown" and not decision.retry_after_seconds:
                resolve = wire.ActivityResolve(key=decision.key, happened=self.world.effects[run] > 0, response=msgspec.Raw(b'"found"'))
                decision = await self._ask(wire.ActivityDecision, resolve)
            if decision.decision in ("execute", "retry"):
                self._maybe_die()
                self.world.effects[run] += 1
                self._maybe_die()
                end = wire.ActivityEnd(key=decision.key, token=decision.token or "", state="succeeded", response=msgspec.Raw(b'"sent"'))
                await self._ask(wire.ActivityRecorded, end)
                return
            if decision.decision == "receipt":
                return
            await asyncio.sleep(max(0.05, min(decision.retry_after_seconds, 0.5)))

    def _maybe_die(self) -> None:
        if self.world.rng.random() < self.world.dies:
            raise DiedError


async def fleet(cluster: Cluster, world: World, size: int) -> None:
    """Keeps this many pods alive, and tells the store of each that has ended; until it is cancelled."""

    async def slot() -> None:
        while True:
            pod_id = uuid.uuid4()
            worker = Worker(cluster.tokens.issue_pod(pod_id, "default/p"), pod_id, world)
            await worker.live(cluster.gateways)
            while True:
                try:
                    await cluster.store.pod_gone(pod_id, "PodDeleted")
                    break
                except PerdureError:
                    await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for _ in range(size):
            group.create_task(slot())


async def insistent(cluster: Cluster, method: str, path: str, body: Any, key: str, world: World) -> Any:
    """A person's request, sent again under the same key until it is answered."""
    while True:
        gateway = world.rng.choice([g for g in cluster.gateways if g.pid] or cluster.gateways)
        try:
            return await cluster.api(gateway).call(method, path, body, key=key)
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        except Refused as refused:
            if not refused.problem.retryable:
                raise
        await asyncio.sleep(0.05)
