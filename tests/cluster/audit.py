"""The API server's audit log: who asked for what, when it was answered, and how. One JSON object a line, one line a finished request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

WRITES = frozenset({"create", "update", "patch", "delete"})


@dataclass(frozen=True)
class Request:
    """``what``: the resource, with its subresource if that was meant. ``code``: of the answer. Times in seconds of the clock."""

    who: str
    verb: str
    what: str
    namespace: str
    name: str
    code: int
    received: float
    answered: float


class AuditLog:
    def __init__(self, file: Path) -> None:
        self._file = file

    def requests(self, namespace: str) -> Iterator[Request]:
        """Those that were answered, oldest first."""
        for line in self._file.read_text().splitlines():
            entry = json.loads(line)
            meant = entry.get("objectRef") or {}
            if entry["stage"] != "ResponseComplete" or meant.get("namespace") != namespace:
                continue
            what = f"{meant['resource']}/{meant['subresource']}" if meant.get("subresource") else meant["resource"]
            yield Request(
                entry["user"]["username"],
                entry["verb"],
                what,
                namespace,
                meant.get("name", ""),
                (entry.get("responseStatus") or {}).get("code", 0),
                _seconds(entry["requestReceivedTimestamp"]),
                _seconds(entry["stageTimestamp"]),
            )

    def writes(self, namespace: str, *, by: str, names: tuple[str, ...]) -> Counter[str]:
        """``verb what`` of the requests of users whose name begins so, about objects whose name begins with one of these."""
        return Counter(
            f"{request.verb} {request.what}"
            for request in self.requests(namespace)
            if request.verb in WRITES and request.who.startswith(by) and request.name.startswith(names)
        )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
