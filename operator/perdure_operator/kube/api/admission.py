"""What the API server must know of a run's input, and a schema cannot tell it: an admission policy next to the definitions.

The input is any JSON, so its schema has no type, and rules in a schema do not see such a field. A policy does. It measures the input as CEL
prints it, without the spaces: a fraction always has six digits there, so a long list of short ones is refused a little early. Whatever gets
past it, the models refuse exactly, and the run's status says so.

An update is judged by what it changes: a finalizer can always be removed, whatever older versions have let in.
"""

from __future__ import annotations

from typing import Any

from perdure_operator.kube.api.agentrun import MAX_INPUT_BYTES
from perdure_operator.kube.api.base import GROUP, VERSION

NAME = f"inputs.{GROUP}"

# dyn: without it the policy's status complains that the one kind lacks the other's fields.
_SPEC = "has(dyn({0}).spec.runTemplate) ? dyn({0}).spec.runTemplate.spec : dyn({0}).spec"
_VARIABLES = {
    "spec": _SPEC.format("object"),
    "before": f"oldObject == null ? dyn({{}}) : ({_SPEC.format('oldObject')})",
    "given": "has(variables.spec.input)",
    "same": "has(variables.before.input) == variables.given && (!variables.given || variables.before.input == variables.spec.input)",
}
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


def policy() -> list[dict[str, Any]]:
    """The ValidatingAdmissionPolicy, and the binding that makes it hold."""
    where = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["agentruns", "triggers"],
        "scope": "Namespaced",
    }
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [where]},
        "variables": [{"name": name, "expression": expression} for name, expression in _VARIABLES.items()],
        "validations": [{"expression": expression, "message": message} for expression, message in _VALIDATIONS.items()],
    }
    return [
        _document("ValidatingAdmissionPolicy", spec),
        _document("ValidatingAdmissionPolicyBinding", {"policyName": NAME, "validationActions": ["Deny"]}),
    ]


def _document(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": NAME}, "spec": spec}
