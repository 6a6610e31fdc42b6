"""Typed values to JSON and back."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel, Field

from perdure import InvalidDeclaration, NotEncodable, PayloadTooLarge
from perdure.protocol import MAX_PAYLOAD_BYTES
from perdure.sdk.codec import codec_of, encode, fingerprint


class Colour(Enum):
    RED = "red"


class Inner(BaseModel):
    at: datetime
    tags: set[str] = set()


class Aliased(BaseModel):
    order_id: int = Field(alias="orderId")


@dataclass
class Outer:
    name: str
    inner: Inner
    pairs: list[tuple[int, str]] = field(default_factory=list)


class Point(msgspec.Struct):
    x: float
    y: float


NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, type(None)),
        ("text", str),
        ([1, 2], list[int]),
        ((1, "a"), tuple[int, str]),
        ({"a", "b"}, set[str]),
        ({1: "a"}, dict[int, str]),
        (NOW, datetime),
        (Decimal("1.20"), Decimal),
        (UUID(int=5), UUID),
        (b"\x00\xff", bytes),
        (Colour.RED, Colour),
        (Point(1.5, -2.0), Point),
        (Inner(at=NOW, tags={"x"}), Inner),
        (Aliased(orderId=4), Aliased),
        (Outer("n", Inner(at=NOW), [(1, "a")]), Outer),
        ([Inner(at=NOW), Inner(at=NOW, tags={"y"})], list[Inner]),
        ({"k": Inner(at=NOW)}, dict[str, Inner]),
        (None, Inner | None),
        (2**70, int),
    ],
)
def test_comes_back_as_it_went(value: object, kind: Any) -> None:
    assert codec_of(kind).decode(encode(value)) == value


@pytest.mark.parametrize("value", [object(), {"a": object()}, lambda: 0, "\ud800", {(1, 2): 3}])
def test_what_has_no_json_form_is_refused(value: object) -> None:
    with pytest.raises(NotEncodable, match="result of x"):
        encode(value, "result of x")


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [1, {"b": -math.inf}]}, Point(math.nan, 0.0), [None, math.nan]])
def test_not_a_number_does_not_become_null(value: object) -> None:
    with pytest.raises(NotEncodable):
        encode(value)


def test_null_is_still_allowed() -> None:
    assert encode({"a": None, "b": "null"}) == b'{"a":null,"b":"null"}'
    assert encode({"a": msgspec.Raw(b"null"), "b": Inner(at=NOW)})[:10] == b'{"a":null,'


def test_too_large() -> None:
    encode("x" * (MAX_PAYLOAD_BYTES - 2))
    with pytest.raises(PayloadTooLarge):
        encode("x" * (MAX_PAYLOAD_BYTES - 1))


def test_a_mismatch_says_where() -> None:
    with pytest.raises(ValueError, match="name"):
        codec_of(Outer).decode(b'{"name":1,"inner":{"at":"2026-03-01T12:30:00Z"}}')
    with pytest.raises(ValueError, match="at"):
        codec_of(Inner).decode(b"{}")


def test_a_type_that_json_cannot_fill_is_refused_at_once() -> None:
    with pytest.raises(InvalidDeclaration):
        codec_of(list[int] | set[int])


def test_fingerprints_do_not_depend_on_order() -> None:
    assert fingerprint({"a": {"x": 1, "y": {2, 3}}, "b": 2}) == fingerprint({"b": 2, "a": {"y": {3, 2}, "x": 1}})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert len(fingerprint({})) == 16


def test_an_argument_without_json_counts_by_its_type() -> None:
    one, other = object(), object()
    assert fingerprint({"client": one, "n": 1}) == fingerprint({"client": other, "n": 1})
    assert fingerprint({"client": one, "n": 1}) != fingerprint({"client": one, "n": 2})
    assert fingerprint({"client": one}) != fingerprint({"client": test_too_large})


def test_pydantic_is_imported_by_nobody_but_the_author() -> None:
    code = (
        "import perdure.sidecar, perdure, sys; perdure.agent; perdure.tool; perdure.Run; assert 'pydantic' not in sys.modules; print('ok')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "ok\n"


def test_the_sidecar_does_not_import_the_sdk() -> None:
    code = "import perdure.sidecar, sys; assert not [name for name in sys.modules if name.startswith('perdure.sdk')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fingerprints_of_keys_that_are_no_strings() -> None:
    assert fingerprint({"a": {1: "x", 2: "y"}}) == fingerprint({"a": {2: "y", 1: "x"}})
    assert fingerprint({"a": {1: "x"}}) != fingerprint({"a": {1: "z"}})
