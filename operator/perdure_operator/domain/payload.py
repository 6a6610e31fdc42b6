"""What a JSON value must be before it is stored.

Payloads are kept as the bytes that came, so this is the only gate: size, UTF-8, one value, no NaN, no number with a point or an exponent
that is too large for a double, no integer of more than ``MAX_DIGITS``, no duplicate keys, no NUL and no lone surrogate in a string, bounded
depth. The first thing wrong is named; nothing is repaired.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import msgspec

from perdure_operator.domain.errors import InvalidInput, PayloadTooLarge

MAX_BYTES = 2_000_000
MAX_DEPTH = 200
MAX_DIGITS = 4300
"""As Python's own limit: reading more takes time that grows with their square."""


def _no_constant(name: str) -> NoReturn:
    raise InvalidInput(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InvalidInput(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise InvalidInput(f"the integer {text[:40]}… has more than {MAX_DIGITS} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidInput(f"the key {key[:100]!r} stands twice in one object")
            seen.add(key)
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_OPEN = (b"[", b"{")


def _deeper(text: str, limit: int) -> bool:
    """Whether it is nested deeper, strings skipped. Only called when there are enough brackets to matter."""
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > limit:
            return True
    return False


def _walk_strings(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if "\x00" in item:
                raise InvalidInput("a string holds a NUL character")
            try:
                item.encode()
            except UnicodeEncodeError as error:
                raise InvalidInput("a string holds a lone surrogate, which is no character") from error
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


_UNSURE: Any = object()
_PLAIN_BYTES = 4096
_PLAIN_CONTAINERS = 16
_NOT_PLAIN = (b"\\", b" :", b"\t:", b"\r:", b"\n:")
_plain_decoder = msgspec.json.Decoder()


def _keys(value: Any) -> int:
    """Of all objects in it together."""
    if type(value) is dict:
        return len(value) + sum(_keys(item) for item in value.values() if type(item) in (dict, list))
    if type(value) is list:
        return sum(_keys(item) for item in value if type(item) in (dict, list))
    return 0


def _plain(raw: bytes) -> Any:
    """The value of small, plain JSON, in a third of the time; ``_UNSURE`` of everything else, right or wrong.

    msgspec is as strict as the rules above but for keys that stand twice. Without a backslash no string holds a quote, and without white
    space before a colon each key is followed by ``":``, which then stands nowhere else: there are as many as keys in the result, unless
    one stood twice.
    """
    if len(raw) > _PLAIN_BYTES or sum(map(raw.count, _OPEN)) > _PLAIN_CONTAINERS or any(map(raw.count, _NOT_PLAIN)):
        return _UNSURE
    try:
        value = _plain_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _UNSURE
    return value if _keys(value) == raw.count(b'":') else _UNSURE


def check_json(raw: bytes, what: str = "the value", *, limit: int = MAX_BYTES, depth: int = MAX_DEPTH) -> Any:
    """Decodes ``raw`` strictly and gives the value. Raises InvalidInput or PayloadTooLarge, naming ``what``."""
    if len(raw) > limit:
        raise PayloadTooLarge(f"{what} has {len(raw)} bytes; at most {limit} are allowed")
    if depth >= _PLAIN_CONTAINERS and (plain := _plain(raw)) is not _UNSURE:
        return plain
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} is not UTF-8 (byte {error.start})") from error
    if sum(map(raw.count, _OPEN)) > depth and _deeper(text, depth):
        raise InvalidInput(f"{what} is nested deeper than {depth} levels")
    try:
        value = _decoder.decode(text)
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}") from None
    except ValueError as error:
        raise InvalidInput(f"{what} is not JSON: {error}") from error
    if b"\\u" in raw or b"\x00" in raw:
        try:
            _walk_strings(value)
        except InvalidInput as error:
            raise InvalidInput(f"{what}: {error}") from None
    return value
