"""What is wrong with a manifest, in words that say what to write instead.

``explain`` turns pydantic's findings into :class:`Problem` rows with the path as it stands in the manifest; ``check_json`` finds what no
schema can say (values that the store cannot hold). Whoever read the document adds the file and the line.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.api.base import FORMS
from perdure_operator.kube.api.schema import Schema, structural

MAX_DEPTH = 100
MAX_PROBLEMS = 10

Loc = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing to correct. ``loc`` is the way to it: keys and list indexes."""

    loc: Loc
    message: str

    @property
    def path(self) -> str:
        parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.loc)
        return "".join(parts).lstrip(".")

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.loc else self.message


class InvalidManifest(PerdureError):
    """The manifest does not describe a resource."""

    code, status = "invalid-manifest", 400
    action = "Correct the fields named above; nothing was changed."

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def check_json(value: object, loc: Loc = ()) -> list[Problem]:
    """Values that JSON or the store cannot hold: NUL, lone surrogates, NaN, keys that are no text, too deep nesting."""
    return list(_walk(value, loc))


def _walk(value: object, loc: Loc) -> Iterator[Problem]:
    if len(loc) > MAX_DEPTH:
        yield Problem(loc[:6], f"is nested deeper than {MAX_DEPTH} levels")
    elif isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                yield Problem((*loc, str(key)), f"keys must be text, got {key!r}: put it in quotes")
            elif fault := _fault(key):
                yield Problem(loc, f"has a key that {fault}")
            else:
                yield from _walk(child, (*loc, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _walk(child, (*loc, index))
    elif isinstance(value, str):
        if fault := _fault(value):
            yield Problem(loc, fault)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield Problem(loc, f"{value} is not a number that JSON knows")
    elif not isinstance(value, bool | int | None):
        yield Problem(loc, f"a {type(value).__name__} is not JSON: put it in quotes")


def _fault(text: str) -> str | None:
    if "\0" in text:
        return "contains a NUL character, which cannot be stored"
    if any("\ud800" <= c <= "\udfff" for c in text):
        return "contains half a surrogate pair, which is not text"
    return None


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Pydantic's findings about a document for ``model``, in the order of the document."""
    schema = structural(model)
    return [_problem(found, schema) for found in error.errors(include_url=False)]


def in_words(error: ValidationError, model: type[BaseModel], *, under: Loc = ()) -> str:
    """All of it in one text, for an answer that has room for one. ``under``: where the model stands in what was sent."""
    found = [Problem((*under, *problem.loc), problem.message) for problem in explain(error, model)]
    more = f" (and {len(found) - MAX_PROBLEMS} more)" if len(found) > MAX_PROBLEMS else ""
    return "; ".join(map(str, found[:MAX_PROBLEMS])) + more


_WORDS = {
    "missing": "is required",
    "literal_error": "must be {expected}, got {got}",
    "string_type": "must be text, got {got}",
    "int_type": "must be a whole number, got {got}",
    "int_from_float": "must be a whole number, got {got}",
    "bool_type": "must be true or false, got {got}",
    "list_type": "must be a list, got {got}",
    "dict_type": "must be a mapping, got {got}",
    "model_type": "must be a mapping, got {got}",
    "model_attributes_type": "must be a mapping, got {got}",
    "string_pattern_mismatch": "{got} is not allowed: {form}",
    "string_too_long": "is {length} characters long; at most {max_length} are allowed",
    "string_too_short": "must not be empty",
    "too_long": "has {actual_length} entries; at most {max_length} are allowed",
    "too_short": "needs at least {min_length} entries",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "less_than_equal": "must be at most {le}, got {got}",
    "value_error": "{error}",
}


def _problem(found: Any, schema: Schema) -> Problem:
    kind, context, value = found["type"], found.get("ctx", {}), found.get("input")
    loc: Loc = tuple(part for part in found["loc"] if part != "[key]")
    if kind == "extra_forbidden":
        return Problem(loc, _unknown(str(loc[-1]), _at(schema, loc[:-1])))
    if kind not in _WORDS:
        return Problem(loc, found["msg"])
    pattern = context.get("pattern", "")
    words = {"got": _show(value), "length": len(str(value)), "form": FORMS.get(pattern, f"it must match {pattern}"), **context}
    quotes = ": put it in quotes" if kind == "string_type" and isinstance(value, bool | int | float) else ""
    return Problem(loc, _WORDS[kind].format(**words) + quotes)


def _show(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _unknown(name: str, at: Schema) -> str:
    allowed = sorted(at.get("properties", {}))
    deeper = {field: parent for parent, child in at.get("properties", {}).items() for field in child.get("properties", {})}
    plain = {field.lower(): f"{parent}.{field}" for field, parent in deeper.items()} | {field.lower(): field for field in allowed}
    if close := difflib.get_close_matches(name.replace("_", "").lower(), plain, n=1, cutoff=0.7):
        return f"unknown field; did you mean {plain[close[0]]}?"
    return f"unknown field; allowed here: {', '.join(allowed)}"


def _at(schema: Schema, loc: Loc) -> Schema:
    """The schema of the value at ``loc``."""
    for part in loc:
        named = schema.get("properties", {}).get(part) or schema.get("additionalProperties")
        child = schema.get("items") if isinstance(part, int) else named
        if not isinstance(child, dict):
            return {}
        schema = child
    return schema
