"""How many pods there are: the rule by itself, and the fleet against a store and pods that the test controls."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure_operator.domain.errors import Unavailable
from perdure_operator.local.fleet import Fleet
from perdure_operator.local.processes import PodExit
from perdure_operator.services.capacity import Need, decide, spare
from perdure_operator.store.store import PoolDemand

CLEAN = PodExit(agent=0, sidecar=0, seconds=1, clean=True, stopped=False, sidecar_first=True)
CRASHED = PodExit(agent=1, sidecar=-15, seconds=0.2, clean=False, stopped=False, sidecar_first=False)
KILLED = PodExit(agent=-9, sidecar=-15, seconds=5, clean=False, stopped=False, sidecar_first=False)


def demand(
    pool: str = "default/worker", *, runnable: int = 0, idle: int = 0, starting: int = 0, leased: int = 0, **capacity: int
) -> PoolDemand:
    return PoolDemand(pool, {"capacity": capacity} if capacity else {}, runnable, idle, starting, leased, [])


def one(pool: PoolDemand, *, live: int | None = None, limit: int = 100, parallel: int = 100, cap: int | None = None) -> Need:
    there = pool.idle + pool.starting + pool.leased if live is None else live
    caps = {} if cap is None else {pool.pool: cap}
    return decide([pool], {pool.pool: there}, caps, limit=limit, parallel=parallel).get(pool.pool, Need())


@pytest.mark.parametrize(
    ("pool", "need"),
    [
        (demand(), Need()),
        (demand(runnable=3), Need(start=3)),
        (demand(runnable=3, idle=1, starting=1), Need(start=1)),
        (demand(runnable=1, idle=2), Need()),
        (demand(minIdle=2), Need(start=2)),
        (demand(minIdle=2, idle=1, leased=5), Need(start=1)),
        (demand(runnable=3, minIdle=2, idle=2), Need(start=3)),
        (demand(runnable=9, maxPods=4, leased=2), Need(start=2)),
        (demand(runnable=9, maxPods=4, leased=4), Need()),
        (demand(runnable=9, maxPods=0), Need()),
        (demand(idle=3), Need(retire=2)),
        (demand(idle=3, maxIdle=3), Need()),
        (demand(idle=3, maxIdle=0), Need(retire=3)),
        (demand(idle=3, minIdle=2), Need(retire=1)),
        (demand(idle=3, maxIdle=1, runnable=1), Need()),
    ],
)
def test_what_one_pool_needs(pool: PoolDemand, need: Need) -> None:
    assert one(pool) == need


def test_never_more_than_the_machine_takes() -> None:
    assert one(demand(runnable=50), limit=8) == Need(start=8)
    assert one(demand(runnable=50, leased=6), limit=8) == Need(start=2)
    assert one(demand(runnable=50, starting=3), parallel=4) == Need(start=1)
    assert one(demand(runnable=50, leased=8), limit=8) == Need()


def test_a_pool_that_breaks_starts_no_more_than_its_cap() -> None:
    assert one(demand(runnable=5, minIdle=2), cap=1) == Need(start=1)
    assert one(demand(runnable=5, minIdle=2), cap=0) == Need()


def test_runs_that_wait_come_before_warm_pods_and_pools_take_turns() -> None:
    pools = [demand("a/a", minIdle=5), demand("a/b", runnable=5), demand("a/c", runnable=5)]
    assert decide(pools, {}, {}, limit=5, parallel=9) == {"a/b": Need(start=3), "a/c": Need(start=2)}
    assert decide(pools, {}, {}, limit=12, parallel=99) == {"a/a": Need(start=2), "a/b": Need(start=5), "a/c": Need(start=5)}


def test_on_a_full_machine_idle_pods_of_other_pools_make_room() -> None:
    pools = [demand("a/a", idle=4, minIdle=4), demand("a/b", runnable=2)]
    assert decide(pools, {"a/a": 4}, {}, limit=4, parallel=4) == {"a/a": Need(retire=2)}


@pytest.mark.parametrize(
    ("pool", "unplaced", "pods"),
    [
        (demand(minIdle=1000, maxPods=2000, idle=1000), 0, 250),
        (demand(minIdle=1000, maxPods=2000, idle=750, starting=250), 0, 0),
        (demand(minIdle=1000, maxPods=2000, idle=760, starting=240), 0, 10),
        (demand(minIdle=1, idle=1), 0, 1),
        (demand(minIdle=2, idle=1, starting=1), 0, 0),
        (demand(idle=3), 0, 4),
        # They will never be up, for want of room: what is there is all that there will be.
        (demand(minIdle=10, maxPods=10, leased=8, idle=2), 0, 1),
        (demand(minIdle=10, idle=5, starting=5), 5, 1),
    ],
)
def test_idle_pods_are_replaced_while_others_are_warm(pool: PoolDemand, unplaced: int, pods: int) -> None:
    assert spare(pool, unplaced) == pods


class FakePod:
    def __init__(self, pod_id: UUID, pool: str, name: str) -> None:
        self.pod_id, self.pool, self.name = pod_id, pool, name
        self.exit: asyncio.Future[PodExit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> PodExit:
        return await asyncio.shield(self.exit)

    def stop(self, grace: float | None = None) -> None:
        if not self.exit.done():
            self.exit.set_result(PodExit(agent=-15, sidecar=-15, seconds=1, clean=False, stopped=True, sidecar_first=False))

    def kill(self) -> None:
        if not self.exit.done():
            self.exit.set_result(PodExit(agent=-9, sidecar=-9, seconds=1, clean=False, stopped=True, sidecar_first=False))


class Starter:
    def __init__(self) -> None:
        self.pods: list[FakePod] = []
        self.error: OSError | None = None

    async def start(self, pod_id: UUID, pool: str, spec: dict[str, Any]) -> FakePod:
        if self.error is not None:
            raise self.error
        self.pods.append(FakePod(pod_id, pool, f"worker-{len(self.pods) + 1}"))
        return self.pods[-1]

    def ended(self, pod: Any, exit_: PodExit) -> list[str]:
        return ["last words"]


class Capacity:
    """A store with one pool."""

    def __init__(self, **capacity: int) -> None:
        self.capacity, self.runnable, self.held = capacity, 0, set[UUID]()
        self.rows: dict[UUID, str] = {}
        self.gone: dict[UUID, str] = {}
        self.taken: list[UUID] = []
        self.lost: set[UUID] = set()
        self.unproven: set[UUID] = set()
        self.trouble: dict[str, Any] | None = None
        self.down = False

    def _up(self) -> None:
        if self.down:
            raise Unavailable

    async def pool_demand(self) -> list[PoolDemand]:
        self._up()
        states = list(self.rows.values())
        counts = {state: states.count(state) for state in ("idle", "starting", "leased")}
        retiring = [pod for pod, state in self.rows.items() if state == "retiring"]
        lost = [pod for pod in retiring if pod in self.lost]
        spec = {"capacity": self.capacity}
        return [PoolDemand("default/worker", spec, self.runnable, **counts, retiring=retiring, trouble=self.trouble, lost=lost)]

    async def tell_trouble(self, pool: str, trouble: dict[str, Any] | None, /) -> None:
        self._up()
        self.trouble = trouble

    async def register_pod(self, pod: UUID, pool: str, /) -> None:
        self._up()
        self.rows[pod] = "starting"

    async def pod_gone(self, pod: UUID, reason: str, /, *, proven: bool = True) -> list[UUID]:
        self._up()
        self.unproven |= set() if proven else {pod}
        self.rows.pop(pod, None)
        self.gone[pod] = reason
        return [uuid4()] if pod in self.held else []

    async def take_away(self, pods: list[UUID], /) -> None:
        self._up()
        self.taken += pods

    async def retire_idle(self, pool: str, count: int, /) -> list[UUID]:
        idle = [pod for pod, state in self.rows.items() if state == "idle"][:count]
        self.rows |= dict.fromkeys(idle, "retiring")
        return idle


class World:
    def __init__(self, **capacity: int) -> None:
        self.store, self.starter, self.said, self.now = Capacity(**capacity), Starter(), list[str](), 100.0
        self.fleet = Fleet(self.store, self.starter, limit=10, parallel=10, say=self.said.append, now=lambda: self.now)

    @property
    def pods(self) -> list[FakePod]:
        return self.starter.pods

    async def end(self, pod: FakePod, exit_: PodExit) -> None:
        pod.exit.set_result(exit_)
        for _ in range(10):  # its watcher has a few steps to go
            await asyncio.sleep(0)
        assert pod.pod_id not in self.fleet.pods


async def test_pods_are_started_for_runs_and_their_end_is_told() -> None:
    world = World()
    world.store.runnable = 2
    await world.fleet.tick()
    assert list(world.store.rows.values()) == ["starting", "starting"]
    await world.fleet.tick()
    assert len(world.pods) == 2, "those that are starting count"
    world.store.runnable = 0
    await world.end(world.pods[0], CLEAN)
    assert world.store.gone == {world.pods[0].pod_id: "Completed"}
    assert world.said == []


async def test_a_pool_that_crashes_is_tried_again_ever_more_slowly_and_one_at_a_time() -> None:
    world = World(minIdle=3)
    await world.fleet.tick()
    assert len(world.pods) == 3
    for pod in list(world.pods):
        await world.end(pod, CRASHED)
    assert world.said[0] == ("pool default/worker: worker-1: agent exited with code 1 after 0.2 s; next try in 1 s\n    last words")
    assert world.said[1].endswith("next try in 2 s"), "the same last words are told once"
    world.now += 3.9
    await world.fleet.tick()
    assert len(world.pods) == 3
    world.now += 0.2
    await world.fleet.tick()
    await world.fleet.tick()
    assert len(world.pods) == 4, "one, and no other while it is starting"
    world.store.rows[world.pods[3].pod_id] = "leased"
    await world.end(world.pods[3], CLEAN)
    await world.fleet.tick()
    assert len(world.pods) == 7, "all again after one that did well"


async def test_the_store_is_told_why_pods_do_not_start_until_one_does() -> None:
    world = World(minIdle=1)
    world.store.trouble = {"reason": "of an earlier session"}
    await world.fleet.tick()
    assert world.store.trouble is None
    await world.end(world.pods[0], CRASHED)
    await world.fleet.tick()
    told = world.store.trouble or {}
    assert (told["reason"], told["failures"], told["lastWords"]) == ("AgentExited", 1, ["last words"])
    assert told["message"] == "worker-1: agent exited with code 1 after 0.2 s: last words"
    assert datetime.fromisoformat(told["nextTry"]).tzinfo is not None
    world.now += 2
    await world.fleet.tick()
    assert world.store.trouble == told, "one that is starting proves nothing"
    world.store.rows[world.pods[1].pod_id] = "idle"
    await world.fleet.tick()
    assert world.store.trouble is None
    await world.end(world.pods[1], CRASHED)
    await world.fleet.tick()
    assert world.store.trouble is not None
    assert world.store.trouble["failures"] == 2, "it had not done anything useful"


async def test_the_pause_is_bounded() -> None:
    world = World(minIdle=1)
    for _ in range(20):
        await world.fleet.tick()
        await world.end(world.pods[-1], CRASHED)
        world.now += 10
    assert world.said[-1].endswith("next try in 10 s")
    assert len(world.pods) == 20


async def test_a_killed_worker_slows_nothing_down() -> None:
    world = World()
    world.store.runnable = 1
    await world.fleet.tick()
    world.store.held.add(world.pods[0].pod_id)
    await world.end(world.pods[0], KILLED)
    assert world.store.gone[world.pods[0].pod_id] == "AgentKilled"
    assert world.said == ["worker-1: agent was killed by SIGKILL after 5.0 s; its run is queued again"]
    await world.fleet.tick()
    assert len(world.pods) == 2


@pytest.mark.parametrize(("held", "slow"), [(False, False), (True, True)])
async def test_an_agent_that_gave_way_to_another_is_not_broken_unless_its_run_was_its_own(held: bool, slow: bool) -> None:
    world = World(minIdle=1)
    await world.fleet.tick()
    if held:
        world.store.held.add(world.pods[0].pod_id)
    await world.end(world.pods[0], PodExit(agent=75, sidecar=-15, seconds=1, clean=False, stopped=False, sidecar_first=False))
    assert ("next try" in world.said[0]) is slow


async def test_a_pod_that_cannot_be_started_leaves_no_row() -> None:
    world = World(minIdle=1)
    world.starter.error = FileNotFoundError(2, "No such file or directory")
    await world.fleet.tick()
    assert world.store.rows == {}
    assert "cannot start a pod" in world.said[0]


async def test_what_the_store_could_not_be_told_is_told_later() -> None:
    world = World(minIdle=1)
    await world.fleet.tick()
    world.store.down = True
    await world.end(world.pods[0], CLEAN)
    with pytest.raises(Unavailable):
        await world.fleet.tick()
    assert world.store.gone == {}
    world.store.down = False
    await world.fleet.tick()
    assert world.store.gone == {world.pods[0].pod_id: "Completed"}
    assert len(world.pods) == 2


async def test_a_retiring_pod_that_stays_is_stopped_and_a_row_without_a_pod_is_removed() -> None:
    world = World(minIdle=1)
    await world.fleet.tick()
    ghost = uuid4()
    world.store.rows[world.pods[0].pod_id] = "retiring"
    world.store.rows[ghost] = "retiring"
    await world.fleet.tick()
    assert not world.pods[0].exit.done()
    world.now += 10
    await world.fleet.tick()
    assert world.pods[0].exit.done()
    assert world.store.gone == {ghost: "Unknown"}


async def test_closing_stops_every_pod_and_tells_the_store() -> None:
    world = World(minIdle=3)
    await world.fleet.tick()
    await world.fleet.close(1.0)
    assert set(world.store.taken) == set(world.store.gone), "what they had is no failure"
    assert set(world.store.gone.values()) == {"Stopped"}
    assert len(world.store.gone) == 3
    assert world.said == []


def test_an_agent_that_ends_too_soon_is_told_what_is_missing_in_any_language() -> None:
    ended = PodExit(agent=0, sidecar=-15, seconds=1, clean=False, stopped=False, sidecar_first=False)
    assert ended.words == ("agent exited with code 0 without finishing its run (an agent in Python calls serve(), others POST /v1/finish)")


async def test_a_pod_whose_run_was_taken_from_it_is_killed_soon_and_another_is_not() -> None:
    """The first may stand still, and go on. The other has time to end by itself."""
    world = World()
    world.store.runnable = 2
    await world.fleet.tick()
    lost, done = world.pods
    world.store.runnable = 0
    world.store.rows = {lost.pod_id: "retiring", done.pod_id: "retiring"}
    world.store.lost = {lost.pod_id}
    await world.fleet.tick()
    world.now += 5.9
    await world.fleet.tick()
    assert not lost.exit.done(), "it may have receipts to send"
    world.now += 0.2
    await world.fleet.tick()
    assert (await lost.exit).agent == -9
    assert not done.exit.done()
    for _ in range(10):  # its watcher has a few steps to go
        await asyncio.sleep(0)
    assert world.store.gone == {lost.pod_id: "Stopped"}
    assert not world.store.unproven


async def test_what_nobody_knows_of_is_no_proof() -> None:
    """A row without a pod here, and a pod that left processes which do not end."""
    world = World()
    stranger = uuid4()
    world.store.runnable = 1
    world.store.rows[stranger] = "retiring"
    await world.fleet.tick()
    world.now += 10
    await world.fleet.tick()
    assert world.store.gone == {stranger: "Unknown"}
    [pod] = world.pods
    await world.end(pod, PodExit(agent=1, sidecar=0, seconds=1, clean=False, stopped=False, sidecar_first=False, proven=False))
    assert world.store.unproven == {stranger, pod.pod_id}
