"""What a person reads of a soak: a line every ten seconds, and a table in the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.soak.checker import ONCE, TERMINAL, Violation
from tests.soak.evidence import Evidence, lines
from tests.soak.moments import LEFT_SECONDS
from tests.soak.plan import Plan
from tests.soak.stack import SoakStack

EVERY_SECONDS = 10.0
MOST_SHOWN = 20
EVENTS_SHOWN = 60

Say = Callable[[str], None]


def is_fault(kind: str) -> bool:
    return "killed" in kind or "frozen" in kind


def opening(plan: Plan) -> str:
    faults = Counter(fault.kind for fault in plan.faults)
    parts = [
        f"{len(plan.starts)} runs and what they start",
        f"{len(plan.wishes)} wishes",
        f"{len(plan.freezes)} freezes and kills at effects",
    ]
    parts += [f"{count} × {kind}" for kind, count in faults.items()]
    about = f"soak of {plan.options.seconds:.0f} s, seed {plan.options.seed}: {', '.join(parts)}."
    return f"{about} The same seed gives the same plan, not the same timing."


async def progress(stack: SoakStack, counts: Counter[str], world: Path, say: Say) -> None:
    """Until it is cancelled."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        rows = await stack.sql("select state, count(*) as n from perdure.runs group by 1")
        states = {row["state"]: row["n"] for row in rows}
        done = sum(states.get(state, 0) for state in TERMINAL)
        effects = sum(line["what"] == "effect" for line in lines(world))
        faults = sum(count for kind, count in counts.items() if is_fault(kind))
        say(
            f"{time.monotonic() - began:6.0f} s  {done} of {sum(states.values())} runs done, {counts['signals sent']} signals, "
            f"{effects} effects, {faults} faults; {len(stack.fleet.pods)} workers"
        )


def table(evidence: Evidence, counts: Counter[str], violations: list[Violation], *, outage: float, seconds: float, planned: int) -> str:
    states = Counter(run.view["state"] for run in evidence.runs)
    effects = evidence.happened("effect")
    kinds = Counter(violation.kind for violation in violations)
    harmless = [line["identity"] for line in effects if line["policy"] not in ONCE]
    again = len(harmless) - len(set(harmless))
    answers = [event["data"] for run in evidence.runs for event in run.of("activity.resolved")]
    resolved = Counter(f"{said['by']}: {said['state']}" for said in answers)
    rows = [
        ("runs", f"{len(evidence.runs)} ({', '.join(f'{count} {state}' for state, count in sorted(states.items()))})"),
        (
            "of the plan's begun",
            f"{counts['runs begun']} of {planned}" + (": the machine is slow" if counts["runs begun"] < planned else ""),
        ),
        ("leases", str(sum(len(run.of("run.leased")) for run in evidence.runs))),
        ("workers lost", str(sum(len(run.of("run.lost")) for run in evidence.runs))),
        (
            "signals acknowledged",
            f"{len(evidence.acked('signal'))}, of them {sum(ack['duplicate'] for ack in evidence.acked('signal'))} again",
        ),
        ("signals refused", str(sum(ack["deed"] == "signal" for ack in evidence.acked("refused")))),
        ("firings", str(sum(len(found) for found in evidence.deliveries.values()))),
        ("effects", f"{len(effects)} requests for {len({line['identity'] for line in effects})} effects"),
        ("  the provider was asked", str(len(evidence.happened("asked")))),
        ("  a person was asked", str(counts["questions answered"])),
        ("  repeated by policy", str(sum(line["repeated"] for line in effects) + again)),
        ("  resolved", ", ".join(f"{n} by {one}" for one, n in resolved.items()) or "none"),
        *((f"fault: {kind}", str(count)) for kind, count in sorted(counts.items()) if is_fault(kind)),
        (
            "left to the fleet",
            f"{counts['ended by the fleet']} ended by it, {counts['left standing']} still there after {LEFT_SECONDS:.0f} s",
        ),
        ("longest outage", f"{outage:.1f} s"),
        ("time", f"{seconds:.0f} s"),
        ("deadlocks in Postgres", str(counts["deadlocks"])),
        ("duplicates seen", str(kinds["twice"])),
        ("lost", str(kinds["lost"])),
        ("wrong", str(kinds["wrong"])),
        ("perdure verify", f"{kinds['verify']} violations"),
    ]
    return "\n".join(f"  {name:26} {value}" for name, value in rows)


def failure(evidence: Evidence, violations: list[Violation], seed: int, folder: Path) -> str:
    """Seed, what was violated, the events of the first runs concerned, and where the rest is."""
    by_name = {run.name: run for run in evidence.runs} | {run.id: run for run in evidence.runs}
    said = [f"FAILED, seed {seed}: {len(violations)} violations; logs, evidence and database are in {folder}"]
    shown: set[str] = set()
    for violation in violations[:MOST_SHOWN]:
        said.append(f"{violation.kind}: {violation.rule}: {violation.run}: {violation.detail}")
        run = by_name.get(violation.run)
        if run is not None and run.id not in shown and len(shown) < 3:
            shown.add(run.id)
            said += [f"    {event['at'][11:23]} {event['seq']:4} e{event['epoch']} {event['kind']:24} {_short(event['data'])}"
                     for event in run.events[:EVENTS_SHOWN]]  # fmt: skip
    return "\n".join(said)


def _short(data: object) -> str:
    return str(data)[:150]
