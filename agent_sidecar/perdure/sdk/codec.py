"""Typed values to JSON and back, in one place: results, inputs, payloads, slices.

One encoder for everything. msgspec does the work, dataclasses included; pydantic models pass through two hooks that know them by their
methods, so pydantic is never imported from here. What cannot come back as it went is refused when it goes, not found out after a crash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Generic, TypeVar, cast

import msgspec

from perdure.protocol import MAX_PAYLOAD_BYTES
from perdure.sdk.errors import InvalidDeclaration, NotEncodable, PayloadTooLarge

T = TypeVar("T")


def _enc_hook(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", round_trip=True)
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    raise NotImplementedError(f"{type(value).__module__}.{type(value).__qualname__} has no JSON form")


def _dec_hook(kind: type, value: Any) -> Any:
    if hasattr(kind, "model_validate_json"):
        return _validate(kind, _encoder.encode(value))
    raise NotImplementedError(f"{kind.__module__}.{kind.__qualname__} cannot be made from JSON")


def _validate(model: Any, data: bytes) -> Any:
    return model.model_validate_json(data, by_alias=True, by_name=True)


_encoder = msgspec.json.Encoder(enc_hook=_enc_hook)
_sorted = msgspec.json.Encoder(enc_hook=_enc_hook, order="sorted")
_REFUSALS = (TypeError, ValueError, NotImplementedError, RecursionError)


def encode(value: object, what: str = "value") -> bytes:
    """JSON of ``value``. Raises NotEncodable, PayloadTooLarge; ``what`` names the value in their messages."""
    try:
        if hasattr(value, "model_dump_json"):
            data = cast("str", cast("Any", value).model_dump_json(round_trip=True)).encode()
        else:
            data = _encoder.encode(value)
    except _REFUSALS as error:
        raise NotEncodable(f"{what}: {error}") from error
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(
            f"{what}: {len(data)} bytes of JSON, {MAX_PAYLOAD_BYTES} are allowed; store it elsewhere and keep a reference"
        )
    if b"null" in data:
        _refuse_not_finite(value, what)
    return data


def _refuse_not_finite(value: object, what: str) -> None:
    """NaN and infinities would become null without a word. Looked for only when there is a null at all."""
    stack: list[object] = [msgspec.to_builtins(value, enc_hook=_enc_hook, str_keys=True)]
    while stack:
        item = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                raise NotEncodable(f"{what}: {item} has no JSON form")
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)


def fingerprint(arguments: Mapping[str, object]) -> str:
    """16 hex digits of a SHA-256 over the arguments in canonical form. An argument without a JSON form counts by its type only."""
    try:
        data = _sorted.encode(arguments)
    except _REFUSALS:
        data = _sorted.encode({name: _or_type(value) for name, value in arguments.items()})
    return hashlib.sha256(data).hexdigest()[:16]


def _or_type(value: object) -> object:
    try:
        # Through plain values, because keys that are no strings cannot be sorted.
        return msgspec.Raw(_sorted.encode(msgspec.to_builtins(value, enc_hook=_enc_hook, str_keys=True)))
    except _REFUSALS:
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


class Codec(Generic[T]):
    """Decodes JSON as one type, resolved once. ``untyped``: nothing is declared, so values come back as plain JSON."""

    __slots__ = ("_decoder", "_model", "type", "untyped")

    def __init__(self, kind: Any) -> None:
        self.type = kind
        self.untyped = kind is Any or kind is object
        self._model = kind if hasattr(kind, "model_validate_json") else None
        try:
            self._decoder = msgspec.json.Decoder(Any if self.untyped or self._model else kind, dec_hook=_dec_hook)
        except (TypeError, NotImplementedError) as error:
            raise InvalidDeclaration(f"the type {kind!r} cannot be read from JSON: {error}") from error

    def decode(self, data: bytes | msgspec.Raw) -> T:
        """Raises ValueError with the place of the mismatch."""
        try:
            if self._model is not None:
                return cast("T", _validate(self._model, bytes(data)))
            return cast("T", self._decoder.decode(data))
        except (msgspec.MsgspecError, NotImplementedError, TypeError) as error:
            raise ValueError(str(error)) from error


@lru_cache(maxsize=1024)
def _cached(kind: Any) -> Codec[Any]:
    return Codec(kind)


def codec_of(kind: Any) -> Codec[Any]:
    """Raises InvalidDeclaration for a type that JSON cannot fill."""
    try:
        return _cached(kind)
    except TypeError:  # an unhashable annotation, for instance Annotated with a list in it
        return Codec(kind)


def named(kind: Any) -> str:
    """A type for people: its name, or its notation where it has parameters."""
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind).replace("typing.", "")


PLAIN: Codec[Any] = Codec(Any)
