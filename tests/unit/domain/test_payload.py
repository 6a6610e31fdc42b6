"""The gate for JSON, against a reference: a parser written from RFC 8259 that knows nothing of the standard library's."""

from __future__ import annotations

import json
import math
import re
from typing import Any, ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure_operator.domain.errors import InvalidInput, PayloadTooLarge
from perdure_operator.domain.payload import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, check_json


class Wrong(Exception):
    """Not JSON, or JSON that we do not take."""


class Reference:
    """Recursive descent over the text; ``value`` is what it says."""

    NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
    ESCAPES: ClassVar = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

    def __init__(self, raw: bytes) -> None:
        try:
            self.text = raw.decode()
        except UnicodeDecodeError:
            raise Wrong from None
        self.at = 0
        self.value = self.parse(1)
        self.space()
        if self.at < len(self.text):
            raise Wrong

    def space(self) -> None:
        while self.text[self.at : self.at + 1] in tuple(" \t\n\r"):
            self.at += 1

    def take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found

    def must(self, token: str) -> None:
        if not self.take(token):
            raise Wrong

    def parse(self, depth: int) -> Any:
        self.space()
        for token, constant in (("null", None), ("true", True), ("false", False)):
            if self.take(token):
                return constant
        if self.take('"'):
            return self.string()
        if self.text[self.at : self.at + 1] in ("[", "{") and depth > MAX_DEPTH:
            raise Wrong
        if self.take("["):
            return self.array(depth)
        return self.object(depth) if self.take("{") else self.number()

    def number(self) -> int | float:
        match = self.NUMBER.match(self.text, self.at)
        if not match:
            raise Wrong
        self.at = match.end()
        if not match[1] and not match[2]:
            if len(match[0].lstrip("-")) > 4300:
                raise Wrong
            return int(match[0])
        value = float(match[0])
        if math.isinf(value):
            raise Wrong
        return value

    def array(self, depth: int) -> list[Any]:
        items: list[Any] = []
        self.space()
        if self.take("]"):
            return items
        while True:
            items.append(self.parse(depth + 1))
            self.space()
            if self.take("]"):
                return items
            self.must(",")

    def object(self, depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        self.space()
        if self.take("}"):
            return fields
        while True:
            self.space()
            self.must('"')
            name = self.string()
            self.space()
            self.must(":")
            value = self.parse(depth + 1)
            if name in fields:
                raise Wrong
            fields[name] = value
            self.space()
            if self.take("}"):
                return fields
            self.must(",")

    def string(self) -> str:
        units: list[str] = []
        while True:
            char = self.text[self.at : self.at + 1]
            self.at += 1
            if char == '"':
                break
            if char == "\\":
                char = self.escape()
            elif char < " ":  # a control character, or the end of the text
                raise Wrong
            units.append(char)
        value = "".join(units).encode("utf-16", "surrogatepass")
        try:
            found = value.decode("utf-16")
        except UnicodeDecodeError:
            raise Wrong from None
        if "\x00" in found:
            raise Wrong
        return found

    def escape(self) -> str:
        if self.take("u"):
            digits = self.text[self.at : self.at + 4]
            if not re.fullmatch("[0-9a-fA-F]{4}", digits):
                raise Wrong
            self.at += 4
            return chr(int(digits, 16))
        char = self.text[self.at : self.at + 1]
        self.at += 1
        if char not in self.ESCAPES:
            raise Wrong
        return self.ESCAPES[char]


def outcome(raw: bytes) -> str | None:
    """The value's own representation (so that 1, 1.0 and true differ), None when it is refused."""
    try:
        return repr(Reference(raw).value)
    except Wrong:
        return None


def agree(raw: bytes) -> None:
    expected = outcome(raw)
    try:
        found = repr(check_json(raw))
    except InvalidInput:
        found = None
    assert found == expected


text = st.text(max_size=10) | st.text(st.sampled_from('a"\\/\x00\x1f\ud83d\ude00\ud800é[]{}'), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


@given(values, st.booleans())
def test_json_as_programs_write_it(value: Any, ascii_only: bool) -> None:
    agree(json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))


PIECES = (
    *"[]{},:\"01-+.e\\ \n\x00\x0b\x85\u2028\ufeff'",
    *('"a"', '"\\u0061"', '"a":', '"\\ud83d\\ude00"', '"\\ud800"', '"\\u0000"', "\\u", "//"),
    *("E9", "e99", "e308", "1" * 308, "9" * 250, "null", "true", "nul", "NaN", "Infinity", "-Infinity"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("9" * 250 + "e99")
@example("1" * 309)
@example("-" + "1" * 309)
@example("1" * 309 + ".0")
@example("1" * 4300)
@example("1" * 4301)
@example("1e0999")
@example('{"a":1,"\\u0061":2}')
@example('"\\ude00\\ud83d"')
def test_pieces_of_json(pieces: str) -> None:
    agree(pieces.encode())


@given(values.map(json.dumps), st.integers(0, 60), st.sampled_from(PIECES), st.integers(0, 2))
def test_json_with_one_mistake(good: str, at: int, piece: str, drop: int) -> None:
    agree((good[:at] + piece + good[at + drop :]).encode())


@given(st.binary(max_size=40))
@example(b"\xff")
@example(b'"\xed\xa0\x80"')
@example(b'"\xc0\x80"')
def test_bytes(raw: bytes) -> None:
    agree(raw)


@given(st.lists(st.sampled_from(["[", '{"a":']), min_size=1, max_size=MAX_DEPTH + 3))
def test_depth(opening: list[str]) -> None:
    closing = ["]" if bracket == "[" else "}" for bracket in reversed(opening)]
    agree("".join([*opening, "1", *closing]).encode())


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_exactly_so_deep(levels: int) -> None:
    raw = b"[" * levels + b"]" * levels
    if levels > MAX_DEPTH:
        with pytest.raises(InvalidInput, match="deeper"):
            check_json(raw)
    else:
        check_json(raw)


@pytest.mark.parametrize(
    "raw",
    [b"[" * 1_000_000, b'{"a":' * 300_000, b'"' + b"[" * 1_000_000, b'["' + b'\\"' * 900_000, b'"' + b"\\" * 1_900_000, b"[[]," * 400_000],
    ids=["arrays", "objects", "string", "escapes", "backslashes", "pairs"],
)
def test_what_wants_to_exhaust_us_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidInput):
        check_json(raw)


def test_brackets_in_strings_are_no_depth() -> None:
    raw = json.dumps(["[" * 1000, '"[' * 1000, "\\[" * 1000]).encode()
    assert check_json(raw) == json.loads(raw)


def test_size() -> None:
    whole = b'"' + b"x" * (MAX_BYTES - 2) + b'"'
    assert len(check_json(whole)) == MAX_BYTES - 2
    with pytest.raises(PayloadTooLarge, match="the output"):
        check_json(whole + b" ", "the output")
    with pytest.raises(PayloadTooLarge):
        check_json(b"[1, 2]", limit=5)


def test_integers_have_so_many_digits_at_most() -> None:
    whole = b"-" + b"7" * MAX_DIGITS
    assert check_json(whole) == -int("7" * MAX_DIGITS)
    with pytest.raises(InvalidInput, match=r"^arguments: the integer -7{39}… has more than 4300 digits$"):
        check_json(whole + b"7", "arguments")


def test_the_first_thing_wrong_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^arguments: the key 'a' stands twice"):
        check_json(b'{"a":1,"a":2}', "arguments")
