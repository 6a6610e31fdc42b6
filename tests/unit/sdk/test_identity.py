"""Redo keys: E9."""

from __future__ import annotations

import pytest

from perdure import ConcurrentUnnamed, InvalidDeclaration
from perdure.sdk.identity import Scope
from perdure.sdk.strands import apart


def test_keys_as_the_protocol_says() -> None:
    root = Scope()
    assert root.claim("step", "crawl").key == "step:crawl#0"
    assert root.claim("step", "crawl").key == "step:crawl#1"
    assert root.claim("wait", "crawl").key == "wait:crawl#0"
    assert root.claim("step", "crawl", "de").key == "step:crawl=de"
    assert root.claim("step", "crawl").key == "step:crawl#2"
    inside = Scope("step:crawl#0")
    assert inside.claim("step", "fetch").key == "step:crawl#0/step:fetch#0"


def test_names_from_outside_cannot_break_the_key() -> None:
    assert Scope().claim("wait", "orders/42#x=1").key == "wait:orders_42_x_1#0"


def test_deep_scopes_are_shortened_and_stay_distinct() -> None:
    deep = [Scope("/".join(["step:a#0"] * 200) + end).claim("step", "b").key for end in ("x", "y")]
    assert all(len(key) <= 1024 for key in deep)
    assert deep[0] != deep[1]
    assert Scope("/".join(["step:a#0"] * 200) + "x").claim("step", "b").key == deep[0]


def test_a_key_that_cannot_fit_is_refused() -> None:
    with pytest.raises(InvalidDeclaration):
        Scope().claim("step", "a", "k" * 1100)


def test_two_unnamed_in_flight_are_refused_and_the_error_says_key() -> None:
    root = Scope()
    one, two = root.claim("step", "a"), root.claim("step", "a")
    with one.in_flight(), pytest.raises(ConcurrentUnnamed, match="key="), two.in_flight():
        pass
    with two.in_flight():
        pass


def test_named_ones_may_be_in_flight_but_each_key_once() -> None:
    root = Scope()
    with (
        root.claim("step", "a", "1").in_flight(),
        root.claim("step", "a", "2").in_flight(),
        root.claim("step", "a").in_flight(),
        pytest.raises(ConcurrentUnnamed),
        root.claim("step", "a", "1").in_flight(),
    ):
        pass


def test_counts_leave_out_what_is_in_flight() -> None:
    root = Scope()
    with root.claim("step", "a").in_flight():
        pass
    with root.claim("step", "a").in_flight():
        assert root.counts() == {"step:a": 1}
    assert root.counts() == {"step:a": 2}
    assert Scope(counts=root.counts()).claim("step", "a").key == "step:a#2"


def test_branches_of_one_gather_may_not_count_together() -> None:
    root = Scope()
    root.claim("step", "a", lane=((1, 0),))
    root.claim("step", "a", lane=((1, 0),))
    with pytest.raises(ConcurrentUnnamed, match="gather"):
        root.claim("step", "a", lane=((1, 1),))
    root.claim("step", "a", lane=())
    root.claim("step", "a", lane=((2, 1),))


def test_apart() -> None:
    assert apart(((1, 0),), ((1, 1),))
    assert apart(((1, 0), (2, 0)), ((1, 1),))
    assert not apart(((1, 0),), ((1, 0), (2, 1)))
    assert not apart(((1, 0),), ((2, 1),))
    assert not apart((), ((1, 0),))
