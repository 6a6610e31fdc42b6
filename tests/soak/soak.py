"""A soak from its beginning to its verdict.

    plan ──▶ load, person, faults, freezes ──▶ stack ──▶ agents ──▶ outside world (its log)
                   │ (acks)                      │ (public API)              │
                   └────────────────▶ checker ◀──┴───────────────────────────┘

First load and faults together, then what was begun may end, undisturbed, then the evidence is read and judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.gateways import zygote
from tests.soak import report
from tests.soak.checker import Violation, check, journeys_of
from tests.soak.evidence import Evidence, gather
from tests.soak.faults import Faults
from tests.soak.load import LOOK_SECONDS, Acks, Load
from tests.soak.moments import Freezer, Moments, listening
from tests.soak.person import Person, probe
from tests.soak.plan import Options, Plan, plan
from tests.soak.stack import BEAT, SoakStack, outside, stack

END_SECONDS, STALLED_SECONDS = 180.0, 75.0
"""What was begun has so long to end after the last fault, and no longer than this without anything that happens in any run."""


@dataclass
class Outcome:
    violations: list[Violation]
    table: str
    failure: str


@dataclass
class _Session:
    """What the parts of one soak share."""

    stack: SoakStack
    plan: Plan
    moments: Moments
    world: str
    folder: Path
    counts: Counter[str]
    outage: dict[str, float]


async def soak(options: Options, say: report.Say) -> Outcome:
    """Logs, evidence and database stay in a temporary folder if there is any violation; the failure names it."""
    folder = _folder()
    # What the connections have to say while their database is down.
    log = logging.FileHandler(folder / "soak.log")
    connections = logging.getLogger("asyncpg")
    connections.addHandler(log)
    connections.propagate = False
    try:
        outcome = await _soak(options, folder, say)
    except BaseException:
        say(f"the soak itself has broken, seed {options.seed}; logs are in {folder}")
        raise
    finally:
        connections.removeHandler(log)
        connections.propagate = True
        log.close()
    if not outcome.violations:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _folder() -> Path:
    """One that the database's system user can go through."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-soak-"))
    folder.chmod(0o711)
    return folder


async def _soak(options: Options, folder: Path, say: report.Say) -> Outcome:
    began = time.monotonic()
    made = plan(options)
    say(report.opening(made))
    world, acks = folder / "world.jsonl", folder / "acks.jsonl"
    counts: Counter[str] = Counter()
    outage: dict[str, float] = {}
    with zygote() as forks:
        async with listening(made.freezes) as moments, stack(folder, forks) as on:
            with outside(world, moments.url) as url:
                moments.world = url
                session = _Session(on, made, moments, url, folder, counts, outage)
                await on.pools(url, moments.url)
                await on.triggers(suspend=False)
                await _disturbed(session, Acks(acks), say)
                journeys = journeys_of([start.journey for start in made.starts] + [wish for _, wish in made.wishes]) | {"": BEAT}
                evidence = await gather(on, journeys, world, acks)
                verified = await on.store.verify()
                counts["deadlocks"] = on.postgres.log_file.read_text(errors="replace").count("deadlock detected")
    _keep(evidence, folder / "evidence.json")
    violations = check(evidence) + [Violation("verify", found.invariant, found.run, found.detail) for found in verified]
    table = report.table(
        evidence, counts, violations, outage=outage["longest outage"], seconds=time.monotonic() - began, planned=len(made.starts)
    )
    return Outcome(violations, table, report.failure(evidence, violations, options.seed, folder) if violations else "")


async def _disturbed(session: _Session, acks: Acks, say: report.Say) -> None:
    """Load and faults for their time, then quiet until all has ended, or should have."""
    on, counts, options = session.stack, session.counts, session.plan.options
    session.moments.freezer = freezer = Freezer(lambda: on.fleet.pods, counts)  # type: ignore[arg-type,return-value]
    began = asyncio.get_running_loop().time()
    person = Person(on, session.world, acks, counts, options.seed)
    beside: list[Coroutine[Any, Any, None]] = [
        person.run(), probe(on, session.outage), report.progress(on, counts, session.folder / "world.jsonl", say),
    ]  # fmt: skip
    tasks = [asyncio.create_task(work) for work in beside]
    load = asyncio.create_task(Load(on, session.plan, acks, counts).run(began))
    faults = asyncio.create_task(Faults(on, freezer, counts).run(session.plan.faults, began))
    try:
        await _unless_broken(asyncio.sleep(options.load_seconds), load, faults, *tasks)
        freezer.thaw()
        await faults
        await on.triggers(suspend=True)
        say("no more load and no more faults; what was begun may end")
        ended, stalled = asyncio.gather(load, _until_ended(on)), asyncio.create_task(_until_stalled(on))
        tasks += [stalled]
        await asyncio.wait([ended, stalled], timeout=END_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ended
    finally:
        tasks += [load, faults]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_broken(work: Coroutine[Any, Any, None], *tasks: asyncio.Task[None]) -> None:
    """The work; raises when one of the tasks that go on beside it has broken."""
    main = asyncio.ensure_future(work)
    pending: set[asyncio.Future[None]] = {main, *tasks}
    while not main.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()


async def _until_ended(on: SoakStack) -> None:
    """A firing that waits for its trigger, which fires no more, may wait."""
    query = (
        "select 1 from perdure.runs where finished_at is null union all "
        "select 1 from perdure.deliveries where closed_at is null and (state <> 'PENDING' or trigger_key <> 'default/beat') limit 1"
    )
    while True:
        if not await on.sql(query):
            return
        await asyncio.sleep(LOOK_SECONDS)


async def _until_stalled(on: SoakStack) -> None:
    """Returns when no run has changed for long."""
    loop, before, since = asyncio.get_running_loop(), None, 0.0
    while True:
        [row] = await on.sql("select sum(last_seq) as events from perdure.runs")
        if row["events"] != before:
            before, since = row["events"], loop.time()
        elif loop.time() - since > STALLED_SECONDS:
            return
        await asyncio.sleep(LOOK_SECONDS)


def _keep(evidence: Evidence, file: Path) -> None:
    """So that a verdict can be looked into afterwards."""
    runs = [{"view": run.view, "events": run.events, "journal": run.journal} for run in evidence.runs]
    file.write_text(json.dumps({"runs": runs, "deliveries": evidence.deliveries}))
