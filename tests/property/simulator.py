"""A small world on the real store: workers, people and services act at once, on several connections, while calls fail in every way.

A seed decides the programs and the faults. A call is lost before it is sent, its answer is lost after the commit, or its connection is
killed or its statement cancelled on the way; then nobody knows what happened, and the same request ids are sent again. Workers crash or
freeze without a word, the clock jumps, leases expire under workers that still believe in them.

The world writes down what it was answered and what its tools really did. From that, ``check`` says what must hold at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec
from tests.property.faults import FaultyStore, Saboteur
from tests.property.runs import columns

from perdure_operator.domain.errors import Busy, Unavailable
from perdure_operator.store.operations import Control, Fence, JournalStep, Outcome, SliceWrite
from perdure_operator.store.store import Beat, NewRun, Store

T = TypeVar("T")
POOLS = ("ns/a", "ns/b")
POOL_LIMIT = 3
LEASE_SECONDS = 30.0
TOOL_SECONDS = 20.0
TOOLS = {
    "mail": ("external", "query"),
    "pay": ("external", "assume-not-done"),
    "note": ("memory", "retry-same-key"),
    "file": ("local", "assume-not-done"),
}
SIGNALS = ("go", "stop")
OVER = {"lease-lost", "run-finished", "not-running", "deadline-exceeded"}


@dataclass
class Execution:
    """A granted call of a tool. ``acts_at``: when it will act (seconds of the database's clock), None when it has or never will."""

    pod: UUID
    acts_at: float | None = None
    acted: bool = False


@dataclass
class Lease:
    run: UUID
    fence: Fence
    gateway: str


@dataclass
class World:
    """``said``: what the store acknowledged. ``done``: what tools did, by (run, key)."""

    seed: int
    stores: dict[str, FaultyStore]
    plain: Store
    random: Random = field(init=False)
    signals: Counter[tuple[UUID, str, str]] = field(default_factory=Counter)
    steps: dict[tuple[UUID, str], bytes] = field(default_factory=dict)
    chunks: set[tuple[UUID, int]] = field(default_factory=set)
    maybe_chunks: set[tuple[UUID, int]] = field(default_factory=set)
    executions: defaultdict[tuple[UUID, str], list[Execution]] = field(default_factory=lambda: defaultdict(list))
    settled: set[tuple[UUID, str]] = field(default_factory=set)
    leases: dict[UUID, Lease] = field(default_factory=dict)
    pods: dict[UUID, str] = field(default_factory=dict)
    runs: list[UUID] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    history: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    calm: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.now = 0.0

    def mint(self) -> UUID:
        return UUID(int=self.random.getrandbits(128))

    def say(self, what: str) -> None:
        self.history.append(f"{self.now:8.1f} {what}")

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.wrong.append(what)

    # ------------------------------------------------------------------------------------------------------------- calls

    async def sure(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until there is an answer. The call is safe to repeat."""
        while True:
            try:
                return await call()
            except (Unavailable, Busy):
                await asyncio.sleep(0.001)

    async def control(self, gateway: str, *operations: Control) -> list[Outcome]:
        """One batch, sent again with the same request ids as long as no answer comes; what is locked goes alone and waits."""
        store = self.stores[gateway]
        outcomes = await self.sure(lambda: store.control(operations, idle=self.idle_pods(gateway), gateway=gateway))
        for n, (op, outcome) in enumerate(zip(operations, outcomes, strict=True)):
            while outcomes[n].code == "busy":
                [outcomes[n]] = await self.sure(lambda op=op: store.control([op], wait=True, idle=self.idle_pods(gateway), gateway=gateway))
            if outcome.leased is not None and outcome.epoch is not None:
                self.granted(op.run, outcome.epoch, outcome.leased, gateway)
        return outcomes

    async def settle(self, gateway: str, runs: Sequence[UUID]) -> None:
        distinct = list(dict.fromkeys(runs))
        if distinct:
            await self.control(gateway, *(Control(run, "settle", {}) for run in distinct))

    def idle_pods(self, gateway: str) -> list[UUID]:
        return [pod for pod, at in self.pods.items() if at == gateway and pod not in self.leases]

    def granted(self, run: UUID, epoch: int, pod: UUID, gateway: str) -> None:
        self.say(f"{run.hex[-4:]} epoch {epoch} on {pod.hex[-4:]}")
        self.leases[pod] = Lease(run, Fence(epoch, pod), gateway)

    # ------------------------------------------------------------------------------------------------------ tools and time

    async def clock(self) -> float:
        async with self.plain.connection() as connection:
            self.now = float(await connection.fetchval("select extract(epoch from perdure.now())::float8"))
        for execution in [e for executions in self.executions.values() for e in executions]:
            if execution.acts_at is not None and execution.acts_at <= self.now:
                execution.acts_at, execution.acted = None, True
        return self.now

    async def pass_time(self, seconds: float) -> None:
        async with self.plain.connection() as connection:
            await connection.execute("update perdure.clock set shift = shift + $1 * interval '1 second'", seconds)
        await self.clock()

    def execution(self, run: UUID, key: str, answer: dict[str, Any], pod: UUID) -> Execution:
        """The guarantee, at the moment of the grant: nobody else can still act, and with a policy of asking nobody has."""
        earlier = self.executions[run, key]
        name = f"{key} of {run.hex[-4:]}"
        if answer["effect"] == "external":
            self.expect(
                not any(e.acts_at is not None for e in earlier), f"{name} was granted again while an earlier executor can still act"
            )
            if answer["policy"] == "query":
                self.expect(not any(e.acted for e in earlier), f"{name} was granted again although it had happened")
        self.expect((run, key) not in self.settled, f"{name} was granted again after its receipt was taken")
        execution = Execution(pod)
        earlier.append(execution)
        return execution

    def terminated(self, pod: UUID) -> None:
        """A process that is gone cannot act."""
        for execution in [e for executions in self.executions.values() for e in executions]:
            if execution.pod == pod:
                execution.acts_at = None

    # ----------------------------------------------------------------------------------------------------------- services

    async def serve(self, gateway: str) -> None:
        """What a gateway does in the background."""
        store = self.stores[gateway]
        while not self.over:
            with contextlib.suppress(Unavailable, Busy):
                idle = self.idle_pods(gateway)
                for grant in await store.dispatch(gateway, idle) if idle else []:
                    self.granted(grant.run, grant.epoch, grant.pod, gateway)
                await self.settle(gateway, [*await store.due_runs(), *await store.unapplied_runs()])
                beats = [Beat(lease.run, lease.fence.epoch, pod) for pod, lease in self.leases.items() if self.random.random() < 0.8]
                await store.heartbeat(gateway, beats, idle)
                for silent in await store.silent_leases(LEASE_SECONDS):
                    body = {"leaseEpoch": silent.epoch, "reason": "HeartbeatLost", "silentSeconds": LEASE_SECONDS}
                    await self.control(gateway, Control(silent.run, "expire", body))
                await store.news(gateway)
            await asyncio.sleep(0.003)

    async def staff(self, gateway: str, pool: str) -> None:
        """One place for a pod, filled again whenever the pod in it is used up or was killed."""
        while not self.over:
            await self.pod(self.mint(), gateway, pool, reuse=self.random.random() < 0.7)

    async def pod(self, pod: UUID, gateway: str, pool: str, *, reuse: bool) -> None:
        """One pod from its first hello to its end: brings its leases to a worker."""
        store, alive = self.stores[gateway], True
        while alive and not self.over:
            status = await self.sure(lambda: store.pod_hello(pod, pool, gateway, reuse=reuse, run=None, epoch=None))
            if status.status == "leased" and status.run is not None and status.epoch is not None:
                self.granted(status.run, status.epoch, pod, gateway)
            self.pods[pod] = gateway
            for _ in range(50):
                if pod in self.leases or self.over:
                    break
                await asyncio.sleep(0.001)
            lease = self.leases.get(pod)
            alive = status.status != "retire" and (lease is None or await self.work(lease))
            self.leases.pop(pod, None)
            if alive and reuse and lease is not None:
                self.terminated(pod)
                ended = (lease.run, lease.fence.epoch)
                alive = await self.sure(lambda ended=ended: store.pod_idle(pod, gateway, ended=ended))
        del self.pods[pod]
        end = self.random.choices(("seen to end", "deleted by force", "never heard of"), (5, 2, 3))[0]
        if end == "seen to end":
            self.terminated(pod)
        if end != "never heard of":
            reason, proven = self.random.choice(("PodDeleted", "AgentExited", "Evicted")), end == "seen to end"
            lost = await self.sure(lambda: store.pod_gone(pod, reason, proven=proven))
            self.say(f"{pod.hex[-4:]} {end}, lost {[run.hex[-4:] for run in lost]}")

    async def people(self) -> None:
        """Signals, each sent once or more; cancel, pause, resume; and the clock."""
        while not self.over:
            run, gateway = self.random.choice(self.runs), self.random.choice(tuple(self.stores))
            match self.random.choices(("signal", "verb", "time"), (8, 2, 1))[0]:
                case "signal":
                    name, id_ = self.random.choice(SIGNALS), str(self.random.randrange(40))
                    for _ in range(self.random.choice((1, 1, 2))):
                        [outcome] = await self.control(gateway, Control(run, "signal", {"name": name, "id": id_}, None, self.mint(), b"1"))
                        if outcome.code == "ok":
                            self.signals[run, name, id_] += not outcome.answer["duplicate"]
                        self.say(f"{run.hex[-4:]} signal {name} {id_}: {outcome.code} {outcome.answer} {outcome.state}")
                case "verb":
                    verb = self.random.choices(("cancel", "pause", "resume"), (0.2, 3, 6))[0]
                    await self.control(gateway, Control(run, verb, {}, None, self.mint()))
                    self.say(f"{run.hex[-4:]} {verb}")
                case "time":
                    await self.pass_time(self.random.choice((1, 5, 31, 60)))
            await asyncio.sleep(0.005)

    # ------------------------------------------------------------------------------------------------------------- workers

    async def work(self, lease: Lease) -> bool:
        """One attempt of an agent. False: its process is gone or frozen."""
        for _ in range(self.random.randrange(1, 12)):
            outcome = await self.act(lease)
            if outcome is None:
                return False
            if outcome.code in OVER or (outcome.state != "Running" and outcome.state is not None) or outcome.leased:
                return True
        ending = self.random.choices(("succeeded", "failed", "retry", "paused", "cancelled"), (3 if self.calm else 1, 0.3, 5, 2, 2))[0]
        [outcome] = await self.operate(lease, "finish", {"outcome": ending, "error": {"type": "E"}}, b'"result"')
        if outcome.code == "cancel-requested":
            await self.operate(lease, "finish", {"outcome": "cancelled"})
        return True

    async def operate(self, lease: Lease, kind: str, body: dict[str, Any], payload: bytes | None = None, **more: Any) -> list[Outcome]:
        pieces = self.pieces(lease.run)
        op = Control(lease.run, kind, body, lease.fence, self.mint(), payload, slices=pieces, **more)
        outcomes = await self.control(lease.gateway, op)
        self.kept(lease.run, pieces, outcomes[0])
        first = outcomes[0]
        self.say(f"{lease.run.hex[-4:]}/{lease.fence.epoch} {kind} {body.get('key', '')} {first.code} {first.answer} {first.state}")
        return outcomes

    def pieces(self, run: UUID) -> tuple[SliceWrite, ...]:
        """Now and then a chunk for the session."""
        if self.random.random() < 0.6:
            return ()
        number = self.random.getrandbits(40)
        self.maybe_chunks.add((run, number))
        return (SliceWrite("log", msgspec.json.encode([number]), append=True),)

    def kept(self, run: UUID, pieces: tuple[SliceWrite, ...], outcome: Outcome) -> None:
        if outcome.code == "ok" and not outcome.answer.get("existing") and not outcome.answer.get("evidence"):
            self.chunks |= {(run, msgspec.json.decode(piece.value)[0]) for piece in pieces}

    async def act(self, lease: Lease) -> Outcome | None:
        """One thing that an agent does. None: it crashed."""
        kind = self.random.choices(("step", "wait", "tool", "spawn", "event", "crash"), (6, 6, 8, 2, 2, 1))[0]
        match kind:
            case "step":
                return await self.step(lease)
            case "wait":
                return await self.wait(lease)
            case "tool":
                return await self.tool(lease)
            case "spawn" if len(self.runs) < 24:
                child = self.columns(self.random.choice(POOLS), self.random.choice(("cancel", "detach", "fail_parent")))
                body = {"key": f"spawn:c#{self.random.randrange(3)}", "fingerprint": None, "run": child}
                [outcome] = await self.operate(lease, "spawn", body, b"{}", payload_run=UUID(child["run_id"]))
                if outcome.code == "ok" and not outcome.answer["existing"]:
                    self.runs.append(UUID(child["run_id"]))
                return outcome
            case "crash":
                return None
        kind = self.random.choice(("event", "checkpoint"))
        body = {"kind": "x", "expectedSeq": None, "type": "step", "coversSeq": 0}
        return (await self.operate(lease, kind, body, b"{}"))[0]

    async def step(self, lease: Lease) -> Outcome:
        keys = self.random.sample(range(30), self.random.choice((1, 1, 3)))
        values = {f"step:s#{key}": msgspec.json.encode(self.random.getrandbits(30)) for key in keys}
        pieces = self.pieces(lease.run)
        steps = [
            JournalStep(lease.run, lease.fence, self.mint(), key, "s", "succeeded", value, slices=pieces if n == 0 else ())
            for n, (key, value) in enumerate(values.items())
        ]
        store = self.stores[lease.gateway]
        while True:
            outcomes = await self.sure(lambda: store.journal(steps, wait=self.random.random() < 0.5))
            if all(outcome.code != "busy" for outcome in outcomes):
                break
        self.say(f"{lease.run.hex[-4:]}/{lease.fence.epoch} steps {keys} {[(o.code, o.answer) for o in outcomes]}")
        self.kept(lease.run, pieces, outcomes[0])
        for step, outcome in zip(steps, outcomes, strict=True):
            if outcome.code == "ok" and not outcome.answer["existing"]:
                self.expect((step.run, step.key) not in self.steps, f"{step.key} of {step.run} was recorded twice")
                self.steps[step.run, step.key] = step.output
        return outcomes[-1]

    async def wait(self, lease: Lease) -> Outcome:
        children = [{"kind": "child_done", "name": str(run)} for run in self.runs[-2:]]
        choices = [
            *({"kind": "signal", "name": name} for name in SIGNALS),
            {"kind": "timer", "seconds": self.random.choice((0, 3, 40))},
            *children,
        ]
        body = {
            "key": f"wait:w#{self.random.randrange(8)}", "mode": self.random.choice(("any", "any", "all", "first_failure")),
            "on": self.random.choices(choices, k=self.random.randrange(1, 4)), "timeoutSeconds": self.random.choice((None, 20, 60)),
            "suspend": self.random.random() < 0.6, "fingerprint": None, "name": "",
        }  # fmt: skip
        return (await self.operate(lease, "wait", body))[0]

    async def tool(self, lease: Lease) -> Outcome | None:
        """Begins a call and, when it is granted, acts, or does not, now or later, and tells, or does not."""
        key = self.random.choice(tuple(TOOLS))
        effect, policy = TOOLS[key]
        call = {"key": key, "token": str(self.mint()), "timeoutSeconds": TOOL_SECONDS, "leaseSeconds": LEASE_SECONDS, "maxRetries": 9}
        begin = call | {"tool": key, "effect": effect, "policy": policy, "fingerprint": "f", "occurrence": 0}
        [outcome] = await self.operate(lease, "activity.begin", begin, b"{}")
        if outcome.answer.get("decision") == "unknown" and outcome.answer["policy"] in ("query", "ask"):
            await self.clock()
            earlier, by = self.executions[lease.run, key], "person" if outcome.answer["policy"] == "ask" else "query"
            happened = any(e.acted for e in earlier)
            if by == "person" and not happened and any(e.acts_at is not None for e in earlier):
                return outcome  # who looks closely sees that it may happen yet
            said = call | {"happened": happened, "providerRef": "p", "by": by}
            [outcome] = await self.operate(lease, "activity.resolve", said, b'"found"')
        if outcome.answer.get("decision") == "receipt":
            self.settled.add((lease.run, key))
        if outcome.answer.get("decision") not in ("execute", "retry"):
            return outcome
        now = await self.clock()
        execution = self.execution(lease.run, key, outcome.answer, lease.fence.holder)
        return await self.execute(lease, key, outcome, execution, now + outcome.answer.get("retryAfterSeconds", 0))

    async def execute(self, lease: Lease, key: str, outcome: Outcome, execution: Execution, now: float) -> Outcome | None:
        how = self.random.choices(("good", "refused", "unclear", "acts and dies", "dies", "freezes"), (5, 4, 3, 1, 1, 2))[0]
        self.say(f"{lease.run.hex[-4:]} {key}: {how}")
        if how == "freezes":
            execution.acts_at = now + self.random.random() * 10 * (TOOL_SECONDS + LEASE_SECONDS)  # no time limits what stands still
        execution.acted = how in ("good", "acts and dies") or (how == "unclear" and self.random.random() < 0.5)
        if how in ("acts and dies", "dies", "freezes"):
            return None
        state = {"good": "succeeded", "refused": "failed", "unclear": "unknown"}[how]
        body = {"key": key, "token": outcome.answer["token"], "state": state, "providerRef": "p", "error": None}
        if self.random.random() < 0.2:
            await self.pass_time(self.random.choice((1, 31)))  # the lease may be over when the receipt comes: evidence
        [ended] = await self.operate(lease, "activity.end", body, b'"receipt"')
        if state == "succeeded":
            self.expect(ended.code == "ok" and ended.answer["state"] == "SUCCEEDED", f"the receipt of {key} was not taken: {ended}")
            self.settled.add((lease.run, key))
        return Outcome("lease-lost", {}) if ended.answer.get("evidence") else ended

    # ------------------------------------------------------------------------------------------------------ beginning and end

    def columns(self, pool: str, policy: str = "cancel") -> dict[str, Any]:
        return columns(self.mint(), pool, parent_policy=policy, max_retries=20, backoff_seconds=1, max_losses=3, max_tool_retries=9)

    async def begin(self) -> None:
        await self.plain.upsert_pool("ns", "a", {}, POOL_LIMIT)
        await self.plain.upsert_pool("ns", "b", {}, None)
        new = [NewRun(self.columns(self.random.choice(POOLS)) | {"idempotency_key": str(n)}, b'{"in": 1}') for n in range(10)]
        store = self.random.choice(list(self.stores.values()))
        self.runs = [created.run for created in await self.sure(lambda: store.create_runs(new))]
        await self.clock()

    async def live(self, seconds: float) -> None:
        """Faults and all for ``seconds`` of real time; then without faults until every run has ended."""
        for store in self.stores.values():
            store.rate = 0.12
        await self.begin()
        actors = [*(self.serve(gateway) for gateway in self.stores), self.people(), self.watch()]
        actors += [self.staff(gateway, pool) for gateway in self.stores for pool in POOLS for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            for actor in actors:
                group.create_task(actor)
            await asyncio.sleep(seconds)
            for store in self.stores.values():
                store.rate = 0.0
            self.calm = True
            await self.drain()
            self.over = True

    async def watch(self) -> None:
        """The invariants hold at every moment, not only at the end."""
        while not self.over:
            async with self.plain.connection() as connection:
                running = await connection.fetchval("select count(*) from perdure.runs where pool = $1 and state = 'Running'", POOLS[0])
            self.expect(running <= POOL_LIMIT, f"{running} runs of a pool that allows {POOL_LIMIT}")
            self.wrong += [f"{violation}" for violation in await self.plain.verify()]
            await asyncio.sleep(0.1)

    async def drain(self) -> None:
        """Everybody is resumed and gets every signal: whoever still sleeps then has lost a wake."""
        gateway = next(iter(self.stores))
        for n in range(400):
            async with self.plain.connection() as connection:
                left = [row[0] for row in await connection.fetch("select run_id from perdure.runs where finished_at is null")]
            if not left:
                return
            for run in left:
                for verb in ("resume", "cancel") if n > 40 else ("resume",):
                    await self.control(gateway, Control(run, verb, {}, None, self.mint()))
                signals = [Control(run, "signal", {"name": name, "id": f"last {n}"}, None, self.mint(), b"1") for name in SIGNALS]
                await self.control(gateway, *signals)
            await self.pass_time(20)
            await asyncio.sleep(0.01)
        self.expect(False, f"these runs do not end: {left}")

    async def check(self) -> None:
        """What was acknowledged is there, once."""
        self.wrong += [f"{violation}" for violation in await self.plain.verify()]
        async with self.plain.connection() as connection:
            rows = await connection.fetch("select run_id, name, id from perdure.wakeups where kind = 'signal'")
            kept = Counter((row["run_id"], row["name"], row["id"]) for row in rows if not row["id"].startswith("last"))
            fired = await connection.fetch(
                "select run_id, f ->> 'source' as source from perdure.journal, jsonb_array_elements(data -> 'fired') f "
                "where kind = 'wait' and f ->> 'kind' = 'signal'"
            )
            journaled = await connection.fetch("select run_id, key, output from perdure.journal where kind = 'step'")
            slices = await connection.fetch("select run_id, value from perdure.slices where name = 'log'")
            ledger = await connection.fetch("select run_id, key, state from perdure.ledger")
        journal = {(row["run_id"], row["key"]): row["output"][1:] for row in journaled}
        for signal, count in self.signals.items():
            self.expect(count == 1, f"signal {signal} was accepted {count} times as new")
            self.expect(kept[signal] == 1, f"signal {signal} was acknowledged and is not there")
        for row, count in Counter((row["run_id"], row["source"]) for row in fired).items():
            self.expect(count == 1, f"signal {row} was bound {count} times")
        for key, output in self.steps.items():
            self.expect(journal.get(key) == output, f"step {key} was acknowledged with {output!r} and holds {journal.get(key)!r}")
        chunks = Counter((row["run_id"], msgspec.json.decode(row["value"][1:])[0]) for row in slices)
        for chunk in self.maybe_chunks:
            self.expect(chunks[chunk] <= 1, f"chunk {chunk} is there {chunks[chunk]} times")
            self.expect(chunks[chunk] == 1 or chunk not in self.chunks, f"chunk {chunk} was acknowledged and is not there")
        for row in ledger:
            self.expect(row["state"] == "SUCCEEDED" or (row["run_id"], row["key"]) not in self.settled, f"{row} had succeeded")


@asynccontextmanager
async def world(dsn: str, seed: int) -> AsyncIterator[World]:
    connection = await asyncpg.connect(dsn)
    random = Random(seed)
    stores = {gateway: await FaultyStore.connect(dsn, connections=5) for gateway in ("g0", "g1")}
    for store in stores.values():
        store.random, store.saboteur = Random(random.random()), Saboteur(connection)
    plain = await Store.connect(dsn, connections=3)
    try:
        yield World(seed, stores, plain)
    finally:
        for store in (*stores.values(), plain):
            await store.close()
        await connection.close()


def run(dsn: str, seed: int, seconds: float) -> World:
    """Lives one world through; ``wrong`` of it says what did not hold."""

    async def live() -> World:
        async with world(dsn, seed) as lived:
            await lived.live(seconds)
            await lived.check()
            return lived

    main: Coroutine[Any, Any, World] = live()
    return asyncio.run(main)
