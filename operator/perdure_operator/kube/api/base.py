"""The base of every manifest model, and the bounded types that they are made of.

A manifest comes from a person or from the API server, so a model is a contract: unknown fields are refused, every string, list and
map has an upper bound, and values are not coerced (``maxSteps: "50"`` is an error, as on a cluster). Names are camelCase outside and
snake_case inside. The docstring below a field becomes its description in the CRD.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic.alias_generators import to_camel

GROUP = "perdure.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

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
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[LabelKey, Annotated[str, Field(max_length=65_536)]], Field(max_length=64)]
EnvName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
Key = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Short = Annotated[str, Field(min_length=1, max_length=253)]
Quantity = Annotated[str | int, PlainValidator(_quantity), WithJsonSchema(_INT_OR_STRING)]
Seconds = Annotated[int, Field(ge=0, le=315_360_000)]
PositiveSeconds = Annotated[int, Field(ge=1, le=315_360_000)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Ident = Annotated[int, Field(ge=0, le=2_147_483_647)]


def cel(*rules: tuple[str, str]) -> ConfigDict:
    """Model configuration with CEL rules for the API server: (expression, message) each."""
    validations: list[Any] = [{"rule": rule, "message": message} for rule, message in rules]
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": validations})


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

    def to_json(self) -> dict[str, Any]:
        """The manifest form: camelCase, without what was left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
