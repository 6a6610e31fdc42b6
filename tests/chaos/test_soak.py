"""Three minutes of ``make soak``: load and faults at random on a whole stack, judged by what is to be seen from outside.

``PERDURE_SOAK_SEED`` draws the same plan again.
"""

from __future__ import annotations

import os
import random
import shutil

import pytest
from tests.soak.plan import Options
from tests.soak.soak import soak

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group(__name__),
    pytest.mark.skipif(shutil.which("curl") is None, reason="one of its agents needs curl"),
]

SEED = int(os.environ.get("PERDURE_SOAK_SEED") or random.SystemRandom().randrange(1_000_000))
SECONDS = 180.0


@pytest.mark.timeout(420)
async def test_nothing_is_lost_and_nothing_happens_twice() -> None:
    print(f"\nPERDURE_SOAK_SEED={SEED}")
    outcome = await soak(Options(SECONDS, SEED), lambda words: print(words, flush=True))
    print(outcome.table)
    assert not outcome.violations, outcome.failure
