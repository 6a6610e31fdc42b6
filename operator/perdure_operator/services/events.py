"""Kubernetes events: the story that ``kubectl describe`` tells.

An event's name is made of its object, its mark and its reason, so that one that is written again after a crash is the same one. One that
cannot be written is let go: nothing hangs on it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

import structlog

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.client import EVENTS, KubeApi
from perdure_operator.kube.errors import KubeConflict
from perdure_operator.kube.names import API_VERSION, FIELD_MANAGER
from perdure_operator.services.conditions import rfc3339

log = structlog.get_logger(__name__)

Json = dict[str, Any]

MAX_MESSAGE = 1000


class Event(NamedTuple):
    """``type``: Normal or Warning. ``reason``: one word in CamelCase."""

    type: str
    reason: str
    message: str


class Events:
    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube

    async def tell(self, about: Json, mark: str, event: Event) -> None:
        """``about``: an involvedObject. ``mark``: tells this event from others of the same reason about the same object."""
        at = rfc3339(datetime.now(UTC))
        body = {
            "apiVersion": "v1", "kind": "Event", "type": event.type, "reason": event.reason, "message": event.message[:MAX_MESSAGE],
            "count": 1, "involvedObject": {"apiVersion": API_VERSION, **about},
            "metadata": {
                "name": f"{about['name'][:180]}.{about['uid'][:8]}.{mark}.{event.reason.lower()}", "namespace": about["namespace"],
            },
            "source": {"component": "perdure"}, "reportingComponent": FIELD_MANAGER, "firstTimestamp": at, "lastTimestamp": at,
        }  # fmt: skip
        try:
            await self._kube.create(EVENTS, about["namespace"], body)
        except KubeConflict:
            pass  # it was told before
        except PerdureError as error:
            log.info("an event could not be written", name=f"{about['namespace']}/{about['name']}", reason=event.reason, error=str(error))


def about(kind: str, resource: Json) -> Json:
    """The involvedObject of events about this resource."""
    meta = resource["metadata"]
    return {"kind": kind, **{key: meta[key] for key in ("namespace", "name", "uid", "resourceVersion")}}
