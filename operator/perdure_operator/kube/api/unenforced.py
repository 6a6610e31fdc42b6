"""Fields that a manifest may have and that nothing acts on yet. They are recorded with the run, so that the day they come into force is no
migration; until then nobody may rely on them without knowing.

A field is one of these if its description ends with :data:`SENTENCE`. Who sets one is told: by `kubectl explain`, by a warning of the API
server (:mod:`admission`), by `perdure dev` and `submit`, and in docs/manifests.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from perdure_operator.kube.api.base import Model
from perdure_operator.kube.api.schema import Schema, structural

WARNING = "recorded, not in force yet"
SENTENCE = f"{WARNING.capitalize()}."

Path = tuple[str, ...]
"""Names of fields from the spec down; ``[]`` after a list stands for each of its entries."""


@cache
def paths(spec: type[Model]) -> tuple[Path, ...]:
    """Where in such a spec these fields are."""
    return tuple(_paths(structural(spec)))


def _paths(schema: Schema) -> Iterator[Path]:
    for name, child in schema.get("properties", {}).items():
        if child.get("description", "").endswith(SENTENCE):
            yield (name,)
        else:
            yield from ((name, *rest) for rest in _paths(child))
    if "items" in schema:
        yield from (("[]", *rest) for rest in _paths(schema["items"]))


def dotted(path: Path) -> str:
    return ".".join(("spec", *path)).replace(".[]", "[]")


def given(spec: Model) -> list[str]:
    """Those that this spec sets, such as ``spec.budgets.maxSteps``."""
    document = spec.to_json()
    return [dotted(path) for path in paths(type(spec)) if _is_set(document, path)]


def _is_set(node: Any, path: Path) -> bool:
    if not path:
        return True
    if path[0] == "[]":
        return any(_is_set(entry, path[1:]) for entry in node)
    return path[0] in node and _is_set(node[path[0]], path[1:])
