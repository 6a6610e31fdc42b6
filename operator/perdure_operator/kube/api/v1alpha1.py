"""The custom resources of Perdure, ``perdure.dev/v1alpha1``: what a person writes to have a run.

The same models read manifests from files, objects from the API server and bodies of the public API, and the CRDs are generated from
them (:mod:`crd`). A field that was left out stays ``None`` here: an AgentPool's ``runDefaults`` come before the defaults that the
field descriptions name, and ``runLimits`` cap them, when the run is stored.
"""

from __future__ import annotations

import hashlib
import json
import re

from pydantic import ValidationError

from perdure_operator.kube.api.agentpool import AgentPool, AgentPoolSpec, Capacity, RunDefaults, Tool
from perdure_operator.kube.api.agentrun import MAX_INPUT_BYTES, AgentRef, AgentRun, AgentRunSpec, Budgets, PoolRef, Retry
from perdure_operator.kube.api.meta import ObjectMeta
from perdure_operator.kube.api.podtemplate import PodTemplate
from perdure_operator.kube.api.problems import InvalidManifest, Problem, check_json, explain
from perdure_operator.kube.api.trigger import Trigger, TriggerSpec
from perdure_operator.kube.names import API_VERSION

__all__ = [
    "KINDS",
    "MAX_INPUT_BYTES",
    "AgentPool",
    "AgentPoolSpec",
    "AgentRef",
    "AgentRun",
    "AgentRunSpec",
    "Budgets",
    "Capacity",
    "Manifest",
    "ObjectMeta",
    "PoolRef",
    "Retry",
    "RunDefaults",
    "Tool",
    "Trigger",
    "TriggerSpec",
    "implicit_pool",
    "is_implicit",
    "parse_manifest",
]

Manifest = AgentRun | AgentPool | Trigger
_IMPLICIT = re.compile(r"inline-[0-9a-f]{16}")
KINDS: dict[str, type[AgentRun | AgentPool | Trigger]] = {"AgentRun": AgentRun, "AgentPool": AgentPool, "Trigger": Trigger}


def parse_manifest(document: object) -> Manifest:
    """The typed resource of one decoded YAML or JSON document. Raises :class:`InvalidManifest` with every problem found."""
    if not isinstance(document, dict):
        raise InvalidManifest([Problem((), f"must be a mapping with apiVersion, kind, metadata and spec, not {type(document).__name__}")])
    problems = []
    if document.get("apiVersion") != API_VERSION:
        problems.append(Problem(("apiVersion",), f"must be {API_VERSION!r}, got {document.get('apiVersion')!r}"))
    model = KINDS.get(kind) if isinstance(kind := document.get("kind"), str) else None
    if model is None:
        problems.append(Problem(("kind",), f"must be one of {', '.join(KINDS)}, got {kind!r}"))
    problems += check_json(document)
    if problems or model is None:
        raise InvalidManifest(problems)
    try:
        return model.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidManifest(explain(error, model)) from None


def implicit_pool(template: PodTemplate) -> tuple[str, AgentPoolSpec]:
    """Name and spec of the pool that a run with an inline template belongs to: the same template is the same pool."""
    canonical = json.dumps(template.to_json(), sort_keys=True, separators=(",", ":"))
    name = f"inline-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"
    return name, AgentPoolSpec(template=template, capacity=Capacity(min_idle=0, max_idle=0))


def is_implicit(pool: str) -> bool:
    """Whether a pool of this name comes from inline templates, and has no resource. Told by the name: another version may write the same
    template in other words, and so under another name."""
    return _IMPLICIT.fullmatch(pool) is not None
