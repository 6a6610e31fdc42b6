"""``python -m bench``: everything, a few minutes. ``--quick``: a minute. ``--only pod``: what begins with that name."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop
from rich.console import Console

from bench import aims, machine, report, rounds
from bench.stage import Stage
from bench.variants.agents import AgentSteps
from bench.variants.agentwakes import ForkWake, SingleUseWake
from bench.variants.commit import BareCommit
from bench.variants.connected import Connected
from bench.variants.dbos import DbosSteps, Worker
from bench.variants.podapi import PodSteps
from bench.variants.store import JournalBatch
from bench.variants.timers import Timer
from bench.variants.variant import Variant
from bench.variants.wake import Wake

RESULTS = Path(__file__).parent / "results"
WIDTH = 120
"""Columns when the output is no terminal."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: a minute; the figures are rough")
    parser.add_argument("--big", action="store_true", help="1,000,000 sleeping runs under the timers (several minutes and GB more)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="variants whose name begins so (pod, pod-64 …); repeatable"
    )
    parser.add_argument("--rounds", type=int, help="turns of every variant (5; quick: 1)")
    parser.add_argument("--seconds", type=float, help="length of each measurement (3; quick: 1)")
    parser.add_argument("--sleeping", type=int, help="sleeping runs under the timers (100,000; quick: 10,000)")
    parser.add_argument("--list", action="store_true", help="name the variants and end")
    chosen = parser.parse_args(arguments)
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 5)
    chosen.seconds = chosen.seconds or (1.0 if chosen.quick else 3.0)
    chosen.sleeping = chosen.sleeping or (1_000_000 if chosen.big else 10_000 if chosen.quick else 100_000)
    return chosen


def variants(chosen: argparse.Namespace, tell: Callable[[str], None]) -> list[Variant]:
    worker = Worker()
    every: list[Variant] = [
        *(BareCommit(clients) for clients in (1, 64)),
        *(JournalBatch(size) for size in (1, 64, 256)),
        *(DbosSteps(worker, runs) for runs in (1, 64)),
        *(PodSteps(runs) for runs in (1, 16, 64, 256)),
        Connected(1000),
        *(AgentSteps(runs) for runs in (1, 64)),
        *(Wake(at_once) for at_once in (1, 64)),
        SingleUseWake(),
        *(ForkWake(at_once) for at_once in (1, 64)),
        *(Timer(sleeping, tell) for sleeping in (0, chosen.sleeping)),
    ]
    return [v for v in every if not chosen.only or v.name.startswith(tuple(chosen.only))]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """One that the server's own system user can enter when this runs as root."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def main(chosen: argparse.Namespace, console: Console) -> None:
    def tell(line: str) -> None:
        console.print(line, style="dim", highlight=False)

    picked = variants(chosen, tell)
    if chosen.list or not picked:
        for variant in picked or variants(options([]), tell):
            console.print(f"{variant.name:<14} {variant.what}", highlight=False)
        return
    with temporary_folder() as folder:
        async with Stage(folder) as stage:
            described = await machine.describe(stage.dsn("postgres"), folder)
            tell(machine.in_words(described))
            found = await rounds.run(stage, picked, rounds=chosen.rounds, seconds=chosen.seconds, tell=tell)
    verdicts = list(aims.judged(found, chosen.sleeping))
    report.show(console, found, verdicts)
    file = report.write(RESULTS, described, vars(chosen), found, verdicts)
    console.print(f"results: {file}", highlight=False)


if __name__ == "__main__":
    uvloop.run(main(options(), Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)))
