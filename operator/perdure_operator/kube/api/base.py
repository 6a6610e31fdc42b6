"""The base of every manifest model, and the bounded types that they are made of.

A manifest comes from a person or from the API server, so a model is a contract: unknown fields are refused, every string, list and
map has an upper bound, and values are not coerced (``maxSteps: "50"`` is an error, as on a cluster). Names are camelCase outside and
snake_case inside. The docstring below a field becomes its description in the CRD. A :class:`Rule` holds here and in the API server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_OBJECT = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
_QUANTITY = r"^[+-]?[0-9]{1,18}(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,2}|[numkKMGTPE]i?)?$"
FORMS = {
    _LABEL: "only lower-case letters, digits and '-', with a letter or digit at both ends",
    _OBJECT: "only lower-case letters, digits, '-' and '.', with a letter or digit at both ends",
    _LABEL_KEY: "letters, digits, '-', '_' and '.', optionally after a domain and a '/'",
    _LABEL_VALUE: "letters, digits, '-', '_' and '.', with a letter or digit at both ends",
}
"""Patterns in words, for error messages."""


def _quantity(value: object) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        quotes = ": put it in quotes" if isinstance(value, float) else ""
        raise ValueError(f"must be a quantity such as 2, '500m' or '1Gi', got {value!r}{quotes}")
    if isinstance(value, str) and not re.fullmatch(_QUANTITY, value):
        raise ValueError(f"{value!r} is not a quantity such as 2, '500m' or '1Gi'")
    return value


_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}], "pattern": _QUANTITY, "x-kubernetes-int-or-string": True}

DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=_LABEL)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=_OBJECT)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=_LABEL_VALUE)]
Note = Annotated[str, Field(max_length=65_536)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[LabelKey, Note], Field(max_length=64)]
EnvName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
Key = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Short = Annotated[str, Field(min_length=1, max_length=253)]
Quantity = Annotated[str | int, PlainValidator(_quantity), WithJsonSchema(_INT_OR_STRING)]
Seconds = Annotated[int, Field(ge=0, le=315_360_000)]
PositiveSeconds = Annotated[int, Field(ge=1, le=315_360_000)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Ident = Annotated[int, Field(ge=0, le=2_147_483_647)]


T = TypeVar("T")
RULES = "x-kubernetes-validations"


@dataclass(frozen=True)
class Rule:
    """One rule in two tongues, with one message: CEL for the API server, Python for files and for the public API.

    Annotates a field, or stands in :attr:`Model.rules`. The two must agree: tests/contract asks the API server, tests/unit the models.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**(found := handler(schema)), RULES: [*found.get(RULES, []), self.to_schema()]}

    def check(self, value: T) -> T:
        if not self.holds(value):
            raise ValueError(self.message)
        return value

    def to_schema(self) -> dict[str, Any]:
        return {"rule": self.cel, "message": self.message}


def exactly_one(*fields: str) -> Rule:
    """Of these fields (by their Python names) one is set."""
    names = [to_camel(field) for field in fields]
    if len(names) == 2:
        expression = f"has(self.{names[0]}) != has(self.{names[1]})"
    else:
        expression = f"[{', '.join(f'has(self.{name})' for name in names)}].exists_one(given, given)"
    return Rule(
        expression,
        f"set exactly one of {', '.join(names)}",
        lambda model: sum(getattr(model, field) is not None for field in fields) == 1,
    )


def at_most_one(first: str, second: str) -> Rule:
    one, other = to_camel(first), to_camel(second)
    return Rule(
        f"!(has(self.{one}) && has(self.{other}))",
        f"set {one} or {other}, not both",
        lambda model: getattr(model, first) is None or getattr(model, second) is None,
    )


@dataclass(frozen=True)
class Distinct:
    """A list whose entries differ in ``keys`` (their names in JSON), or altogether. The API server merges such a list entry by entry."""

    keys: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        merge = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(self.keys)} if self.keys else None
        return {**handler(schema), **(merge or {"x-kubernetes-list-type": "set"})}

    def check(self, entries: list[Any]) -> list[Any]:
        seen = set()
        for entry in entries:
            identity = tuple(entry.to_json()[key] for key in self.keys) if self.keys else entry
            if identity in seen:
                shown = ", ".join(map(str, identity)) if isinstance(identity, tuple) else identity
                raise ValueError(f"{shown} stands in it twice")
            seen.add(identity)
        return entries


class Model(BaseModel):
    """A frozen, strict piece of a manifest."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        strict=True,
        frozen=True,
        defer_build=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """What the fields must be to one another."""

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> dict[str, Any]:
        found = handler(schema)
        if cls.rules:
            handler.resolve_ref_schema(found)[RULES] = [rule.to_schema() for rule in cls.rules]
        return found

    def to_json(self) -> dict[str, Any]:
        """The manifest form: camelCase, without what was left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
