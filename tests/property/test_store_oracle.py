"""The Postgres store does what the oracle does: random programs of every operation, compared after each step.

``PERDURE_EXAMPLES`` and ``PERDURE_PROGRAMS`` set how many short and long programs; a failing long one is repeated by its ``PERDURE_SEED``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.property.runs import columns
from tests.property.twin import GATEWAYS, Twin

from perdure_operator.domain.lease import Weight
from perdure_operator.domain.run import State
from perdure_operator.store.memory import Run
from perdure_operator.store.operations import Control, Fence, JournalStep, Limits, SliceWrite

POOLS = ("ns/a", "ns/b")
PODS = tuple(UUID(int=0xD0 + n) for n in range(4))
STRANGER = UUID(int=0xEE)
BIG = b'"' + b"x" * 2000 + b'"'

FEW = (0, 1, 2, 3)
MAYBE = (True, False, False, False)
DIRECT = (None, 0, 1, 2)
HOW = ("live",) * 10 + ("epoch", "holder")
KEYS = ((0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 0, 3))
SLICES = ((), (), ("s",), ("s+",), ("t+",), ("s", "t+"), ("s+", "t"))
_ONE = (
    *(("signal", name) for name in ("go", "go", "stop", "a/b")),
    *(("timer", seconds) for seconds in (0, 30, 300)),
    *(("at", seconds) for seconds in (-10, 60)),
    *(("child_done", n) for n in (0, 0, 1)),
)
CONDITIONS = (*((one,) for one in _ONE), *itertools.combinations(_ONE, 2), *itertools.combinations(_ONE, 3))
Rule = TypeVar("Rule", bound=Callable[..., None])


def options(**options: Sequence[Any]) -> Callable[[Rule], Rule]:
    """A rule whose arguments are chosen among these."""

    def mark(function: Rule) -> Rule:
        OPTIONS[function.__name__] = options
        return rule(**{name: st.sampled_from(values) for name, values in options.items()})(function)

    return mark


OPTIONS: dict[str, dict[str, Sequence[Any]]] = {}
BYTES = (*(Limits(),) * 4, Limits(raw=4500), Limits(stored=150), Limits(4500, 150))
WORLD: dict[str, Sequence[Any]] = {"limit": (None, None, 1), "tenant": (None, None, 1, 2), "weight": (0.5, 1, 5), "size": BYTES}


class StoreAgainstOracle(RuleBasedStateMachine):
    """A rule's numbers pick among what there is at that moment, so nearly every rule finds something to act on."""

    twin: Twin  # one database a test, emptied for each program

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.minted = 0
        self.sent: list[Control | JournalStep] = []
        self.tokens: list[tuple[UUID, str, str, Fence | None]] = []
        self.twin.reset()

    # ------------------------------------------------------------------------------------------------------------ helpers

    @property
    def runs(self) -> list[Run]:
        return list(self.twin.oracle.runs.values())

    def mint(self) -> UUID:
        self.minted += 1
        return UUID(int=0x1000 + self.minted)

    def pick(self, n: int) -> Run:
        return self.runs[n % len(self.runs)]

    def worker(self, n: int) -> Run:
        """A run at work; when none is, the next of the queue or a new one is put to work first."""
        for _ in range(2):
            if any(run.state is State.RUNNING for run in self.runs):
                break
            self.staff(n)
            if len(self.runs) < 10 and not any(run.state is State.RUNNING for run in self.runs):
                self.twin.create(self.columns(namespace="other"))
        running = [run for run in self.runs if run.state is State.RUNNING]
        return running[n % len(running)] if running and n < 3 else self.pick(n)

    @options(n=FEW)
    def staff(self, n: int) -> None:
        """A pod of the first pool becomes free and takes what is queued."""
        pod = PODS[n]
        if self.twin.oracle.pods.get(pod) is None or self.twin.oracle.pods[pod].state == "retiring":
            self.twin.gone(pod, "PodDeleted")
        self.tick()
        self.twin.hello(pod, POOLS[0], GATEWAYS[0], reuse=True, believes=None)
        self.twin.dispatch(GATEWAYS[0], pod)

    def fence(self, run: Run, how: str) -> Fence:
        return Fence(run.epoch - (how == "epoch"), STRANGER if how == "holder" or run.holder is None else run.holder)

    def columns(self, pool: str = POOLS[0], **more: Any) -> dict[str, Any]:
        return columns(self.mint(), pool, **more)

    def do(self, *operations: Control, direct: int | None = None) -> list[dict[str, Any]]:
        self.tick()
        idle = [] if direct is None else [PODS[direct % len(PODS)]]
        outcomes = self.twin.control(operations, idle, GATEWAYS[0])
        self.sent += [op for op in operations if op.request is not None]
        self.done()
        return [outcome.answer for outcome in outcomes]

    def tick(self) -> None:
        self.twin.pass_time(1.0)

    def done(self) -> None:
        self.steps += 1
        self.twin.compare()
        if self.steps % 10 == 0:
            self.twin.verify()

    def teardown(self) -> None:
        self.twin.settle_everything()
        self.twin.compare()
        self.twin.verify()

    # --------------------------------------------------------------------------------------------------------- runs and pods

    @initialize(**{name: st.sampled_from(values) for name, values in WORLD.items()})
    def world(self, limit: int | None, tenant: int | None, weight: float, size: Limits) -> None:
        self.twin.limit(size)
        self.twin.pool("a", limit)
        self.twin.pool("b", None)
        self.twin.tenant("ns", weight, tenant)
        self.twin.create(self.columns())
        for pod in PODS[:2]:
            self.twin.hello(pod, POOLS[0], GATEWAYS[0], reuse=True, believes=None)
        self.twin.dispatch(GATEWAYS[0], PODS[0])
        self.done()

    @options(
        namespace=("ns", "ns", "other"),
        pool=(*POOLS, POOLS[0], "ns/none"),
        priority=(0, 1, 2),
        name=(None, None, None, "taken"),
        key=(None, None, None, "once"),
        limits=({}, {"deadline_seconds": 40}, {"deadline_seconds": 400}, {"active_limit_ms": 30_000}, {"active_limit_ms": 300_000}),
        spec_paused=MAYBE,
    )
    def create(self, limits: dict[str, Any], name: str | None, key: str | None, **columns: Any) -> None:
        if len(self.runs) < 6:
            self.tick()
            self.twin.create(self.columns(**columns, **limits, idempotency_key=key, **({"name": name} if name else {})))
            self.done()

    @options(
        n=FEW,
        what=("hello", "hello", "unready", "lost", "idle", "gone", "gone", "taken", "dispatch", "beat"),
        pool=(*POOLS, POOLS[0]),
        gateway=(GATEWAYS[0], *GATEWAYS),
        reuse=(True, False),
        how=HOW,
        proven=(True, True, False),
        ended=(None, 0, 1, 2),
    )
    def pods(self, n: int, what: str, pool: str, gateway: str, reuse: bool, how: str, proven: bool, ended: int | None) -> None:
        run, pod = self.pick(n), PODS[n]
        fence = self.fence(run, how)
        self.tick()
        if what in ("hello", "unready", "lost"):
            believes = (run.id, run.epoch) if what == "lost" else None
            self.twin.hello(pod, pool, gateway, reuse=reuse, ready=what != "unready", believes=believes)
        elif what == "idle":
            known = [*run.executors, run.epoch]
            self.twin.idle(pod, gateway, None if ended is None else (run.id, known[ended % len(known)]))
        elif what == "gone":
            self.twin.gone(pod, ("PodDeleted", "AgentExited", "Evicted")[n % 3], proven=proven)
        elif what == "taken":
            self.twin.take_away(run.holder or pod)
        elif what == "dispatch" and pod in self.twin.oracle.pods:
            self.twin.dispatch(gateway, pod)
        elif what == "beat":
            self.twin.beat(run.id, fence.epoch, fence.holder)
        self.done()

    @options(seconds=(5, 5, 31, 70, 400))
    def time(self, seconds: int) -> None:
        self.twin.pass_time(seconds)

    # ------------------------------------------------------------------------------------------------------------- workers

    @options(n=FEW, how=HOW, keys=KEYS, state=("succeeded", "failed"), pieces=SLICES)
    def step(self, n: int, how: str, keys: tuple[int, ...], state: str, pieces: tuple[str, ...]) -> None:
        run = self.worker(n)
        self.tick()
        error = None if state == "succeeded" else '{"type": "E", "message": "m"}'
        fence = self.fence(run, how)
        steps = [
            JournalStep(run.id, fence, self.mint(), f"step:s#{key}", "s", state, b"1", error=error, slices=slices(pieces)) for key in keys
        ]
        self.twin.journal(steps)
        self.sent += steps
        self.done()

    def condition(self, run: Run, kind: str, value: Any) -> dict[str, Any]:
        if kind == "timer":
            return {"kind": "timer", "seconds": value}
        if kind == "at":
            return {"kind": "timer", "at": (self.twin.oracle.now + timedelta(seconds=value)).isoformat()}
        if kind == "signal":
            return {"kind": "signal", "name": value}
        children = list(run.children.values()) or [str(STRANGER)]
        return {"kind": "child_done", "name": children[value % len(children)]}

    @options(
        n=FEW,
        how=HOW,
        key=(0, 1, 1, 2, 2, 3),
        mode=("any", "all", "first_failure"),
        on=CONDITIONS,
        timeout=(None, None, 0, 50),
        suspend=(True, False),
        print_=(None, "1", "1", "2"),
        instead=(None, None, (0, ()), (1, (0,)), (2, (1,))),
        abandoned=(None, None, 0, 1),
        pieces=SLICES,
    )
    def wait(
        self, n: int, how: str, key: int, mode: str, on: list[Any], timeout: int | None, suspend: bool, print_: str | None,
        instead: tuple[int, tuple[int, ...]] | None, abandoned: int | None, pieces: Any,
    ) -> None:  # fmt: skip
        run = self.worker(n)
        used, dropped = instead or (0, ())
        known = [wait for wait in run.waits.values() if wait.state != "open"] if instead else []
        before = known[used % len(known)] if known else None
        body = {
            "insteadOf": before.key if before else "wait:none" if used > 1 else None, "dropped": list(dropped),
            "key": f"wait:w#{key}" if key else "step:s#0", "name": "", "mode": mode, "on": [self.condition(run, *c) for c in on],
            "timeoutSeconds": timeout, "suspend": suspend,
            "abandoned": [] if abandoned is None else [{"key": f"wait:w#{abandoned + 1}", "seconds": 2.5}],
            "fingerprint": before.fingerprint if before and print_ else print_,
        }  # fmt: skip
        self.do(Control(run.id, "wait", body, self.fence(run, how), self.mint(), slices=slices(pieces)))

    @options(n=FEW, how=HOW, keys=KEYS, abandoned=(None, None, 1), direct=DIRECT)
    def suspend(self, n: int, how: str, keys: tuple[int, ...], abandoned: int | None, direct: int | None) -> None:
        run = self.worker(n)
        known = [wait.key for wait in run.waits.values() if wait.state == "open"] or list(run.waits)
        if not known and how == "live" and keys[0]:
            return
        known = known or ["wait:none"]
        waits = list(dict.fromkeys(known[key % len(known)] for key in keys))
        body = {"waits": waits, "abandoned": [{"key": f"wait:w#{abandoned}", "seconds": 2}] if abandoned is not None else []}
        self.do(Control(run.id, "suspend", body, self.fence(run, how), self.mint()), direct=direct)

    @options(
        n=FEW,
        how=HOW,
        key=(0, 0, 1),
        effect=("external", "external", "memory", "local"),
        policy=("query", "retry-same-key", "assume-not-done"),
        print_=("1",) * 6 + ("2",),
        retries=(None, 0, 2),
        timeout=(20, 20, 60),
    )
    def begin(self, n: int, how: str, key: int, effect: str, policy: str, print_: str, retries: int | None, timeout: int) -> None:
        run = self.worker(n)
        fence = self.fence(run, how)
        body = {
            "key": f"k{key}", "tool": "t", "effect": effect, "policy": policy, "fingerprint": print_, "scopeIsIdentity": False,
            "occurrence": 0, "step": None, "token": str(self.mint()), "timeoutSeconds": timeout, "leaseSeconds": 10, "maxRetries": retries,
        }  # fmt: skip
        [answer] = self.do(Control(run.id, "activity.begin", body, fence, self.mint(), b"{}"))
        self.remember(run, answer, fence)

    def remember(self, run: Run, answer: dict[str, Any], fence: Fence) -> None:
        if answer.get("token"):
            self.tokens.append((run.id, answer["key"], answer["token"], fence))

    @precondition(lambda self: self.tokens)
    @options(
        n=range(8),
        state=("succeeded", "succeeded", "failed", "unknown", "unknown", "cancelled"),
        still=MAYBE,
        response=(b"1", BIG),
        pieces=SLICES,
    )
    def end(self, n: int, state: str, still: bool, response: bytes, pieces: tuple[str, ...]) -> None:
        """By any token that was ever granted, under the fence it was granted for: now and then long after that lease."""
        run, key, token, fence = self.tokens[-1 - n % len(self.tokens)]
        body = {"key": key, "token": token, "state": state, "providerRef": None, "error": None if state == "succeeded" else {"type": "E"}}
        body |= {"stillRunning": True} if still else {}
        self.do(Control(run, "activity.end", body, fence, self.mint(), response, slices=slices(pieces)))

    @options(n=FEW, how=HOW, key=(0, 0, 1), happened=(True, False, False), by=("query", "query", "person"))
    def resolve(self, n: int, how: str, key: int, happened: bool, by: str) -> None:
        run = self.worker(n)
        fence = self.fence(run, how)
        body = {
            "key": f"k{key}",
            "happened": happened,
            "by": by,
            "providerRef": "p",
            "token": str(self.mint()),
            "leaseSeconds": 10,
        }
        [answer] = self.do(Control(run.id, "activity.resolve", body, fence, self.mint(), b"2"))
        self.remember(run, answer, fence)

    @options(n=FEW, how=HOW, key=FEW, policy=("cancel", "detach", "fail_parent"), name=(None, None, "taken"))
    def spawn(self, n: int, how: str, key: int, policy: str, name: str | None) -> None:
        run = self.worker(n)
        if len(self.runs) < 9:
            child = self.columns(parent_policy=policy, **({"name": name} if name else {}))
            self.twin.know(UUID(child["run_id"]))
            body = {"key": f"spawn:c#{key}" if key else "step:s#0", "fingerprint": None, "run": child}
            self.do(Control(run.id, "spawn", body, self.fence(run, how), self.mint(), b"{}", UUID(child["run_id"])))

    @options(n=FEW, how=HOW, ahead=(None, 0, 1), pieces=SLICES)
    def events(self, n: int, how: str, ahead: int | None, pieces: tuple[str, ...]) -> None:
        run = self.worker(n)
        fence = self.fence(run, how)
        expected = None if ahead is None else len(run.log) + ahead
        event = Control(run.id, "event", {"kind": "x", "expectedSeq": expected}, fence, self.mint(), b"{}", slices=slices(pieces))
        checkpoint = Control(run.id, "checkpoint", {"type": "step", "coversSeq": 0}, fence, self.mint(), b"{}")
        self.do(event, checkpoint, Control(run.id, "note", {"kind": "checkpoint.corrupt", "data": {}}))

    @options(
        n=FEW,
        how=HOW,
        outcome=("succeeded", "failed", "retry", "retry", "yielded", "cancelled", "stalled", "paused"),
        error=("E", "E", "AgentDisconnected"),
        direct=DIRECT,
        pieces=SLICES,
    )
    def finish(self, n: int, how: str, outcome: str, error: str, direct: int | None, pieces: tuple[str, ...]) -> None:
        run = self.worker(n)
        body = {"outcome": outcome, "error": None if outcome == "succeeded" else {"type": error, "message": "m"}}
        self.do(Control(run.id, "finish", body, self.fence(run, how), self.mint(), BIG, slices=slices(pieces)), direct=direct)

    @options(n=FEW, how=HOW, times=(1, 2, 3), reason=("Evicted", "PodDeleted", "AgentExited", "taken", None))
    def drain(self, n: int, how: str, times: int, reason: str | None) -> None:
        """A worker gives its run back, and what became of its pod is heard of later."""
        for _ in range(times):
            run = self.worker(n)
            pod, body = run.holder, {"outcome": "yielded", "error": None}
            self.do(Control(run.id, "finish", body, self.fence(run, how), self.mint()))
            if pod is not None and reason is not None:
                self.twin.take_away(pod) if reason == "taken" else self.twin.gone(pod, reason)
                self.done()

    # -------------------------------------------------------------------------------------------------- people and services

    @options(n=FEW, name=("go", "go", "stop", "a", "a/b"), id_=("1", "2", "b/c", "c"), direct=DIRECT, big=MAYBE)
    def signal(self, n: int, name: str, id_: str, direct: int | None, big: bool) -> None:
        self.do(Control(self.pick(n).id, "signal", {"name": name, "id": id_}, None, self.mint(), BIG if big else b"1"), direct=direct)

    @options(
        n=FEW,
        verbs=(("cancel",), ("pause",), ("resume",), ("resume",), ("pause", "resume"), ("pause", "cancel"), ("cancel", "resume")),
        direct=DIRECT,
    )
    def verb(self, n: int, verbs: tuple[str, ...], direct: int | None) -> None:
        run = self.pick(n)
        self.do(*(Control(run.id, verb, {}, None, self.mint()) for verb in verbs), direct=direct)

    @options(
        n=FEW,
        state=("Running", "Running", "Suspended", "Suspended", "Cancelled"),
        priority=(0, 0, 3, -2),
        active=(None, None, 60_000),
        deadline=(None, None, 300),
        retries=(None, None, 0, 5),
    )
    def spec(self, n: int, state: str, priority: int, active: int | None, deadline: int | None, retries: int | None) -> None:
        limits = {"activeLimitMs": active, "deadlineSeconds": deadline, "maxToolRetries": retries}
        self.do(Control(self.pick(n).id, "spec", {"generation": 2, "desiredState": state, "priority": priority, **limits}))

    @options(n=FEW)
    def detach(self, n: int) -> None:
        self.do(Control(self.pick(n).id, "detach", {}))

    @options(n=FEW, old=MAYBE, silent=(0, 0, 0, 30), weight=(None, *Weight))
    def expire(self, n: int, old: bool, silent: int, weight: Weight | None) -> None:
        run = self.worker(n)
        body = {"leaseEpoch": run.epoch - old, "reason": "HeartbeatLost", "silentSeconds": silent, "weight": weight}
        self.do(Control(run.id, "expire", body))

    @options()
    def services(self) -> None:
        self.tick()
        self.twin.settle_everything()
        self.done()

    @precondition(lambda self: self.sent)
    @options(n=range(30))
    def resend(self, n: int) -> None:
        """The answer to any earlier request was lost."""
        op = self.sent[-1 - n % len(self.sent)]
        if isinstance(op, Control):
            self.do(op)
        else:
            self.tick()
            self.twin.journal([op])
            self.done()


def slices(names: tuple[str, ...]) -> tuple[SliceWrite, ...]:
    return tuple(SliceWrite(name[0], b"[1]", append=name.endswith("+")) for name in names)


def test_the_store_does_what_the_oracle_does(database: str) -> None:
    """Short programs, shrunk to the few operations that matter when one fails."""
    with Twin(database) as twin:
        run_state_machine_as_test(
            type("Machine", (StoreAgainstOracle,), {"twin": twin}),
            settings=settings(
                max_examples=int(os.environ.get("PERDURE_EXAMPLES", "20")),
                stateful_step_count=30,
                phases=(Phase.reuse, Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize("program", range(int(os.environ.get("PERDURE_PROGRAMS", "3"))))
def test_long_programs(database: str, program: int) -> None:
    """Long programs of the same operations, evenly mixed: some faults need many different ones in a row."""
    seed = int(os.environ.get("PERDURE_SEED", time.time_ns())) + program
    print(f"PERDURE_SEED={seed}")
    random = Random(seed)
    history: list[str] = []
    with Twin(database) as twin:
        machine = type("Machine", (StoreAgainstOracle,), {"twin": twin})()
        for n in range(300):
            if n % 60 == 0:
                machine.teardown()
                machine = type("Machine", (StoreAgainstOracle,), {"twin": twin})()
                machine.world(**{name: random.choice(values) for name, values in WORLD.items()})
                history.clear()
            possible = [name for name in OPTIONS if (name != "end" or machine.tokens) and (name != "resend" or machine.sent)]
            name = random.choice(possible)
            arguments = {argument: random.choice(values) for argument, values in OPTIONS[name].items()}
            history.append(f"{name}({arguments})")
            try:
                getattr(machine, name)(**arguments)
            except AssertionError:
                print("\n".join(history))
                raise
