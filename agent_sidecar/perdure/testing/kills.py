"""Kill a run at every commit point, in every way, and see that it comes to the same end with every effect done once."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perdure.testing.process import Fault
from perdure.testing.simulation import Commit, Simulation

Build = Callable[[], Simulation]
Check = Callable[[Simulation], None]
FAULTS: Final[tuple[Fault, ...]] = ("before", "after", "lost")


@dataclass(frozen=True)
class Report:
    """``commits``: commit points of the run without faults; ``runs``: how many runs with faults came to the same end."""

    commits: int
    runs: int
    seed: int


def kill_everywhere(build: Build, check: Check | None = None, *, seed: int | None = None, pairs: int = 0) -> Report:
    """Runs ``build()`` once without faults, then once for each commit point and each fault, then ``pairs`` times with two faults at random.

    ``build`` makes everything anew: the simulation, and the providers that its tools act on. Each run must end in the state and with the
    result of the first, must have executed no effect twice, and must pass ``check``. Raises AssertionError with the fault and the seed.
    """
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    sys.stderr.write(f"kill_everywhere: seed {seed}\n")
    first = _run(build, {})
    _verify(first, check, "without faults")
    commits = list(first.commits)
    plans: list[dict[int, Fault]] = [{commit.number: fault} for commit in commits for fault in FAULTS]
    choose = random.Random(seed)
    for _ in range(pairs):
        one, two = sorted(choose.sample(range(1, len(commits) + 1), 2))
        plans.append({one: choose.choice(FAULTS), two: choose.choice(FAULTS)})
    for plan in plans:
        told = _told(plan, commits, seed)
        killed = _run(build, plan)
        assert killed.state == first.state, f"{told}: the run is {killed.state} ({killed.error}), not {first.state}"
        assert killed.result == first.result, f"{told}: the result is {killed.result!r}, not {first.result!r}"
        _verify(killed, check, told)
    return Report(commits=len(commits), runs=len(plans), seed=seed)


def _run(build: Build, plan: dict[int, Fault]) -> Simulation:
    simulation = build()
    for commit, fault in plan.items():
        simulation.kill_at(commit, fault)
    return simulation.run()


def _verify(simulation: Simulation, check: Check | None, told: str) -> None:
    try:
        simulation.assert_effects_once()
        if check is not None:
            check(simulation)
    except AssertionError as error:
        raise AssertionError(f"{told}: {error}") from error


def _told(plan: dict[int, Fault], commits: list[Commit], seed: int) -> str:
    faults = ", ".join(f"{fault} commit {number} ({commits[number - 1].op} {commits[number - 1].key})" for number, fault in plan.items())
    return f"fault {faults}; seed {seed}"
