"""Crashes at the commit points of a run: where they can be, how one is made, and what must hold afterwards.

A *point* is a commit of the run, or of its child, found in the log of a run that nobody disturbed. At a point a *victim* is killed in
one of three *phases*:

    before      the transaction stands still just before its commit; when the victim is dead it commits, or is rolled back
    unanswered  committed while its gateway stands still, so nobody has heard of it
    after       as soon as the event can be seen
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

import psutil
from tests.chaos.breakpoints import Breakpoint, Holder
from tests.chaos.stack import PATIENCE, Stack, seen

from perdure_operator.domain.errors import Unavailable
from perdure_operator.local.processes import WorkerPod
from perdure_operator.store.context import SliceRow

Victim = Literal["agent", "sidecar", "gateway", "postgres"]
Phase = Literal["before", "unanswered", "after"]
VICTIMS: tuple[Victim, ...] = ("agent", "sidecar", "gateway", "postgres")
PHASES: tuple[Phase, ...] = ("before", "unanswered", "after")
GIVES_BACK = frozenset({"run.suspended", "run.succeeded"})
PARTS = ["ferry", "flight", "hotel"]


@dataclass(frozen=True)
class Point:
    """The commit whose last event is ``seq``. ``held``: a pod has the run before it, or gets it by it."""

    seq: int
    kind: str
    child: bool
    leased_before: bool
    leased_after: bool

    def __str__(self) -> str:
        return f"{'child ' if self.child else ''}{self.seq} {self.kind}"


@dataclass(frozen=True)
class Crash:
    point: Point
    victim: Victim
    phase: Phase
    pool: str
    commits: bool
    """A transaction that stood still commits when its gateway is dead; otherwise it is rolled back."""

    def __str__(self) -> str:
        return f"{self.victim} {self.phase} {self.point} ({self.pool}{'' if self.commits else ', rolled back'})"


class Verdict(StrEnum):
    """``struck``: as meant. ``gone``: the victim had ended by itself by then. ``missed``: another crash came between."""

    STRUCK = "struck"
    GONE = "gone"
    MISSED = "missed"


@dataclass(frozen=True)
class End:
    """What a run leaves behind; of an undisturbed one, what every other must. ``once``: how often there is each event that does not
    depend on the crash."""

    state: str
    result: Any
    session: dict[str, list[bytes]]
    effects: list[str]
    children: list[str]
    once: list[tuple[str, int]]


# -------------------------------------------------------------------------------------------------------------- one run


async def voyage(stack: Stack, name: str, pool: str) -> str:
    """Sends a run on its voyage and gives it its signal when it waits for it; its id when it has ended."""
    run = await stack.create(name, pool, {"what": name})
    waits = (
        "select 1 from perdure.waits w join perdure.runs r using (run_id)"
        " where r.run_id = $1 and w.name = 'go' and w.state = 'open' and r.state = 'Suspended'"
    )
    await seen(lambda: stack.sql(waits, UUID(run)), every=0.02)
    await stack.call("POST", f"/runs/{run}/signals/go", "west", key=f"{name}-go")
    await stack.until(run)
    return run


async def end_of(stack: Stack, run: str, name: str) -> End:
    view = await stack.view(run)
    slices = await _slices(stack, UUID(run))
    events = await stack.sql(
        "select kind, coalesce(data ->> 'key', data ->> 'type', data ->> 'id') as key, count(*) as n from perdure.events"
        " where run_id = $1 and (kind = any ($2) or kind like 'agent.%') group by 1, 2",
        UUID(run), ["step.succeeded", "child.spawned", "child.done", "signal.received", "wait.opened", "wait.satisfied", "run.succeeded",
                    "activity.duplicate_effect", "checkpoint.saved", "run.created"],
    )  # fmt: skip
    children = await stack.sql("select state from perdure.runs where parent_id = $1", UUID(run))
    return End(
        view.state, view.result, {part.name: [bytes(chunk) for chunk in part.chunks] for part in slices}, stack.sink.parts(name),
        [child["state"] for child in children], sorted((event["kind"], event["n"]) for event in events),
    )  # fmt: skip


async def failures_of(stack: Stack, run: str) -> list[str]:
    """Attempts of the run and of its child that count as failed, and why. No fault but one of the agent makes any."""
    counted = await stack.sql("select name, failures from perdure.runs where (run_id = $1 or parent_id = $1) and failures > 0", UUID(run))
    query = (
        "select e.at::time, e.seq, e.epoch, e.kind, e.data from perdure.events e join perdure.runs r using (run_id)"
        " where (run_id = $1 or parent_id = $1) and r.failures > 0 and e.kind like 'run.%' order by e.at, e.seq"
    )
    return [str(dict(row)) for row in [*counted, *(await stack.sql(query, UUID(run)) if counted else [])]]


async def _slices(stack: Stack, run: UUID) -> list[SliceRow]:
    while True:
        try:
            return list((await stack.store.context(run)).slices)
        except Unavailable:
            await asyncio.sleep(0.05)


async def points_of(stack: Stack, run: str) -> list[Point]:
    """The commits of the run and of its child, in order."""
    found: list[Point] = []
    for child, condition in ((False, "run_id = $1"), (True, "parent_id = $1")):
        rows = await stack.sql(
            f"select e.seq, e.kind, e.xmin::text as tx from perdure.events e join perdure.runs r using (run_id)"
            f" where r.{condition} order by seq",
            UUID(run),
        )
        leased = False
        for n, row in enumerate(rows):
            before, leased = leased, row["kind"] == "run.leased" or (leased and row["kind"] not in GIVES_BACK)
            if n + 1 == len(rows) or rows[n + 1]["tx"] != row["tx"]:
                found.append(Point(row["seq"], row["kind"], child, before, leased))
    return found


def crashes(points: Iterable[Point], pools: list[str], chance: random.Random) -> list[Crash]:
    """The whole matrix: every point, victim and phase that can be, each in one of the pools."""
    return [
        Crash(point, victim, phase, chance.choice(pools), phase != "before" or victim != "gateway" or chance.random() < 0.5)
        for point in points
        for victim in VICTIMS
        for phase in PHASES
        if victim in ("gateway", "postgres") or (point.leased_before if phase == "before" else point.leased_before or point.leased_after)
    ]


# ------------------------------------------------------------------------------------------------------------ one crash


async def crash(stack: Stack, name: str, what: Crash) -> tuple[Verdict, str]:
    """A run with this crash in it: whether it struck, and the run's id after its end."""
    point = what.point
    pause = Breakpoint(stack.postgres.dsn, name, point.seq, child=point.child)
    if what.phase != "after":
        await _set(pause)
    journey = asyncio.create_task(voyage(stack, name, what.pool))
    try:
        async with asyncio.timeout(PATIENCE):
            verdict = await _strike(stack, name, what, pause, journey)
    finally:
        pause.release()
    try:
        async with asyncio.timeout(PATIENCE):
            return verdict, await journey
    except TimeoutError:
        raise AssertionError(f"{name}: the run does not end after: {what}") from None


async def _strike(stack: Stack, name: str, what: Crash, pause: Breakpoint, journey: asyncio.Task[str]) -> Verdict:
    if what.phase == "after":
        while not await _committed(stack, name, what.point):
            if journey.done():
                return Verdict.MISSED
            await asyncio.sleep(0.002)
        return await _kill(stack, name, what, None)
    holder = await _held(stack, name, what.point, pause, journey)
    if holder is None:
        return Verdict.MISSED
    if what.phase == "before":
        try:
            return await _kill(stack, name, what, holder, pause)
        finally:
            pause.release()
    gateway = stack.gateways.get(holder.role)
    if gateway is None:
        return Verdict.MISSED
    async with stack.breaking:
        if not gateway.pid or await _gone(pause):
            return Verdict.MISSED
        gateway.freeze()
        try:
            pause.release()
            await seen(lambda: _committed(stack, name, what.point), every=0.002)
            if what.victim in ("agent", "sidecar"):
                return await _kill(stack, name, what, holder)
            if what.victim == "postgres":
                await stack.restart_postgres()
                return Verdict.STRUCK
            await stack.restart_gateway(gateway)
            return Verdict.STRUCK
        finally:
            if gateway.pid:
                gateway.thaw()


async def _kill(stack: Stack, name: str, what: Crash, holder: Holder | None, pause: Breakpoint | None = None) -> Verdict:
    match what.victim:
        case "agent" | "sidecar":
            pod = await _pod(stack, name, what.point)
            if pod is None:
                return Verdict.GONE
            return await kill_part(pod, what.victim, name=name, stack=stack)
        case "postgres":
            async with stack.breaking:
                if pause is not None and await _gone(pause):
                    return Verdict.MISSED
                await stack.restart_postgres()
        case "gateway":
            async with stack.breaking:
                if pause is not None and await _gone(pause):
                    return Verdict.MISSED
                role = holder.role if holder is not None else await _gateway(stack, name, what.point)
                gateway = stack.gateways[role]
                await gateway.kill()
                if holder is not None and pause is not None and not what.commits:
                    await pause.abort(holder)
                if pause is not None:
                    pause.release()
                await gateway.start()
    return Verdict.STRUCK


async def kill_part(pod: WorkerPod, part: str, *, stack: Stack, name: str) -> Verdict:
    """SIGKILL; returns when it is dead. In a pod that is reused the agent is the process of the run: one that works for another voyage
    by now is left alone. It stands still while that is looked up, so that the pod gets no other run meanwhile."""
    process = pod.agent if part == "agent" else pod.sidecar
    if process.code is not None:
        return Verdict.GONE
    try:
        found = psutil.Process(process.pid)
        if part == "agent":
            found = await _freeze_agent(found)
            if not await _works_for(stack, pod, name, begun=found.pid != process.pid):
                found.resume()
                return Verdict.GONE
        found.kill()
    except psutil.NoSuchProcess:
        return Verdict.GONE
    await ended(found)
    return Verdict.STRUCK


async def _freeze_agent(parent: psutil.Process) -> psutil.Process:
    """The process of the run, or where there is none (yet) the one that it comes from."""
    while True:
        children = parent.children()
        found = children[0] if children else parent
        found.suspend()
        if found is not parent or not parent.children():
            return found
        parent.resume()


async def _works_for(stack: Stack, pod: WorkerPod, name: str, *, begun: bool) -> bool:
    """Whether the pod's newest lease is of this voyage; where no process has begun on it in a pod that is reused, that it holds."""
    rows = await stack.sql(
        "select coalesce(q.name, r.name) = $2 and ($3 or not p.reuse or p.run_id = r.run_id) as so"
        " from perdure.events e join perdure.runs r using (run_id) join perdure.pods p on p.pod_id = $1"
        " left join perdure.runs q on q.run_id = r.parent_id"
        " where e.kind = 'run.leased' and e.data ->> 'pod' = p.pod_id::text order by e.at desc limit 1",
        pod.pod_id, name, begun,
    )  # fmt: skip
    return bool(rows and rows[0]["so"])


async def ended(process: psutil.Process) -> None:
    async def look() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return True

    await seen(look, every=0.002)


async def _held(stack: Stack, name: str, point: Point, pause: Breakpoint, journey: asyncio.Task[str]) -> Holder | None:
    """The transaction that stands still; None when the point was passed without."""
    while True:
        try:
            if (holder := await pause.holder()) is not None:
                return holder
        except Unavailable:
            await _set(pause)  # Postgres was killed for another run
        if journey.done() or await _committed(stack, name, point):
            return None
        await asyncio.sleep(0.003)


async def _gone(pause: Breakpoint) -> bool:
    try:
        return await pause.holder() is None
    except Unavailable:
        return True


_EVENT = (
    "from perdure.events e join perdure.runs r using (run_id) left join perdure.runs q on q.run_id = r.parent_id"
    " where coalesce(q.name, r.name) = $1 and (q.run_id is not null) = $2 and e.seq"
)


async def _committed(stack: Stack, name: str, point: Point) -> bool:
    return bool(await stack.sql(f"select 1 {_EVENT} = $3", name, point.child, point.seq))


async def _pod(stack: Stack, name: str, point: Point) -> WorkerPod | None:
    """Whoever has the run at this point."""
    rows = await stack.sql(
        f"select e.data ->> 'pod' as pod {_EVENT} <= $3 and e.kind = 'run.leased' order by e.seq desc limit 1",
        name, point.child, point.seq,
    )  # fmt: skip
    return stack.pod(UUID(rows[0]["pod"])) if rows else None


async def _gateway(stack: Stack, name: str, point: Point) -> str:
    """Role of the gateway that the run's pod is at, else of the first."""
    pod = await _pod(stack, name, point)
    rows = await stack.sql("select gateway from perdure.pods where pod_id = $1", pod.pod_id) if pod else []
    role = f"gateway_{rows[0]['gateway']}" if rows else ""
    return role if role in stack.gateways else next(iter(stack.gateways))


async def _set(pause: Breakpoint) -> None:
    while True:
        try:
            return await pause.set()
        except Unavailable:
            await asyncio.sleep(0.05)
