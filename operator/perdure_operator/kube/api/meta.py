"""What every resource has besides spec and status, and types that several of them use."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from perdure_operator.kube.api.base import Distinct, DnsLabel, LabelKey, LabelValue, Model, Note, ObjectName, Rule, Short

ANY_JSON: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}

MAX_ENTRIES = 72
"""Labels, and annotations, of a resource: as many as a template may have, and room for our own."""

Names = Annotated[list[Short], Field(max_length=200), Distinct()]


class ObjectMeta(Model):
    """What people write, and what the API server adds (accepted as it comes)."""

    name: ObjectName | None = None
    generate_name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[a-z0-9]([-a-z0-9.]*)$")] | None = None
    namespace: DnsLabel | None = None
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=MAX_ENTRIES)] | None = None
    annotations: Annotated[dict[LabelKey, Note], Field(max_length=MAX_ENTRIES)] | None = None
    uid: Short | None = None
    resource_version: Short | None = None
    generation: int | None = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    finalizers: list[str] | None = None
    owner_references: list[dict[str, Any]] | None = None
    managed_fields: Any = None
    self_link: Any = None

    rules = (
        Rule(
            "has(self.name) || has(self.generateName)",
            "set name (or generateName, which makes a new object each time)",
            lambda meta: bool(meta.name or meta.generate_name),
        ),
    )
