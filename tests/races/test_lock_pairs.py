"""Every pair of statements that lock more than one row, run against each other: Postgres never has a deadlock to break.

``WIDE`` is the list of those statements. ``test_the_list_is_complete`` compares it with what the store's Python sends and with what the SQL
functions contain, so that a new one cannot be forgotten. All pairs work on the same few runs, pods, resources and triggers, in changing
orders, without any lock of the test; the fixture ``store`` fails when the server's log says "deadlock detected".
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
from tests.harness import runs
from tests.harness.triggers import Bench, every

from perdure_operator import store as store_package
from perdure_operator.domain.errors import Busy, TriggerNotFound
from perdure_operator.store.operations import Control, Fence
from perdure_operator.store.resources import Resources
from perdure_operator.store.store import Beat, NewRun, Store

RUNS, TRIGGERS = 12, 4
SECONDS = 0.12
"""For which a pair is run. An inversion is found within a few rounds, of which this has dozens."""


def unheard(held: runs.Held, number: int) -> list[Control]:
    """The begin and the end of a call that may go on all the same."""
    key, token = f"k{number}", str(uuid4())
    begin = {"tool": "pay", "effect": "external", "policy": "ask", "fingerprint": "f", "occurrence": 0, "step": None}
    begin |= {"timeoutSeconds": 30.0, "leaseSeconds": 15.0, "maxRetries": 3, "key": key, "token": token}
    end = {"key": key, "token": token, "state": "unknown", "stillRunning": True, "providerRef": None, "error": None}
    return [runs.work(held, "activity.begin", payload=b"{}", **begin), runs.work(held, "activity.end", **end)]


class Scene:
    """Runs at work and asleep, the pods that have them and idle ones, a resource a run, a few triggers."""

    def __init__(self, store: Store, pg: asyncpg.Connection) -> None:
        self.store, self.pg, self.resources = store, pg, Resources(store)
        self.bench = Bench(store, pg)
        self.rng = random.Random()
        self.runs: list[UUID] = []
        self.idle: set[UUID] = set()
        self.numbers = itertools.count()

    async def make(self) -> Scene:
        await self.bench.setup()
        self.runs = [await runs.pending(self.store, max_losses=10**6, max_retries=10**6) for _ in range(RUNS)]
        for run in random.sample(self.runs, RUNS):  # the rows lie in another order than the runs' ids
            await self.pg.execute(
                "insert into perdure.resources (run_id, uid, name, changed_seq) values ($1, gen_random_uuid(), 'n', 1)", run
            )
        for n in range(TRIGGERS):
            await self.bench.put(f"t{n}", every(3600))
        await self.again()
        return self

    async def again(self) -> None:
        """Pods that lost their place get one, pods that gave up a run wait again, and what is queued is leased."""
        for pod in await self.rows("select pod_id from perdure.pods where state = 'leased' and run_id is null"):
            if await self.store.pod_idle(pod[0], runs.GATEWAY):
                self.idle.add(pod[0])
        while len(self.idle) < RUNS // 2:
            pod = uuid4()
            if (await self.store.pod_hello(pod, "default/p", runs.GATEWAY, reuse=True)).status == "idle":
                self.idle.add(pod)
        await self.dispatch()

    async def rows(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        async with self.store.connection() as connection:
            return list(await connection.fetch(query, *arguments))

    async def held(self) -> list[runs.Held]:
        """In one order or the other."""
        rows = await self.rows("select run_id, epoch, holder from perdure.leases order by run_id")
        found = [runs.Held(row[0], Fence(row[1], row[2])) for row in rows]
        return found if self.rng.random() < 0.5 else found[::-1]

    def shuffled(self) -> list[UUID]:
        return self.rng.sample(self.runs, RUNS)

    # ------------------------------------------------------------------------------------ statements that lock many rows

    async def journal(self) -> None:
        key = f"step:{next(self.numbers)}#0"
        await self.store.journal([runs.step(held, key) for held in await self.held()], wait=True)

    async def control(self) -> None:
        """Signals raise leases, pauses and resumes move resources, a yield gives back leases and pods, a wake takes an idle pod."""
        held = {one.run: one for one in await self.held()}
        operations: list[Control] = []
        for run in self.shuffled():
            match self.rng.randrange(4):
                case 0 if run in held:
                    # A call that nobody has heard the end of leaves a row about its executor, which the end of its pod writes too.
                    operations += [*unheard(held[run], next(self.numbers)), runs.work(held[run], "finish", outcome="yielded")]
                case 1:
                    operations += [runs.verb(run, "pause"), runs.verb(run, "resume")]
                case _:
                    operations.append(runs.signal(run, "s", str(uuid4())))
        idle = self.rng.sample(sorted(self.idle), len(self.idle))
        for outcome in await self.store.control(operations, wait=True, idle=idle, gateway=runs.GATEWAY):
            if outcome.leased is not None:
                self.idle.discard(outcome.leased)

    async def dispatch(self) -> None:
        idle = self.rng.sample(sorted(self.idle), len(self.idle))
        for grant in await self.store.dispatch(runs.GATEWAY, idle):
            self.idle.discard(grant.pod)

    async def create(self) -> None:
        names = [f"n{next(self.numbers) // 3}-{n}" for n in range(4)]
        new = [NewRun(runs.columns(name=name, pool="default/nobody"), b"null") for name in self.rng.sample(names, 4)]
        with suppress(Exception):  # a name is taken
            await self.store.create_runs(new)

    async def heartbeat(self) -> None:
        held = await self.held()
        beats = [Beat(one.run, one.fence.epoch, one.fence.holder) for one in held]
        await self.store.heartbeat(runs.GATEWAY, beats, [*(one.fence.holder for one in held), *self.idle])

    async def tell_again(self) -> None:
        await self.store.tell_again(runs.GATEWAY)

    async def news(self) -> None:
        await self.store.news(runs.GATEWAY)

    async def hello(self) -> None:
        for one in (await self.held())[:3]:
            await self.store.pod_hello(one.fence.holder, "default/p", runs.GATEWAY, reuse=True, run=one.run, epoch=one.fence.epoch)

    async def gone(self) -> None:
        for one in (await self.held())[:2]:
            await self.store.pod_gone(one.fence.holder, "PodDeleted")

    async def processes_ended(self) -> None:
        for one in await self.held():
            await self.store.processes_ended(one.fence.holder, (one.run, one.fence.epoch))

    async def retire_idle(self) -> None:
        for pod in await self.store.retire_idle("default/p", 2):
            self.idle.discard(pod)

    async def retire_silent(self) -> None:
        await self.store.retire_silent_pods(0.0)
        self.idle.clear()

    async def projected(self) -> None:
        due = await self.resources.due(128, progress_seconds=0, wake_seconds=0)
        if due:
            await self.resources.projected(self.rng.sample(due, len(due)))

    async def admit(self) -> None:
        run = self.rng.choice(self.runs)
        [row] = await self.rows("select uid from perdure.resources where run_id = $1", run)
        name = f"run-{run}"
        await self.resources.admit(row["uid"], 1, NewRun(runs.columns(name=name), b"null"), bound=run)

    async def fire(self) -> None:
        await self.bench.gateway.scheduler.tick()
        for _ in range(2):
            await self.bench.emit(f"t{self.rng.randrange(TRIGGERS)}")

    async def put_trigger(self) -> None:
        with suppress(AssertionError):  # somebody else was faster
            await self.bench.put(f"t{self.rng.randrange(TRIGGERS)}", every(3600), suspend=self.rng.random() < 0.3)

    async def delete_trigger(self) -> None:
        key = f"default/t{self.rng.randrange(TRIGGERS)}"
        row = await self.bench.triggers.get(key)
        if row is not None:
            await self.bench.triggers.delete(key, row.uid)

    async def route(self) -> None:
        await self.bench.gateway.router.route_due()

    async def release(self) -> None:
        await self.bench.triggers.release("a", None)

    async def pool_changed(self) -> None:
        await self.resources.pool_changed("default", "p")

    async def follow(self) -> None:
        for n in range(TRIGGERS):
            await self.bench.triggers.summary(f"default/t{n}")


WIDE: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "journal_batch": Scene.journal, "control_batch": Scene.control, "dispatch": Scene.dispatch, "create_runs": Scene.create,
    "heartbeat": Scene.heartbeat, "tell_again": Scene.tell_again, "news": Scene.news, "pod_hello": Scene.hello, "pod_gone": Scene.gone,
    "retire_idle": Scene.retire_idle, "retire_silent_pods": Scene.retire_silent, "projected": Scene.projected,
    "admit_resource": Scene.admit, "fire": Scene.fire, "emit": Scene.fire,
    "put_trigger": Scene.put_trigger, "delete_trigger": Scene.delete_trigger,
    "claim_deliveries": Scene.route, "route_delivery": Scene.route, "release_deliveries": Scene.release, "follow_runs": Scene.follow,
    "pool_changed": Scene.pool_changed, "executors_gone": Scene.processes_ended,
}  # fmt: skip
ONE = {
    "renew", "lease_moves", "pod_idle", "take_pod_away", "retire_pod", "tell_trouble", "lead", "fail_delivery",
    # Without a function: the row that they name.
    "insert into pods", "insert into pools", "insert into migrations", "update resources", "update pods", "update leaders",
    "update deliveries", "delete from pools",
}  # fmt: skip
READS = {
    "now", "admits", "runnable_pools", "pool_demand", "due_runs", "unapplied_runs", "missed_wakes",
    "silent_leases", "lease_silence", "context", "session",
    "due_projections", "trigger_summary", "outdated_runs", "terminal", "journal_page", "outcome",
}  # fmt: skip
_LOCKS = re.compile(r"for (no key )?(update|key share|share)|(update|insert into|delete from) perdure\.", re.IGNORECASE)


async def test_the_list_is_complete(store: Store, pg: asyncpg.Connection) -> None:
    sent = set()
    for file in Path(str(store_package.__file__)).parent.glob("*.py"):
        source = re.sub(r'"\s*\n\s*f?"', "", file.read_text())  # strings that go on in the next line
        sent |= set(re.findall(r"perdure\.(\w+)\(", source)) - {"name"}
        sent |= {f"{verb} {table}" for verb, table in re.findall(r"(update|insert into|delete from) perdure\.(\w+)[^(\w]", source)}
    assert sent == WIDE.keys() | ONE | READS
    reading = await pg.fetch(
        "select proname, prosrc from pg_proc where pronamespace = 'perdure'::regnamespace and proname = any ($1)", READS
    )
    assert {row["proname"] for row in reading} == READS
    assert [row["proname"] for row in reading if _LOCKS.search(row["prosrc"])] == []


async def hesitate(pg: asyncpg.Connection) -> None:
    """From now on a statement that changes rows of these tables stands still for a moment with each in its hands: what happens in one of a
    thousand meetings happens in one of a few then."""
    await pg.execute(
        "create function perdure.hesitate() returns trigger language plpgsql as "
        "$$ begin perform pg_sleep(random() * 0.002); return new; end $$"
    )
    for table in ("leases", "pods", "resources", "triggers", "deliveries"):
        await pg.execute(f"create trigger hesitate before update on perdure.{table} for each row execute function perdure.hesitate()")


async def test_every_pair(store: Store, pg: asyncpg.Connection) -> None:
    scene = await Scene(store, pg).make()
    await hesitate(pg)
    acting = list(dict.fromkeys(WIDE.values()))  # some act for two statements
    loop = asyncio.get_running_loop()
    deadlocks: list[str] = []

    async def keep_on(act: Callable[[Scene], Awaitable[None]], until: float) -> None:
        while loop.time() < until:
            try:
                await act(scene)
            except TriggerNotFound:
                pass
            except Busy as busy:  # two seconds on one lock are none
                if "deadlock" in str(busy):
                    deadlocks.append(f"{act.__name__} in {one.__name__} against {other.__name__}: {busy}")

    for one, other in itertools.combinations_with_replacement(acting, 2):
        until = loop.time() + SECONDS
        await asyncio.gather(*(keep_on(act, until) for act in (one, one, other, other, Scene.again)))
    assert deadlocks == []
    for run in await pg.fetch("select run_id from perdure.runs where finished_at is null"):
        await runs.apply(store, runs.verb(run[0], "cancel"))
