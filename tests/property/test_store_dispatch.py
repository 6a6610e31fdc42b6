"""Who gets the next pod (L4): fair between tenants, by priority inside one, within the limits, and nothing starves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.runs import columns
from tests.property.twin import Twin

from perdure_operator.store.operations import Control

GATEWAY = "g0"
POOL = "ns/p"
MINUTE = 60


class Fleet(Twin):
    """A twin with one pool, and runs and pods made by the number."""

    def reset(self) -> None:
        super().reset()
        self._ids = itertools.count(1)
        self.pods: list[UUID] = []

    def add_pods(self, count: int) -> None:
        for _ in range(count):
            self.pods.append(UUID(int=0xF0000 + next(self._ids)))
            self.hello(self.pods[-1], POOL, GATEWAY, reuse=True, believes=None)

    def add_run(self, namespace: str, priority: int = 0) -> UUID:
        created = self.create(columns(UUID(int=next(self._ids)), POOL, namespace=namespace, priority=priority))
        assert created is not None
        return created

    def dispatch_all(self) -> list[UUID]:
        return self.dispatch(GATEWAY, *(pod for pod in self.pods if self.oracle.pods[pod].state == "idle"))

    def finish(self, run: UUID) -> None:
        row = self.oracle.runs[run]
        assert row.holder is not None
        pod = row.holder
        self.control([Control(run, "finish", {"outcome": "succeeded"}, row.fence, payload=b"1")])
        self.idle(pod, GATEWAY)

    def running(self) -> Counter[str]:
        return Counter(run.namespace for run in self.oracle.runs.values() if run.holder)


@pytest.fixture
def fleet(database: str) -> Iterator[Fleet]:
    with Fleet(database) as fleet:
        fleet.pool("p", None)
        yield fleet


tenants = st.dictionaries(
    st.sampled_from(("a", "b", "c", "d")),
    st.tuples(st.sampled_from((0.5, 1.0, 3.0, 50.0)), st.none() | st.integers(0, 4)),
    min_size=1,
)
queue = st.lists(st.tuples(st.sampled_from(("a", "b", "c", "d")), st.integers(-2, 3), st.sampled_from((0.37, 7.1, 65.3))), max_size=14)


@settings(max_examples=25)
@given(tenants=tenants, limit=st.none() | st.integers(0, 6), rounds=st.lists(st.tuples(queue, st.integers(1, 4)), min_size=1, max_size=3))
def test_many_pods_at_once_get_what_they_would_get_one_by_one(
    fleet: Fleet, tenants: dict[str, tuple[float, int | None]], limit: int | None, rounds: list[tuple[list[tuple[str, int, float]], int]]
) -> None:
    fleet.reset()
    fleet.pool("p", limit)
    for namespace, (weight, most) in tenants.items():
        fleet.tenant(namespace, weight, most)
    for waiting, pods in rounds:
        for namespace, priority, later in waiting:
            fleet.pass_time(later)
            fleet.add_run(namespace, priority)
        fleet.add_pods(pods)
        fleet.dispatch_all()
        running = fleet.running()
        assert limit is None or running.total() <= limit
        assert all(most is None or running[namespace] <= most for namespace, (_, most) in tenants.items())
    fleet.compare()


@pytest.mark.parametrize(("weights", "expected"), [((1, 1), (4, 4)), ((3, 1), (6, 2)), ((7, 1), (7, 1)), ((0.5, 1.5), (2, 6))])
def test_running_shares_follow_the_weights(fleet: Fleet, weights: tuple[float, float], expected: tuple[int, int]) -> None:
    for namespace, weight in zip("ab", weights, strict=True):
        fleet.tenant(namespace, weight, None)
    for n in range(20):
        fleet.pass_time(0.1)
        fleet.add_run("a" if n < 10 else "b")
    fleet.add_pods(8)
    fleet.dispatch_all()
    assert (fleet.running()["a"], fleet.running()["b"]) == expected


def test_a_tenant_with_a_long_queue_leaves_room_when_the_pool_is_full(fleet: Fleet) -> None:
    """A pool limit must not turn fairness into first come, first served: there are more idle pods than the pool may run."""
    fleet.pool("p", 4)
    for _ in range(30):
        fleet.pass_time(0.1)
        fleet.add_run("flood")
    fleet.add_pods(10)
    flooding = fleet.dispatch_all()
    assert len(flooding) == 4
    small = fleet.add_run("small")
    fleet.pass_time(1)
    fleet.finish(flooding[0])
    assert fleet.dispatch_all() == [small]


def until_it_runs(fleet: Fleet, run: UUID, favoured: str, priority: int, pods: int, limit_seconds: float) -> float:
    """Seconds until ``run`` gets a pod while every ten seconds all pods become free and a better run comes for each."""
    waited = 0.0
    while waited <= limit_seconds:
        for _ in range(pods):
            fleet.pass_time(0.01)
            fleet.add_run(favoured, priority)
        started = fleet.dispatch_all()
        if run in started:
            return waited
        fleet.pass_time(10)
        waited += 10
        for other in started:
            fleet.finish(other)
    raise AssertionError(f"after {waited} s it still has no pod")


@pytest.mark.parametrize("weight", [1.0, 50.0])
def test_no_tenant_starves_however_heavy_the_others_are(fleet: Fleet, weight: float) -> None:
    fleet.tenant("heavy", weight, None)
    fleet.add_pods(2)
    run = fleet.add_run("light")
    assert until_it_runs(fleet, run, "heavy", 0, 2, 2 * MINUTE) <= 1.5 * MINUTE


@pytest.mark.parametrize("priority", [1, 3])
def test_age_beats_priority_in_the_end(fleet: Fleet, priority: int) -> None:
    """A point of priority is worth a minute."""
    fleet.add_pods(1)
    run = fleet.add_run("ns", 0)
    waited = until_it_runs(fleet, run, "ns", priority, 1, (priority + 1) * MINUTE)
    assert waited >= (priority - 0.5) * MINUTE


def test_backoff_doubles_up_to_its_cap_and_is_scattered(fleet: Fleet) -> None:
    query = """
        select n::int, extract(epoch from perdure.backoff(jsonb_populate_record(null::perdure.runs, jsonb_build_object(
          'run_id', gen_random_uuid(), 'backoff_seconds', base, 'max_backoff_seconds', cap)), n))::float8 as seconds,
          base::float8, cap::float8
        from generate_series(1, 40) n, unnest(array[0, 0.5, 2, 60]) base, unnest(array[0, 1, 120, 86400]) cap, generate_series(1, 5)
    """

    async def read() -> list[Any]:
        async with fleet.store.connection() as connection:
            return list(await connection.fetch(query))

    scattered = Counter[int]()
    for row in fleet.wait(read()):
        longest = min(row["cap"], row["base"] * 2 ** (row["n"] - 1))
        assert longest / 2 - 1e-5 <= row["seconds"] <= longest + 1e-5
        if longest:
            scattered[round(row["seconds"] / longest * 10)] += 1
    assert set(scattered) == {5, 6, 7, 8, 9, 10}
