"""Redo keys: whatever the order of calls, a restart that makes the same calls gets the same keys, from the top or from a checkpoint."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.sdk.identity import Scope

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
calls = st.lists(st.tuples(st.sampled_from(["step", "wait", "spawn"]), names, st.none() | names), max_size=40)


@given(calls)
def test_the_same_calls_get_the_same_keys_and_unnamed_ones_never_share_one(program: list[tuple[str, str, str | None]]) -> None:
    one, other = Scope(), Scope()
    keys = [one.claim(kind, name, key).key for kind, name, key in program]
    assert keys == [other.claim(kind, name, key).key for kind, name, key in program]
    unnamed = [made for made, (_, _, key) in zip(keys, program, strict=True) if key is None]
    assert len(set(unnamed)) == len(unnamed)


@given(calls, st.integers(min_value=0, max_value=40))
def test_counting_goes_on_from_a_checkpoint(program: list[tuple[str, str, str | None]], at: int) -> None:
    through = Scope()
    keys = [through.claim(kind, name, key).key for kind, name, key in program]
    before = Scope()
    for kind, name, key in program[:at]:
        with before.claim(kind, name, key).in_flight():
            pass
    resumed = Scope(counts=before.counts())
    assert [resumed.claim(kind, name, key).key for kind, name, key in program[at:]] == keys[at:]


@given(calls, st.data())
def test_what_is_in_flight_at_a_checkpoint_is_called_again(program: list[tuple[str, str, str | None]], data: st.DataObject) -> None:
    """A restart from the checkpoint gives the operation in flight the key that it had."""
    if not program:
        return
    scope = Scope()
    flying = data.draw(st.integers(0, len(program) - 1))
    for kind, name, key in program[:flying]:
        scope.claim(kind, name, key)
    kind, name, key = program[flying]
    claim = scope.claim(kind, name, key)
    with claim.in_flight():
        resumed = Scope(counts=scope.counts())
    assert resumed.claim(kind, name, key).key == claim.key
