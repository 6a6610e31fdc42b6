"""How many pods a pool needs now: the one rule for worker processes on a machine and for worker pods on a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perdure_operator.store.store import PoolDemand

DEFAULT_MAX_PODS = 100


@dataclass(frozen=True)
class Need:
    """What to do for a pool now."""

    start: int = 0
    retire: int = 0


def decide(demand: Iterable[PoolDemand], live: Mapping[str, int], caps: Mapping[str, int], *, limit: int, parallel: int) -> dict[str, Need]:
    """Pods to start and to retire, pool by pool.

    ``live``: processes of each pool; ``caps``: pools that may start at most so many now (back-off); ``limit``: pods on this machine over
    all pools; ``parallel``: pods that may be starting at a time. Runs that wait come before warm pods, and pools take turns. When the
    machine is full, idle pods of pools with an empty queue make room.
    """
    pools = list(demand)
    for_runs, warm, retire = {}, {}, {}
    for pool in pools:
        capacity = pool.spec.get("capacity") or {}
        keep = int(capacity.get("minIdle") or 0)
        idle_limit = capacity.get("maxIdle")
        room = min(int(capacity.get("maxPods", DEFAULT_MAX_PODS)) - live.get(pool.pool, 0), caps.get(pool.pool, limit))
        available = pool.idle + pool.starting
        for_runs[pool.pool] = max(0, min(pool.runnable - available, room))
        warm[pool.pool] = max(0, min(pool.runnable + keep - available, room) - for_runs[pool.pool])
        surplus = pool.idle - (max(keep, 1) if idle_limit is None else int(idle_limit))
        retire[pool.pool] = max(0, surplus) if pool.runnable == 0 else 0

    free = limit - sum(live.values())
    slots = min(free, parallel - sum(pool.starting for pool in pools))
    start = dict.fromkeys(for_runs, 0)
    for wanted in (for_runs, warm):
        slots = _take_turns(wanted, start, slots)

    missing = sum(for_runs.values()) - sum(start.values()) if free <= 0 else 0
    for pool in pools:
        if missing > 0 and pool.runnable == 0:
            given = min(pool.idle - retire[pool.pool], missing)
            retire[pool.pool] += max(0, given)
            missing -= max(0, given)
    return {name: Need(start[name], retire[name]) for name in start if start[name] or retire[name]}


def spare(pool: PoolDemand, unplaced: int) -> int:
    """Idle pods that may be replaced now: three quarters of those that are to be warm stay, or all but one.

    What the pool has no room for is not waited for: pods beyond its ``maxPods``, and those that are ``unplaced``.
    """
    capacity = pool.spec.get("capacity") or {}
    room = int(capacity.get("maxPods", DEFAULT_MAX_PODS)) - pool.leased
    warm = min(int(capacity.get("minIdle") or 0), room) - unplaced
    return max(0, pool.idle - warm + max(1, warm // 4))


def _take_turns(wanted: Mapping[str, int], start: dict[str, int], slots: int) -> int:
    """Deals ``slots`` to the pools one by one; what is left."""
    left = dict(wanted)
    for name in itertools.cycle(wanted):
        if slots <= 0 or not any(left.values()):
            break
        if left[name] > 0:
            left[name] -= 1
            start[name] += 1
            slots -= 1
    return max(slots, 0)
