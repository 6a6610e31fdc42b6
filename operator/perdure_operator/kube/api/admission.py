"""What the API server must know, and a schema cannot tell it: admission policies next to the definitions.

One refuses more labels or annotations than anybody reads: a schema has no say about metadata. It looks at their number only, so the largest
map costs it what the smallest does.

One refuses inputs. The input is any JSON, so its schema has no type, and rules in a schema do not see such a field. A policy does. It
measures the input as CEL prints it, without the spaces: a fraction always has six digits there, so a long list of short ones is refused a
little early. Whatever gets past it, the models refuse exactly, and the run's status says so.

An update is judged by what it changes: a finalizer can always be removed, whatever older versions have let in.

The last refuses nothing, and warns of fields that are not in force yet.
"""

from __future__ import annotations

from typing import Any

from perdure_operator.kube.api import unenforced
from perdure_operator.kube.api.agentpool import AgentPoolSpec
from perdure_operator.kube.api.agentrun import MAX_INPUT_BYTES, AgentRunSpec
from perdure_operator.kube.api.base import Model
from perdure_operator.kube.api.meta import MAX_ENTRIES
from perdure_operator.kube.names import GROUP, VERSION

# dyn: without it the policy's status complains that the one kind lacks the other's fields.
_SPEC = "has(dyn({0}).spec.runTemplate) ? dyn({0}).spec.runTemplate.spec : dyn({0}).spec"
_VARIABLES = {
    "spec": _SPEC.format("object"),
    "before": f"oldObject == null ? dyn({{}}) : ({_SPEC.format('oldObject')})",
    "given": "has(variables.spec.input)",
    "same": "has(variables.before.input) == variables.given && (!variables.given || variables.before.input == variables.spec.input)",
}
_MAPS = ("labels", "annotations")
_VALIDATIONS = {
    "request.operation == 'CREATE' || request.resource.resource != 'agentruns' || variables.same": (
        "spec.input cannot change after the run was created; create another run"
    ),
    f"!variables.given || variables.same || bytes('%s'.format([variables.spec.input]).replace(', ', ',')).size() <= {MAX_INPUT_BYTES}": (
        f"spec.input is larger than {MAX_INPUT_BYTES} bytes of JSON: pass a reference to larger data"
    ),
    "!variables.given || !has(variables.spec.inputFrom) || (variables.same && has(variables.before.inputFrom))": (
        "spec: set input or inputFrom, not both"
    ),
}


def policies() -> list[dict[str, Any]]:
    """The ValidatingAdmissionPolicies, and the bindings that make them hold."""
    refused = [{"expression": expression, "message": message} for expression, message in _VALIDATIONS.items()]
    bounded = [
        {
            "expression": f"variables.{field} <= {MAX_ENTRIES} || variables.{field} <= variables.{field}Before",
            "message": f"metadata.{field} has more than {MAX_ENTRIES} entries",
        }
        for field in _MAPS
    ]
    warned = {
        "expression": "variables.unenforced.size() == 0",
        "messageExpression": f"variables.unenforced.join(', ') + ': {unenforced.WARNING}'",
    }
    return [
        *_policy(f"metadata.{GROUP}", "Deny", ["agentruns", "triggers", "agentpools"], _counted(), bounded),
        *_policy(f"inputs.{GROUP}", "Deny", ["agentruns", "triggers"], _VARIABLES, refused),
        *_policy(f"unenforced.{GROUP}", "Warn", ["agentruns", "triggers", "agentpools"], _warned_of(), [warned]),
    ]


def _counted() -> dict[str, str]:
    count = "has({0}.metadata.{1}) ? size({0}.metadata.{1}) : 0"
    return {field: count.format("object", field) for field in _MAPS} | {
        f"{field}Before": f"oldObject == null ? 0 : ({count.format('oldObject', field)})" for field in _MAPS
    }


def _warned_of() -> dict[str, str]:
    run, pool = _set_in(AgentRunSpec), _set_in(AgentPoolSpec)
    return {"spec": _SPEC.format("object"), "unenforced": f"request.resource.resource == 'agentpools' ? {pool} : {run}"}


def _set_in(spec: type[Model]) -> str:
    """CEL: the list of those fields that the object sets."""
    return " + ".join(f"({_has('variables.spec', path)} ? ['{unenforced.dotted(path)}'] : [])" for path in unenforced.paths(spec))


def _has(node: str, path: unenforced.Path) -> str:
    name, *rest = path
    there = f"has({node}.{name})"
    match rest:
        case []:
            return there
        case ["[]", *inner]:
            return f"{there} && {node}.{name}.exists(entry, {_has('entry', tuple(inner))})"
        case _:
            return f"{there} && {_has(f'{node}.{name}', tuple(rest))}"


def _policy(
    name: str, action: str, resources: list[str], variables: dict[str, str], validations: list[dict[str, str]]
) -> list[dict[str, Any]]:
    """``action``: Deny or Warn."""
    where = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": resources,
        "scope": "Namespaced",
    }
    spec = {
        "failurePolicy": "Fail" if action == "Deny" else "Ignore",
        "matchConstraints": {"resourceRules": [where]},
        "variables": [{"name": variable, "expression": expression} for variable, expression in variables.items()],
        "validations": validations,
    }
    return [
        _document("ValidatingAdmissionPolicy", name, spec),
        _document("ValidatingAdmissionPolicyBinding", name, {"policyName": name, "validationActions": [action]}),
    ]


def _document(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
