"""``Simulation``: a run, its children and the world around them, in one process and in no time.

It leases runs to processes, lets them go on in turns, and moves the clock when nobody can do anything more without time passing. What a
person would do is scheduled (``signal(after=…)``) or done between two calls of ``run``.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from perdure import protocol
from perdure.sdk.agents import Agent
from perdure.sdk.codec import codec_of, encode
from perdure.sdk.durations import Duration, in_seconds
from perdure.testing.clock import Clock
from perdure.testing.process import KILLED, Fault, Process
from perdure.testing.record import RunRecord, refused

T = TypeVar("T")
_MAX_TURNS: Final = 100_000
_PERSON: Final = "effect:"


class Stuck(AssertionError):
    """Processes are alive, nothing is due, and none of them does anything: something waits for what cannot come."""


@dataclass(frozen=True)
class Commit:
    """One commit point. ``number`` counts from 1 over the whole tree of runs."""

    number: int
    run_id: str
    op: str
    key: str


@dataclass(order=True)
class _Planned:
    at: float
    order: int
    action: Callable[[], None] = field(compare=False)


class Simulation:
    """``agents``: by pool, for ``spawn``. ``seed`` decides in which order processes take turns; it is in every message of a failure.
    ``people_answer``: whether a person answers questions about unknown effects, truthfully."""

    def __init__(
        self,
        agent: Agent[..., Any],
        input: object = None,  # the name that a run's spec has for it
        *,
        agents: Mapping[str, Agent[..., Any]] | None = None,
        seed: int | None = None,
        max_retries: int = 3,
        objective: str = "",
        spec: Mapping[str, Any] | None = None,
        people_answer: bool = True,
    ) -> None:
        self.seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        self.clock = Clock()
        self.commits: list[Commit] = []
        self.executions: Counter[tuple[str, str]] = Counter()
        self._agents = {"": agent, **(agents or {})}
        self._random = random.Random(self.seed)
        self._max_retries = max_retries
        self._people_answer = people_answer
        self._receipts: dict[tuple[str, str], bytes] = {}
        self._plan: list[_Planned] = []
        self._orders = itertools.count()
        self._faults: dict[int, Fault] = {}
        self._processes: dict[str, Process] = {}
        self._answered: set[str] = set()
        self._signals = itertools.count(1)
        self._busy = False
        self.runs: dict[str, RunRecord] = {}
        self.record = self._new("run", "", encode(input, "input"), None, "cancel", objective, spec or {})

    # ------------------------------------------------------------------------------------------- what a test does

    def run(self) -> Simulation:
        """Goes on until the run has ended, or only a signal could make it go on. Raises Stuck."""
        for _ in range(_MAX_TURNS):
            self._settle_all()
            if self._over():
                self._kill_all()
                return self
            if not self._ask_people() and not self._pass_time():
                return self._rest()
        raise Stuck(f"no end after {_MAX_TURNS} turns; seed {self.seed}")

    def signal(
        self, name: str, payload: object = None, *, after: Duration | None = None, id: str | None = None, run: str = "run"
    ) -> Simulation:
        """Sends a signal now, or ``after`` some time that passes in ``run()``."""
        data = encode(payload, f"signal {name}")
        number = id or f"signal-{next(self._signals)}"
        self._at(after, lambda: self.runs[run].signal(name, data, number))
        return self

    def cancel(self, *, after: Duration | None = None, run: str = "run") -> Simulation:
        def act() -> None:
            self.runs[run].cancel()

        self._at(after, act)
        return self

    def lose_worker(self, *, after: Duration | None = None, run: str = "run") -> Simulation:
        """Kills the process of a run, seen by nobody for the length of a lease; then the next one takes over."""
        self._at(after, lambda: self._lose(run))
        return self

    def advance(self, duration: Duration) -> Simulation:
        """Moves the clock; what becomes due meanwhile happens when it is due."""
        end = self.clock.now + in_seconds(duration)
        self._at(duration, lambda: None)
        while not self._over() and (due := self._next_time()) is not None and due <= end:
            self._pass_time()
            self._settle_all()
        self.clock.move_to(end)
        self._settle_all()
        return self

    def kill_at(self, commit: int, when: Fault = "after") -> Simulation:
        """Plans a fault at a commit point (numbered from 1)."""
        self._faults[commit] = when
        return self

    # ------------------------------------------------------------------------------------------- what a test looks at

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def result(self) -> Any:
        """The run's output as plain JSON values."""
        return msgspec.json.decode(self.record.output)

    def result_as(self, kind: type[T]) -> T:
        value: T = codec_of(kind).decode(self.record.output)
        return value

    @property
    def error(self) -> protocol.ErrorInfo | None:
        return self.record.error

    @property
    def suspended(self) -> bool:
        """Whether the run waits without a process."""
        return self.record.state == "Suspended" and self.record.run_id not in self._processes

    def kinds(self, run: str = "run") -> list[str]:
        """Kinds of the events in a run's log."""
        return [event.kind for event in self.runs[run].log]

    def session(self, name: str, run: str = "run") -> Any:
        """The committed value of a slice as plain JSON values; None if there is none."""
        parts = self.runs[run].slices.get(name)
        if not parts:
            return None
        values = [msgspec.json.decode(part.value) for part in parts]
        return values[0] if len(parts) == 1 and not parts[0].append else [item for value in values for item in value]

    def assert_effects_once(self) -> None:
        """No effect was executed again unless its policy says that this is harmless, and none is left open."""
        for record in self.runs.values():
            for entry in record.ledger.entries.values():
                times = self.executions[record.run_id, entry.key]
                harmless = entry.effect in ("local", "read_only") or entry.policy in ("retry-same-key", "assume-not-done")
                assert times <= 1 or harmless, f"{entry.tool} was executed {times} times under one key; seed {self.seed}"
                assert entry.state != "RUNNING" or not record.terminal, f"{entry.tool} was left open; seed {self.seed}"

    # ------------------------------------------------------------------------------------------- the world

    def _new(
        self, run_id: str, pool: str, data: bytes, parent: RunRecord | None, policy: str, objective: str, spec: Mapping[str, Any]
    ) -> RunRecord:
        record = RunRecord(
            run_id=run_id,
            pool=pool,
            input=data,
            clock=self.clock,
            max_retries=self._max_retries,
            parent=parent,
            policy=policy,
            objective=objective,
            spec=spec,
            spawn=self._spawn,
            pushed=self._pushed,
        )
        self.runs[run_id] = record
        return record

    def _spawn(self, parent: RunRecord, body: protocol.Spawn) -> RunRecord:
        pool = body.pool or parent.pool
        if pool not in self._agents:
            raise refused("pool-not-found", f"the simulation has no agent for the pool {pool!r}; give it one by agents=", status=404)
        return self._new(
            f"{parent.run_id}.{len(parent.children) + 1}", pool, bytes(body.input), parent, body.policy, body.objective, body.spec
        )

    def _pushed(self, record: RunRecord, poke: protocol.Poke) -> None:
        process = self._processes.get(record.run_id)
        if process is not None:
            process.push(poke)
            self._busy = True

    def _start_due(self) -> bool:
        """Leases what is Pending and may run now."""
        started = False
        for record in list(self.runs.values()):
            if record.state == "Pending" and record.runnable_at <= self.clock.now and record.run_id not in self._processes:
                self._processes[record.run_id] = Process(self._agents[record.pool], record, self._fault_of, self._executed)
                started = True
        return started

    def _turns(self) -> None:
        processes = list(self._processes.values())
        self._random.shuffle(processes)
        for process in processes:
            process.turn()
            for key, receipt in process.receipts.items():
                self._receipts[process.record.run_id, key] = receipt
            if process.exit_code is not None:
                del self._processes[process.record.run_id]
                self._busy = True
                if process.epoch == process.record.epoch and process.record.state == "Running":
                    process.record.lost(gone=True)

    def _settle_all(self) -> None:
        """Everything that can happen at this moment."""
        for _ in range(_MAX_TURNS):
            started = self._start_due()
            self._busy = False
            self._turns()
            if not started and not self._busy:
                return

    def _next_time(self) -> float | None:
        times = [time for record in self.runs.values() for time in record.due_times()]
        times += [process.loop.idle_until for process in self._processes.values() if process.loop.idle_until is not None]
        times += [self._plan[0].at] if self._plan else []
        return min(times, default=None)

    def _pass_time(self) -> bool:
        due = self._next_time()
        if due is None:
            return False
        self.clock.move_to(due)
        while self._plan and self._plan[0].at <= self.clock.now:
            heapq.heappop(self._plan).action()
        for record in list(self.runs.values()):
            if not record.terminal:
                record.settle()
        return True

    def _at(self, after: Duration | None, action: Callable[[], None]) -> None:
        if after is None:
            action()
        else:
            heapq.heappush(self._plan, _Planned(self.clock.now + in_seconds(after), next(self._orders), action))

    def _rest(self) -> Simulation:
        if self._processes:
            alive = {run: self.runs[run].log[-1] for run in self._processes}
            raise Stuck(f"nothing is due and nobody goes on: {alive}; seed {self.seed}")
        return self

    def _over(self) -> bool:
        return self.record.terminal and all(run.terminal or run.policy == "detach" for run in self.runs.values())

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._processes.clear()

    def _lose(self, run: str) -> None:
        process = self._processes.pop(run, None)
        if process is None:
            return
        process.kill()
        record, epoch = self.runs[run], process.epoch

        def expire() -> None:
            if record.epoch == epoch:
                record.lost(gone=False)

        self._at(15.0, expire)

    def _ask_people(self) -> bool:
        """A person looks what became of an unknown effect, and says it."""
        if not self._people_answer:
            return False
        answered = False
        for record in self.runs.values():
            for wait in list(record.waits.open.values()):
                name = wait.body.on[0].name
                if name.startswith(_PERSON) and wait.body.key not in self._answered:
                    self._answered.add(wait.body.key)
                    key = name.split(":")[1]
                    response = self._receipts.get((record.run_id, key))
                    happened = self.executions[record.run_id, key] > 0
                    payload = {"happened": happened, "response": msgspec.Raw(response or b"null")}
                    record.signal(name, encode(payload), f"person-{wait.body.key}")
                    answered = True
        return answered

    def _fault_of(self, record: RunRecord, operation: protocol.Operation) -> Fault | None:
        number = len(self.commits) + 1
        op = str(operation.__struct_config__.tag)
        self.commits.append(Commit(number, record.run_id, op, getattr(operation, "key", "")))
        return self._faults.get(number)

    def _executed(self, record: RunRecord, key: str) -> None:
        self.executions[record.run_id, key] += 1


__all__ = ["KILLED", "Commit", "Simulation", "Stuck"]
