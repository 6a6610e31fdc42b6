"""Agent, sidecar, gateway and Postgres are killed at every commit of a run; each time it comes to the same end.

By default a sample, in parallel in one stack. ``PERDURE_CHAOS_SEED`` draws it again, ``PERDURE_CHAOS_ALL=1`` runs the whole matrix,
``PERDURE_CHAOS_ONLY`` those whose description holds these words.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import pytest
from tests.chaos.matrix import PARTS, PHASES, VICTIMS, Crash, End, Verdict, crash, crashes, end_of, failures_of, points_of, voyage
from tests.chaos.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group(__name__)]

ALL = os.environ.get("PERDURE_CHAOS_ALL") == "1"
ONLY = os.environ.get("PERDURE_CHAOS_ONLY", "")
SEED = int(os.environ.get("PERDURE_CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))
PARALLEL = 4
SAMPLE_SECONDS = 22.0
"""After so long no further crash of the sample is begun, once each pair of victim and phase has been struck."""
PAIRS = {(victim, phase) for victim in VICTIMS for phase in PHASES}
TRIES = 3


@pytest.mark.slow
@pytest.mark.timeout(1800 if ALL else 400)
async def test_a_crash_at_any_commit_changes_nothing(chaos: Stack) -> None:
    print(f"\nPERDURE_CHAOS_SEED={SEED}")
    chance = random.Random(SEED)
    await asyncio.gather(chaos.pool("voyage", warm=2), chaos.pool("voyage", name="fork", warm=1, fork=True))
    clean = await voyage(chaos, "clean", "voyage")
    expected = await end_of(chaos, clean, "clean")
    assert (expected.state, expected.effects, expected.children) == ("Succeeded", PARTS, ["Succeeded"])
    assert await end_of(chaos, await voyage(chaos, "forked", "fork"), "forked") == expected

    plan = crashes(await points_of(chaos, clean), ["voyage", "fork"], chance)
    chance.shuffle(plan)
    plan = [what for what in plan if ONLY in str(what)]
    if not ALL and not ONLY:
        # One of each pair of victim and phase first.
        seen: Counter[tuple[str, str]] = Counter()
        plan.sort(key=lambda what: (seen.update([(what.victim, what.phase)]), seen[what.victim, what.phase])[1])
    struck, failures = await _run(chaos, plan, expected)
    print(dict(struck))
    assert not failures, "\n".join(failures) + "\n" + chaos.words()
    assert ONLY or set(struck) == PAIRS


async def _run(chaos: Stack, plan: list[Crash], expected: End) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often each pair of victim and phase was struck as meant, and what was wrong afterwards."""
    began = time.monotonic()
    struck: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    waiting = list(enumerate(plan))

    async def work() -> None:
        while waiting and not failures and (ALL or ONLY or set(struck) != PAIRS or time.monotonic() - began < SAMPLE_SECONDS):
            number, what = waiting.pop(0)
            for attempt in range(TRIES):
                name = f"run-{number}-{attempt}"
                since = time.monotonic()
                try:
                    verdict, run = await crash(chaos, name, what)
                    found = await end_of(chaos, run, name)
                except (AssertionError, TimeoutError) as error:
                    failures.append(f"{name}: {what}: {error!r}")
                    return
                print(f"{time.monotonic() - began:6.1f} s  {verdict:6} in {time.monotonic() - since:4.1f} s  {name}: {what}", flush=True)
                if what.victim != "agent" and (failed := await failures_of(chaos, run)):
                    failures.append(f"{name}: {what}: {verdict}: attempts failed: {failed}")
                if found != expected:
                    failures.append(f"{name}: {what}: {verdict}\n  found    {found}\n  expected {expected}")
                if verdict is Verdict.STRUCK:
                    struck[what.victim, what.phase] += 1
                if verdict is not Verdict.MISSED:
                    break

    await asyncio.gather(*(work() for _ in range(PARALLEL)))
    return struck, failures
