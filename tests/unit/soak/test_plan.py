"""The plan of a soak: made of its seed alone, as large as it says, and such that every run can end."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.soak.journey import Action, Journey, ends, every
from tests.soak.plan import IN_SECONDS, POOLS, RUNS, SIGNALS, Options, Start, plan


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert plan(Options(180, 1)) == plan(Options(180, 1))
    assert plan(Options(180, 1)) != plan(Options(180, 2))


@pytest.mark.parametrize("seconds", [180, IN_SECONDS])
def test_it_is_as_large_as_it_says_and_has_everything_in_it(seconds: int) -> None:
    made = plan(Options(seconds, 3))
    journeys = [journey for start in made.starts for journey in every(start.journey)]
    share = made.options.share
    assert RUNS * share <= len(journeys) + len(made.wishes) <= RUNS * share + 10
    signals = sum(deed.what == "signal" for start in made.starts for deed in start.deeds)
    assert abs(signals - SIGNALS * share) <= 0.05 * SIGNALS * share
    assert {start.pool for start in made.starts} == set(POOLS)
    assert {fault.kind for fault in made.faults} == {"postgres", "gateway", "sidecar", "agent", "freeze"}
    assert {deed.what for start in made.starts for deed in start.deeds} == {"signal", "cancel", "pause", "resume"}
    done = {action.do for journey in journeys for action in journey.actions}
    assert done == set("step effect signal sleep race all timeout abandon children checkpoint fail hang".split())
    policies = {action.policy for journey in journeys for action in journey.actions if action.do == "effect"}
    assert policies == {"query", "retry-same-key", "ask", "assume-not-done", "fail"}


def test_every_wait_for_a_signal_is_sent_one() -> None:
    for start in plan(Options(600, 4)).starts:
        wanted = Counter(name for action in start.journey.actions for name in action.names if name != "never")
        sent = Counter(name for name, _ in {(deed.name, deed.id) for deed in start.deeds if deed.what == "signal"})
        assert wanted <= sent, start.journey.path


FAIL, HANG, STEP = Action("fail", "a8"), Action("hang", "a9"), Action("step", "a0")


def having(join: str, bond: str) -> Action:
    return Action("children", "a1", join=join, bond=bond, plans=[Journey("c0", [STEP]), Journey("c1", [FAIL])])


@pytest.mark.parametrize(
    ("actions", "states"),
    [
        ([STEP], {"Succeeded"}),
        ([STEP, FAIL], {"Failed"}),
        ([STEP, HANG], {"Cancelled"}),
        ([having("all", "cancel")], {"Succeeded"}),
        ([having("all", "fail_parent"), STEP], {"Failed"}),
        ([having("all", "fail_parent"), HANG], {"Failed"}),
        ([having("any", "fail_parent"), STEP], {"Failed", "Succeeded"}),
        ([having("none", "fail_parent"), HANG], {"Failed", "Cancelled"}),
    ],
)
def test_how_a_run_may_end(actions: list[Action], states: set[str]) -> None:
    assert ends(Journey("p", actions)) == states


def test_what_hangs_is_cancelled() -> None:
    for start in plan(Options(IN_SECONDS, 5)).starts:
        if any(action.do == "hang" for action in start.journey.actions):
            assert any(deed.what == "cancel" for deed in start.deeds)


def _journeys(starts: list[Start]) -> list[Journey]:
    return [journey for start in starts for journey in every(start.journey)]
