"""``python -m tests.soak --seconds 1800 --seed N``: a soak by hand. Exit code 0: nothing lost, nothing twice, all results right."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.soak.plan import Options
from tests.soak.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800, help="how long load and faults last, and what was begun then ends")
    parser.add_argument("--seed", type=int, default=None, help="gives the same plan of load and faults again; by default a random one")
    parser.add_argument(
        "--no-freeze-before-sync-query",
        action="store_true",
        help="spare synchronous tools with on_unknown=query a freeze before their call",
    )
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="perdure-soak-"))
    folder.chmod(0o711)
    # What the connections of the stack have to say while their database is down.
    logging.basicConfig(filename=folder / "soak.log")
    options = Options(given.seconds, seed, freeze_before_sync_query=not given.no_freeze_before_sync_query)
    try:
        outcome = asyncio.run(soak(options, folder, lambda words: print(words, flush=True)))
    except BaseException:
        print(f"the soak itself has broken, seed {seed}; logs are in {folder}", file=sys.stderr, flush=True)
        raise
    print(outcome.table)
    if outcome.violations:
        print(outcome.failure)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print(f"seed {seed}: nothing lost, nothing twice, all results right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
