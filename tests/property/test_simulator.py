"""Worlds that live through every fault (simulator.py). ``PERDURE_SEED`` repeats one, ``PERDURE_WORLDS`` sets how many (default 3)."""

from __future__ import annotations

import os
import time

import pytest
from tests.property import simulator

SECONDS = float(os.environ.get("PERDURE_WORLD_SECONDS", "2"))


@pytest.mark.parametrize("world", range(int(os.environ.get("PERDURE_WORLDS", "3"))))
def test_nothing_is_lost_and_nothing_happens_twice(database: str, world: int) -> None:
    seed = int(os.environ.get("PERDURE_SEED", time.time_ns() % 10**9)) + world
    print(f"PERDURE_SEED={seed}")
    lived = simulator.run(database, seed, SECONDS)
    print("\n".join(lived.history))
    assert lived.wrong == []
