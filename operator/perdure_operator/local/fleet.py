"""The fleet of local worker pods: as many as the queue asks for, and a few warm ones.

Every tick compares what each pool needs (from the store) with the pods that there are, and starts or retires the difference; the rule
is in ``services.capacity``. A pod belongs to a pool, never to a run. When its processes have ended the store is told at once, so a
run whose worker crashed is queued again without waiting for its lease to expire. A pool whose pods break before they have done anything
useful is tried again ever more slowly, one pod at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from uuid import UUID, uuid4

from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.processes import PodExit
from perdure_operator.services.capacity import Need, decide
from perdure_operator.services.polling import Kick
from perdure_operator.services.trouble import Told, Trouble, tell
from perdure_operator.store.store import PoolDemand

TICK_SECONDS = 0.1
STORE_PAUSE = 1.0
"""Seconds between two tries while the store does not answer."""
LONGEST_BACKOFF = 10.0
"""Somebody sits before it and is mending the agent."""
RETIRE_SECONDS = 10.0
"""A pod that was told to retire is stopped after so long."""
LOST_SECONDS = 6.0
"""A pod whose run was taken from it is killed after so long: a little more than an agent takes for its last receipts. It may stand still,
and act when it goes on; before it is seen to be gone, no other worker may repeat what it began."""


class Capacity(Told, Protocol):
    """What the fleet needs of the store. Methods raise PerdureError while it is unavailable."""

    async def pool_demand(self) -> list[PoolDemand]: ...

    async def register_pod(self, pod: UUID, pool: str, /) -> None:
        """A row in the state ``starting``."""
        ...

    async def pod_gone(self, pod: UUID, reason: str, /, *, proven: bool = True) -> list[UUID]:
        """The pod has ended: its row goes, a lease it held expires now. Gives the runs that lost their worker. ``proven``: none of its
        processes is left."""
        ...

    async def retire_idle(self, pool: str, count: int, /) -> list[UUID]:
        """Idle pods that will get no run any more and are told to end."""
        ...

    async def take_away(self, pods: list[UUID], /) -> None:
        """These are about to be ended: no failure of the runs that they have."""
        ...


class Pod(Protocol):
    """A running worker pod."""

    pod_id: UUID
    name: str
    pool: str

    async def wait(self) -> PodExit: ...
    def stop(self, grace: float | None = None) -> None: ...
    def kill(self) -> None: ...


class PodStarter(Protocol):
    """Starts worker pods. ``start`` raises PerdureError or OSError; ``ended`` records the end and gives the last words of its log."""

    async def start(self, pod_id: UUID, pool: str, spec: dict[str, Any]) -> Pod: ...
    def ended(self, pod: Pod, exit_: PodExit) -> list[str]: ...


class Fleet:
    """Runs :func:`decide` against the machine. ``say`` tells a person what happens to pods."""

    def __init__(
        self, capacity: Capacity, starter: PodStarter, *, limit: int, parallel: int, say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._capacity, self._starter = capacity, starter
        self._limit, self._parallel = limit, parallel
        self._say, self._now = say, now
        self._pods: dict[UUID, Pod] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._troubles: dict[str, Trouble] = {}
        self._retiring: dict[UUID, float] = {}
        self._untold: dict[UUID, tuple[str, bool]] = {}
        self._changed = Kick()

    @property
    def pods(self) -> Mapping[UUID, Pod]:
        return self._pods

    async def run(self) -> None:
        """Until cancelled. A store that does not answer is asked again; pods go on meanwhile."""
        silent = False
        while True:
            try:
                await self.tick()
            except (PerdureError, OSError) as error:
                if not silent:
                    self._say(f"the fleet cannot reach the store ({error}); trying again")
                silent = True
                await asyncio.sleep(STORE_PAUSE)
                continue
            if silent:
                self._say("the store answers again")
            silent = False
            await self._changed.pause(TICK_SECONDS)

    async def tick(self) -> None:
        for pod_id, (reason, proven) in list(self._untold.items()):
            await self._tell_gone(pod_id, reason, proven=proven)
        demand = await self._capacity.pool_demand()
        for pool in demand:
            if (pool.idle or pool.leased) and pool.pool in self._troubles:
                self._troubles[pool.pool].over = True
        await tell(self._capacity, demand, self._troubles)
        await self._end_retiring(demand)
        live = dict.fromkeys((pool.pool for pool in demand), 0)
        for pod in self._pods.values():
            live[pod.pool] = live.get(pod.pool, 0) + 1
        needs = decide(demand, live, self._caps(demand), limit=self._limit, parallel=self._parallel)
        for pool in demand:
            need = needs.get(pool.pool, Need())
            if need.retire:
                await self._capacity.retire_idle(pool.pool, need.retire)
            for _ in range(need.start):
                await self._start(pool)

    async def close(self, grace: float) -> None:
        """Stop every pod and tell the store, so that what ran is queued at once when there is a fleet again."""
        with contextlib.suppress(PerdureError, OSError):
            await self._capacity.take_away(list(self._pods))
        for pod in self._pods.values():
            pod.stop(grace)
        if self._watchers:
            await asyncio.wait(self._watchers)

    def _caps(self, demand: list[PoolDemand]) -> dict[str, int]:
        now, starting = self._now(), {pool.pool: pool.starting for pool in demand}
        return {name: 0 if now < trouble.until or starting.get(name) else 1 for name, trouble in self._troubles.items()}

    async def _start(self, pool: PoolDemand) -> None:
        pod_id = uuid4()
        try:
            await self._capacity.register_pod(pod_id, pool.pool)
        except (PerdureError, OSError):
            self._untold[pod_id] = "NotStarted", True  # it may have been committed
            raise
        try:
            pod = await self._starter.start(pod_id, pool.pool, pool.spec)
        except (PerdureError, OSError) as error:
            await self._tell_gone(pod_id, "NotStarted")
            self._failed(pool.pool, "NotStarted", f"cannot start a pod: {error}", [error.advice] if isinstance(error, PerdureError) else [])
            return
        self._pods[pod_id] = pod
        watcher = asyncio.create_task(self._watch(pod))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, pod: Pod) -> None:
        exit_ = await pod.wait()
        last_words = self._starter.ended(pod, exit_)
        lost = await self._tell_gone(pod.pod_id, exit_.reason, proven=exit_.proven)
        self._pods.pop(pod.pod_id, None)
        self._retiring.pop(pod.pod_id, None)
        if exit_.clean:
            self._troubles.pop(pod.pool, None)
        elif not exit_.stopped:
            what = f"{pod.name}: {exit_.words} after {exit_.seconds:.1f} s" + ("; its run is queued again" if lost else "")
            if (lost and not exit_.broken) or (exit_.superseded and not lost):
                self._say(what)
            else:
                self._failed(pod.pool, exit_.reason, what, last_words)
        self._changed()

    def _failed(self, pool: str, reason: str, what: str, last_words: list[str]) -> None:
        trouble = self._troubles.setdefault(pool, Trouble(longest=LONGEST_BACKOFF))
        lines = [f"    {line}" for line in last_words if last_words != trouble.last_words]
        pause = trouble.failed(reason, what, last_words, now=self._now())
        if lines or trouble.failures.bit_count() == 1:  # 1, 2, 4, 8…: somebody may have left it like that on purpose
            self._say("\n".join([f"pool {pool}: {what}; next try in {pause:.0f} s", *lines]))

    async def _tell_gone(self, pod_id: UUID, reason: str, *, proven: bool = True) -> list[UUID]:
        """The runs that lost their worker. What the store could not be told now, it is told at the next tick."""
        self._untold[pod_id] = reason, proven
        try:
            lost = await self._capacity.pod_gone(pod_id, reason, proven=proven)
        except (PerdureError, OSError):
            return []
        self._untold.pop(pod_id, None)
        return lost

    async def _end_retiring(self, demand: list[PoolDemand]) -> None:
        """Pods that were told to retire and stay, and rows of pods that are not here."""
        now = self._now()
        lost = {pod for pool in demand for pod in pool.lost}
        for pod_id in (pod for pool in demand for pod in pool.retiring):
            pod = self._pods.get(pod_id)
            age = now - self._retiring.setdefault(pod_id, now)
            if pod is None and age >= RETIRE_SECONDS:
                await self._capacity.pod_gone(pod_id, "Unknown", proven=False)
                self._retiring.pop(pod_id)
            elif pod is not None and pod_id in lost and age >= LOST_SECONDS:
                pod.kill()
            elif pod is not None and age >= RETIRE_SECONDS:
                pod.stop()
