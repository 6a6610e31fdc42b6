"""A model as a Kubernetes structural schema: no references, no ``null`` alternatives, descriptions kept.

Pydantic's JSON Schema is close; what differs is rewritten here once, for the CRDs and for the hints in error messages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from perdure_operator.kube.api.base import RULES

Schema = dict[str, Any]

_DROPPED = ("title", "additionalProperties", "patternProperties", "propertyNames", "default", "const", "$defs")


@cache
def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of ``model``. Shared between calls: do not change it."""
    root = model.model_json_schema(by_alias=True, mode="validation")
    return _rewrite(root, root.get("$defs", {}))


def _rewrite(node: Schema, defs: dict[str, Schema]) -> Schema:
    if "$ref" in node:
        return _rewrite(_merged(defs[node["$ref"].rpartition("/")[2]], node, "$ref"), defs)
    if "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
        (only,) = (branch for branch in node["anyOf"] if branch.get("type") != "null")
        return _rewrite(_merged(only, node, "anyOf"), defs)
    out = {k: v for k, v in node.items() if k not in (*_DROPPED, "properties")}
    if "const" in node:
        out["enum"] = [node["const"]]
    if isinstance(out.get("description"), str):
        out["description"] = " ".join(out["description"].replace("``", "`").split())
    if node.get("properties"):  # none at all would not be stored, and so would seem a change each time it is applied
        out["properties"] = {name: _rewrite(child, defs) for name, child in node["properties"].items()}
    if "items" in node:
        out["items"] = _rewrite(node["items"], defs)
    for values in (node.get("additionalProperties"), *node.get("patternProperties", {}).values()):
        if isinstance(values, dict):  # a structural schema cannot say what keys look like; the models check them
            out["additionalProperties"] = _rewrite(values, defs)
    if out.get("type") == "object" and "properties" not in node and "additionalProperties" not in out:
        out["x-kubernetes-preserve-unknown-fields"] = True
    if node.get("type") == "integer" and abs(node.get("maximum", 2**63)) > 2**31 - 1:
        out["format"] = "int64"
    return out


def _merged(inner: Schema, outer: Schema, without: str) -> Schema:
    """What stands at the use goes before what stands at the type; rules of both hold."""
    rules = [*inner.get(RULES, []), *outer.get(RULES, [])]
    return {**inner, **{k: v for k, v in outer.items() if k != without}, **({RULES: rules} if rules else {})}
