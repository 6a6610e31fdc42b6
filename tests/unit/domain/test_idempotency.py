"""Keys and fingerprints of effects (E2, E3): what makes two calls the same effect, and what does not."""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
import rfc8785
from hypothesis import assume, given
from hypothesis import strategies as st

from perdure_operator.domain.errors import InvalidInput
from perdure_operator.domain.idempotency import (
    Call,
    EffectClass,
    ToolPolicy,
    UnknownPolicy,
    _with_large_integers,
    by_verb,
    classify,
    fingerprint,
    identity,
    key,
)

RUN = UUID(int=1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
integers = st.integers(-(2**53) + 1, 2**53 - 1) | st.integers(-(2**70), 2**70)
floats = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70).map(float)
scalars = st.none() | st.booleans() | integers | floats | text
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8)
objects = st.dictionaries(text, values, max_size=5)


def shuffled(value: Any) -> Any:
    """The same value with the fields of every object in the opposite order."""
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(list(value))}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(values)
def test_the_order_of_fields_does_not_matter(arguments: Any) -> None:
    one, other = Call("t", arguments), Call("t", shuffled(arguments))
    assert key(RUN, one) == key(RUN, other)
    assert fingerprint(one) == fingerprint(other)


def same(one: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1, 1.0 is 1, however large they are."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(values, values)
def test_equal_arguments_and_only_they_have_equal_fingerprints(one: Any, other: Any) -> None:
    assert (fingerprint(Call("t", one)) == fingerprint(Call("t", other))) == same(one, other)


@given(objects)
def test_what_is_not_the_same_effect_has_another_key(arguments: dict[str, Any]) -> None:
    call = Call("t", arguments)
    others = [replace(call, tool="u"), replace(call, namespace="n"), replace(call, occurrence=1), replace(call, arguments=[arguments])]
    keys = [key(RUN, call), key(UUID(int=2), call), *(key(RUN, other) for other in others)]
    assert len(set(keys)) == len(keys)


@given(text, text, text, text)
def test_the_parts_of_a_key_do_not_run_into_each_other(tool: str, namespace: str, tool2: str, namespace2: str) -> None:
    assume((tool, namespace) != (tool2, namespace2))
    assert key(RUN, Call(tool, {}, namespace=namespace)) != key(RUN, Call(tool2, {}, namespace=namespace2))


@given(objects, objects, st.data())
def test_the_scope_alone_makes_the_key(scope: dict[str, Any], rest: dict[str, Any], data: st.DataObject) -> None:
    names = tuple(scope)
    changed = {name: data.draw(values) for name in rest if name not in scope}
    one, other = Call("t", {**rest, **scope}, scope=names), Call("t", {**changed, **scope}, scope=names)
    assert key(RUN, one) == key(RUN, other)
    assert (fingerprint(one) == fingerprint(other)) == same(one.arguments, other.arguments)


@given(objects, text, values)
def test_ignored_fields_change_neither_key_nor_fingerprint(arguments: dict[str, Any], name: str, value: Any) -> None:
    ignoring = Call("t", arguments, ignore=frozenset({name}))
    other = replace(ignoring, arguments={**arguments, name: value})
    assert key(RUN, ignoring) == key(RUN, other)
    assert fingerprint(ignoring) == fingerprint(other)


@given(objects, text)
def test_the_pools_scope_stands_over_the_calls(arguments: dict[str, Any], name: str) -> None:
    call = Call("t", {**arguments, name: 1}, scope=())
    assert identity(call, ToolPolicy(scope=(name,))) == {name: 1}
    assert identity(call) == {}


@pytest.mark.parametrize("arguments", [[], None, 1, "x"])
def test_a_scope_needs_an_object(arguments: Any) -> None:
    with pytest.raises(InvalidInput):
        key(RUN, Call("t", arguments, scope=("to",)))


def test_a_scope_must_be_there() -> None:
    with pytest.raises(InvalidInput, match="subject"):
        key(RUN, Call("t", {"to": 1}, scope=("to", "subject")))


PINNED = [
    ({"to": "ada", "n": 1}, "51e665b41926d89b", "897c2edf37a7c2cf"),
    ({"n": 2**53 - 1}, "af5ee7f9173fcdd0", "e1da48c6a6089f06"),
    ({"n": -(2**53) + 1}, "958dc2f889d3424c", "d49d713821fc149f"),
    ({"n": 2.0**53}, "4a411e7d38d969de", "66c87d9cb3014e05"),
    ({"n": 2.0**60}, "849e2348dc6225b9", "730c537ef7e20d83"),
    ({"n": 1e300}, "dcc50e34ff1932ef", "a2991d6d7519ce8a"),
    ([1.5, None, True, "é\n\U0001f600"], "5b46e9b6230d9194", "17e0165e7e6f79b5"),
    ({"\U0001f600": 1, "\ufb33": 2, "a": {"b": []}}, "4f40998df1a71ef9", "6db210ca247b367d"),
]


@pytest.mark.parametrize(("arguments", "begins", "prints"), PINNED)
def test_keys_stay_what_they_were(arguments: Any, begins: str, prints: str) -> None:
    """They are in ledgers: another key would be another effect."""
    call = Call("send", arguments, namespace="x", occurrence=1)
    assert (key(RUN, call)[:16], fingerprint(call)[:16]) == (begins, prints)


LARGE = [
    (1152921504606846977, b"1152921504606846977n"),
    (-1152921504606846977, b"-1152921504606846977n"),
    (2**53 + 1, b"9007199254740993n"),
    (2**53, b"9007199254740992"),
    (2**60, b"1152921504606847000"),  # as of the double that is this number
    (1152921504606847000, b"1152921504606847000n"),  # which no double is
    (2**64 - 1, b"18446744073709551615n"),
    (2**64, b"18446744073709552000"),
    (10**400, b"1" + b"0" * 400 + b"n"),  # larger than any double
]


@pytest.mark.parametrize(("number", "form"), LARGE)
def test_an_integer_that_rfc_8785_does_not_know_has_a_form_too(number: int, form: bytes) -> None:
    wanted = hashlib.sha256(b'{"z":{"a":null},"\xc3\xa9":[%b,1.5]}' % form).hexdigest()[:32]
    assert fingerprint(Call("t", {"é": [number, 1.5], "z": {"a": None}})) == wanted


@given(values)
def test_beside_a_large_integer_all_else_has_the_form_of_rfc_8785(value: Any) -> None:
    large = 2**53 + 1
    wanted = hashlib.sha256(b"[%b,9007199254740993n]" % _with_large_integers(value)).hexdigest()[:32]
    assert fingerprint(Call("t", [value, large])) == wanted
    with contextlib.suppress(rfc8785.IntegerDomainError):
        assert _with_large_integers(value) == rfc8785.dumps(value)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_has_no_canonical_form_is_refused(number: float) -> None:
    with pytest.raises(InvalidInput, match="canonical"):
        key(RUN, Call("t", {"n": number}))


@given(objects)
def test_keys_are_plain_hex(arguments: dict[str, Any]) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", key(RUN, Call("t", arguments)))
    assert re.fullmatch(r"[0-9a-f]{32}", fingerprint(Call("t", arguments)))


# ---------------------------------------------------------------------------------------------------------------- classes

SIDE_EFFECTS = (
    "send create update delete patch post merge upload invite publish comment reply forward archive label move mark assign".split()
)
READS = "get list search read fetch retrieve".split()
STYLES = [
    lambda verb, noun: f"{verb}_{noun}",
    lambda verb, noun: f"{verb}-{noun}",
    lambda verb, noun: f"{noun}.{verb}",
    lambda verb, noun: f"{verb}{noun.title()}",
    lambda verb, noun: f"{verb.title()}{noun.title()}",
    lambda verb, noun: f"{verb.upper()}_{noun.upper()}",
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("verb", [*SIDE_EFFECTS, *READS])
def test_a_verb_is_found_in_every_way_of_writing_names(verb: str, style: Any) -> None:
    expected = EffectClass.READ_ONLY if verb in READS else EffectClass.EXTERNAL
    assert by_verb(style(verb, "issue")) is expected


@pytest.mark.parametrize("name", ["sender_of", "getaway", "listen", "spread_sheet", "postpone", "thread", "frobnicate", ""])
def test_verbs_count_as_whole_words_and_what_is_not_known_is_external(name: str) -> None:
    assert by_verb(name) is EffectClass.EXTERNAL


@pytest.mark.parametrize("name", ["get_and_delete", "listThenSend", "SEARCH_OR_CREATE", "read.mark"])
def test_side_effect_verbs_win(name: str) -> None:
    assert by_verb(name) is EffectClass.EXTERNAL


effects = st.sampled_from(EffectClass)
STRICTNESS = [EffectClass.READ_ONLY, EffectClass.LOCAL, EffectClass.MEMORY, EffectClass.EXTERNAL]


@given(st.none() | effects, st.none() | effects, st.booleans(), st.sampled_from(["get_x", "send_x"]))
def test_the_pool_decides_then_the_tool_then_the_verb_and_a_run_only_tightens(
    declared: EffectClass | None, pool: EffectClass | None, listed: bool, tool: str
) -> None:
    policy = ToolPolicy(effect=pool, on_unknown=UnknownPolicy.ASK)
    found = classify(Call(tool, {}, declared=declared), policy, frozenset({tool} if listed else ()))
    if listed:
        assert found is EffectClass.EXTERNAL
    else:
        assert found is (pool or declared or by_verb(tool))
    without = classify(Call(tool, {}, declared=declared), policy)
    assert STRICTNESS.index(found) >= STRICTNESS.index(without)
