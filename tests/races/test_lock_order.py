"""One lock discipline: whatever meets whatever in whatever order, Postgres never has to break a deadlock.

The fixture ``store`` fails each of these when the server's log says "deadlock detected"; here the opposite orders are brought about.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.harness import runs

from perdure_operator.domain.errors import Busy, NameTaken
from perdure_operator.store.operations import Control
from perdure_operator.store.store import Beat, NewRun, Store

ROUNDS = 150


async def quiet(store: Store) -> None:
    """Applies what is left to apply."""
    for _ in range(20):
        await store.control([runs.settle(run) for run in await store.unapplied_runs()])
    assert await store.unapplied_runs() == []


@pytest.mark.parametrize("lane", ["control", "journal"])
async def test_batches_with_the_same_runs_in_opposite_orders(store: Store, lane: str) -> None:
    held = [await runs.running(store) for _ in range(12)]

    async def batch(n: int) -> None:
        order = held if n % 2 else held[::-1]
        if lane == "journal":
            outcomes = await store.journal([runs.step(h, f"step:{n}#0") for h in order], wait=True)
        else:
            # Signals raise the lease's counter too: a second lock for each run, taken in the order of the batch.
            outcomes = await store.control([runs.signal(h.run, "s", str(n)) for h in order], wait=True)
        assert {outcome.code for outcome in outcomes} == {"ok"}

    for start in range(0, ROUNDS, 10):
        await asyncio.gather(*(batch(n) for n in range(start, start + 10)))


async def test_creating_the_same_names_in_opposite_orders(store: Store, pg: asyncpg.Connection) -> None:
    async def create(n: int) -> bool:
        names = [f"{n // 2}-{k}" for k in range(10)]
        try:
            await store.create_runs([NewRun(runs.columns(name=name), b"null") for name in (names if n % 2 else names[::-1])])
        except NameTaken:
            return False
        return True

    made = await asyncio.gather(*(create(n) for n in range(20)))
    assert [one + other for one, other in zip(made[::2], made[1::2], strict=True)] == [1] * 10
    assert await pg.fetchval("select count(*) from perdure.runs") == 100


class Storm:
    """Everything at once, to a few families: each parent is told, cancelled, heard of and finished while its children end."""

    def __init__(self, store: Store, pg: asyncpg.Connection, rng: random.Random) -> None:
        self.store, self.pg, self.rng = store, pg, rng
        self.parents: list[runs.Held] = []
        self.children: list[runs.Held] = []
        self.busy = 0

    async def family(self, size: int) -> None:
        parent = await runs.running(self.store)
        self.parents.append(parent)
        for n in range(size):
            spawn, kid = runs.spawn(parent, f"spawn:{n}#0", self.rng.choice(["cancel", "detach", "fail_parent"]))
            await runs.apply(self.store, spawn)
            held = await runs.lease_next(self.store)
            assert held.run == kid
            self.children.append(held)

    def any(self) -> runs.Held:
        return self.rng.choice(self.parents + self.children)

    async def batch(self, make: Callable[[runs.Held], Control]) -> None:
        some = self.rng.sample(self.parents + self.children, 8)
        for outcome in await self.store.control([make(held) for held in some], wait=self.rng.random() < 0.5):
            self.busy += outcome.code == "busy"

    async def signals(self) -> None:
        await self.batch(lambda held: runs.signal(held.run, "s", str(uuid4())))

    async def settles(self) -> None:
        await self.batch(lambda held: runs.settle(held.run))

    async def events(self) -> None:
        await self.batch(lambda held: runs.work(held, "event", kind="x", expectedSeq=None))

    async def finishes(self) -> None:
        await self.batch(lambda held: runs.work(held, "finish", outcome=self.rng.choice(["succeeded", "failed"]), error=None))

    async def cancel(self) -> None:
        await runs.apply(self.store, runs.verb(self.rng.choice(self.parents).run, "cancel"))

    async def expire(self) -> None:
        held = self.any()
        await self.store.control([Control(held.run, "expire", held.lease)], wait=True)

    async def gone(self) -> None:
        await self.store.pod_gone(self.any().fence.holder, "PodDeleted")

    async def beats(self) -> None:
        everybody = self.parents + self.children
        self.rng.shuffle(everybody)
        pods = [held.fence.holder for held in everybody]
        await self.store.heartbeat(runs.GATEWAY, [Beat(h.run, h.fence.epoch, h.fence.holder) for h in everybody], pods)

    async def news(self) -> None:
        await self.store.news(runs.GATEWAY)

    async def hello(self) -> None:
        await self.store.pod_hello(self.any().fence.holder, "default/p", runs.GATEWAY, reuse=False, run=None, epoch=None)

    async def lease(self) -> None:
        pods = [await runs.idle_pod(self.store) for _ in range(2)]
        await self.store.dispatch(runs.GATEWAY, pods)


async def test_everything_at_once(store: Store, pg: asyncpg.Connection) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(4):
        storm = Storm(store, pg, rng)
        for _ in range(3):
            await storm.family(4)
        often: list[Callable[[], Awaitable[None]]] = [storm.signals, storm.settles, storm.events, storm.beats, storm.news]
        seldom: list[Callable[[], Awaitable[None]]] = [storm.finishes, storm.cancel, storm.expire, storm.gone, storm.hello, storm.lease]

        async def client(often: list[Callable[[], Awaitable[None]]], seldom: list[Callable[[], Awaitable[None]]]) -> None:
            for _ in range(25):
                with suppress(Busy):  # two seconds on one lock; a deadlock is found in the server's log
                    await (rng.choice(seldom) if rng.random() < 0.2 else rng.choice(often))()

        await asyncio.gather(*(client(often, seldom) for _ in range(10)))
        # The next family leases what it has just made: nothing of this one may be queued any more.
        for run in await pg.fetch("select run_id from perdure.runs where finished_at is null"):
            await runs.apply(store, runs.verb(run[0], "cancel"))
        await quiet(store)


async def test_pods_are_taken_away_while_a_batch_releases_them(store: Store) -> None:
    for _ in range(40):
        held = [await runs.running(store) for _ in range(8)]
        ends = [runs.work(h, "finish", outcome="succeeded") for h in sorted(held, key=lambda h: h.fence.holder, reverse=True)]
        await asyncio.gather(store.control(ends, wait=True), store.take_away([h.fence.holder for h in held]))


async def test_all_leases_are_told_again_while_a_batch_has_news_for_them(store: Store) -> None:
    held = [await runs.running(store) for _ in range(30)]
    for n in range(60):
        signals = [runs.signal(h.run, "s", str(n)) for h in sorted(held, key=lambda h: h.run, reverse=True)]
        await asyncio.gather(store.control(signals, wait=True), store.tell_again(runs.GATEWAY))


async def test_a_pod_ends_while_a_batch_leaves_its_call_unknown_and_gives_the_run_back(store: Store) -> None:
    """Both write that the call's executor is lost, and both need the lease."""
    call = {"key": "k", "tool": "pay", "effect": "external", "policy": "query", "fingerprint": "f", "occurrence": 0, "step": None}
    call |= {"timeoutSeconds": 5.0, "leaseSeconds": 15.0, "maxRetries": 3}
    for n in range(60):
        held = await runs.running(store)
        begun = await runs.apply(store, runs.work(held, "activity.begin", payload=b"{}", token=str(uuid4()), **call))
        batch = [runs.work(held, "activity.end", payload=b"null", key="k", token=begun.answer["token"], state="unknown", stillRunning=True)]
        batch += [runs.work(held, "event", kind="x", expectedSeq=None) for _ in range(12)]
        batch += [runs.work(held, "finish", outcome="failed", error={"type": "X", "message": ""})]

        async def ends(pod: UUID, delay: float) -> None:
            await asyncio.sleep(delay)
            await store.pod_gone(pod, "PodDeleted")

        await asyncio.gather(store.control(batch, wait=True), ends(held.fence.holder, 0.0005 * (n % 12)))
        await store.control([runs.verb(held.run, "cancel")], wait=True)
