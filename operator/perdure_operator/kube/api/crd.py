"""The custom resource definitions, made from the models: names, scope, columns, fields that can be selected.

``kubectl explain`` shows the models' descriptions; :mod:`files` writes the manifests.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from perdure_operator.kube.api.agentpool import AgentPool
from perdure_operator.kube.api.agentrun import AgentRun
from perdure_operator.kube.api.base import RULES, Model
from perdure_operator.kube.api.schema import structural
from perdure_operator.kube.api.trigger import MAX_NAME, Trigger
from perdure_operator.kube.names import GROUP, VERSION

CATEGORY = "perdure"
UNSEEN = -1
"""The generation that the status of a new resource is about: none."""
WIDE = 1
"""The priority of a column that only ``-o wide`` shows."""


@dataclass(frozen=True)
class Column:
    """A column of ``kubectl get``. ``type``: string, integer, boolean, date."""

    name: str
    path: str
    type: str = "string"
    priority: int = 0

    def to_json(self) -> dict[str, Any]:
        shown = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return {**shown, "priority": self.priority} if self.priority else shown


AGE = Column("Age", ".metadata.creationTimestamp", "date")
READY = Column("Ready", '.status.conditions[?(@.type=="Ready")].status')


@dataclass(frozen=True)
class Definition:
    model: type[Model]
    plural: str
    short: str
    columns: tuple[Column, ...]
    selectable: tuple[str, ...] = ()
    rules: tuple[dict[str, str], ...] = ()

    @property
    def kind(self) -> str:
        return self.model.__name__

    def to_json(self) -> dict[str, Any]:
        """The CustomResourceDefinition."""
        version: dict[str, Any] = {
            "name": VERSION,
            "served": True,
            "storage": True,
            "subresources": {"status": {}},
            "additionalPrinterColumns": [column.to_json() for column in self.columns],
        }
        if self.selectable:
            version["selectableFields"] = [{"jsonPath": path} for path in self.selectable]
        singular = self.kind.lower()
        names = {"kind": self.kind, "listKind": f"{self.kind}List", "plural": self.plural, "singular": singular}
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "names": {**names, "shortNames": [self.short], "categories": [CATEGORY]},
                "scope": "Namespaced",
                "versions": [{**version, "schema": {"openAPIV3Schema": self._schema()}}],
            },
        }

    def _schema(self) -> dict[str, Any]:
        schema = copy.deepcopy(structural(self.model))
        schema["required"] = ["spec"]
        # The API server's own business: it has the schemas of these, and lets nobody say more than a type.
        schema["properties"] |= {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": self.kind},
            "metadata": {"type": "object"},
        }
        # Tools that wait for resources take one that says nothing for well, although nobody has looked at it yet.
        schema["properties"]["status"]["default"] = {"observedGeneration": UNSEEN}
        return schema | ({RULES: list(self.rules)} if self.rules else {})


DEFINITIONS = (
    Definition(
        AgentRun,
        "agentruns",
        "arun",
        (
            Column("Phase", ".status.phase"),
            Column("Waiting-For", ".status.waitReason"),
            Column("Progress", ".status.progress.done", "integer"),
            Column("Attempt", ".status.attempt", "integer"),
            AGE,
            Column("Pod", ".status.podName", priority=WIDE),
            Column("Revision", ".status.revision", priority=WIDE),
            Column("Parent", ".status.parentRef.name", priority=WIDE),
            Column("Cost", ".status.usage.cost", priority=WIDE),
            Column("Summary", ".spec.summary", priority=WIDE),
        ),
        selectable=(".spec.agent.poolRef.name", ".status.phase", ".status.parentRef.name", ".status.waitReason"),
    ),
    Definition(
        AgentPool,
        "agentpools",
        "apool",
        (
            READY,
            Column("Idle", ".status.idle", "integer"),
            Column("Starting", ".status.starting", "integer"),
            Column("Leased", ".status.leased", "integer"),
            Column("Runnable", ".status.runnable", "integer"),
            AGE,
            Column("Min-Idle", ".spec.capacity.minIdle", "integer", WIDE),
            Column("Max-Pods", ".spec.capacity.maxPods", "integer", WIDE),
            Column("Reuse", ".spec.podReuse.mode", priority=WIDE),
            Column("Revision", ".status.revision", priority=WIDE),
        ),
    ),
    Definition(
        Trigger,
        "triggers",
        "atrg",
        (
            READY,
            Column("Schedule", ".spec.source.schedule.cron"),
            Column("Suspend", ".spec.suspend", "boolean"),
            Column("Active", ".status.active", "integer"),
            Column("Last", ".status.lastDelivery.at", "date"),
            # A date would be shown as an age, and this one is to come.
            Column("Next", ".status.nextScheduleTime"),
            AGE,
            Column("Time-Zone", ".spec.source.schedule.timeZone", priority=WIDE),
            Column("Concurrency", ".spec.concurrencyPolicy", priority=WIDE),
            Column("Pending", ".status.pending", "integer", WIDE),
            Column("Dead", ".status.dead", "integer", WIDE),
            Column("URL", ".status.url", priority=WIDE),
        ),
        rules=(
            {
                "rule": f"size(self.metadata.name) <= {MAX_NAME}",
                "message": f"the name is longer than {MAX_NAME} characters; the names of its runs begin with it",
            },
        ),
    ),
)
