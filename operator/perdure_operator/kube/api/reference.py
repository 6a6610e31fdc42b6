"""docs/manifests.md: every field of a spec, as the API server has it. `kubectl explain` says the same, field by field.

Where a spec holds a piece that has a section of its own (a pod template, a run's spec), its fields are told there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from perdure_operator.kube.api.base import Model
from perdure_operator.kube.api.crd import DEFINITIONS, Definition
from perdure_operator.kube.api.podtemplate import PodTemplate
from perdure_operator.kube.api.schema import Schema, structural
from perdure_operator.kube.names import API_VERSION

_TEMPLATE = "Pod template"
_ELSEWHERE = {"template": _TEMPLATE, "runTemplate.spec": "AgentRun"}
"""Fields, by the end of their path, and the section that tells what is in them."""

_AS_IN_KUBERNETES = ("affinity", "topologySpreadConstraints")
_UNBOUNDED = 10**8
"""A higher upper bound is there to have one, and tells nobody anything."""

_HEAD = f"""\
<!-- Written by `make generate` from operator/perdure_operator/kube/api; do not edit. -->
# Fields of the manifests

`apiVersion: {API_VERSION}`. A field that is not here is refused. A required one is bold; all others may be left out. `[]` stands for each
entry of a list, `.*` for each value of a map. `kubectl explain agentrun.spec` and its like tell the same, and what is in a status.
Whole manifests: [examples/report](../examples/report/), [examples/shell](../examples/shell/), [Triggers](triggers.md).
"""


def to_markdown() -> str:
    sections = [_HEAD, *(section for definition in DEFINITIONS for section in _kind(definition)), *_section(_TEMPLATE, PodTemplate)]
    return "\n".join(sections)


def _kind(definition: Definition) -> Iterator[str]:
    about = f"{definition.model.__doc__}\n\nShort: `{definition.short}`."
    yield from _section(definition.kind, definition.model, about, "spec")


def _section(title: str, model: type[Model], about: str = "", part: str = "") -> Iterator[str]:
    schema = structural(model)
    yield f"## {title}\n{about or schema['description']}\n"
    yield "| field | type | |\n|---|---|---|"
    piece = schema["properties"][part] if part else schema
    yield from _rows(piece, part)
    yield ""


def _rows(schema: Schema, path: str) -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        shown = f"**`{here}`**" if name in schema.get("required", ()) else f"`{here}`"
        told = _told_elsewhere(name, here)
        yield f"| {shown} | {_type(child)} | {_cell(child['description'])}{told} |"
        if not told:
            yield from _rows(child, here)
    if "items" in schema:
        yield from _rows(schema["items"], f"{path}[]")
    if isinstance(values := schema.get("additionalProperties"), dict):
        yield from _rows(values, f"{path}.*")


def _told_elsewhere(name: str, path: str) -> str:
    if name in _AS_IN_KUBERNETES:
        return " Its fields are those of Kubernetes."
    section = next((section for end, section in _ELSEWHERE.items() if path.endswith(f".{end}")), None)
    return f" See [{section}](#{section.lower().replace(' ', '-')})." if section else ""


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return _cell(" or ".join(f"`{value if value and isinstance(value, str) else json.dumps(value)}`" for value in schema["enum"]))
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    match schema.get("type"):
        case "array":
            return f"list of {_plural(schema['items'])}{_bounds(schema, 'Items', 'entries')}"
        case "object" if isinstance(values := schema.get("additionalProperties"), dict):
            return f"map to {_plural(values)}{_bounds(schema, 'Properties', 'entries')}"
        case "string":
            return f"string{_bounds(schema, 'Length', 'characters')}"
        case "integer":
            low, high = schema["minimum"], schema["maximum"]
            return f"integer, {low} to {high}" if high < _UNBOUNDED else f"integer, at least {low}"
        case None:
            return "any JSON"
        case other:
            return str(other)


def _plural(schema: Schema) -> str:
    kind = schema.get("type")
    return f"{kind}s" if kind and "enum" not in schema else _type(schema)


def _bounds(schema: Schema, of: str, unit: str) -> str:
    return f", up to {high} {unit}" if (high := schema.get(f"max{of}")) is not None else ""


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;")
