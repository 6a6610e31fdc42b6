"""``python -m tests.soak --seconds 1800 --seed N``: a soak by hand. Exit code 0: nothing lost, nothing twice, all results right."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from tests.soak.plan import Options
from tests.soak.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800, help="how long load and faults last, and what was begun then ends")
    parser.add_argument("--seed", type=int, default=None, help="gives the same plan of load and faults again; by default a random one")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}", flush=True)
    outcome = asyncio.run(soak(Options(given.seconds, seed), lambda words: print(words, flush=True)))
    print(outcome.table)
    if outcome.violations:
        print(outcome.failure)
        return 1
    print(f"seed {seed}: nothing lost, nothing twice, all results right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
