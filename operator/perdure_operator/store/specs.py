"""Specs of pools as this process has read them: the fleet asks for all pools ten times a second, and their specs hardly ever change.

The store gives a spec again when it was written after ``since``. That lies a little before the newest one known here, because a
transaction that began earlier may be committed later.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec

LATE = timedelta(seconds=30)
"""For which a transaction that writes a pool may last. It is one statement."""


class Row(Protocol):
    def __getitem__(self, column: str, /) -> Any: ...


class PoolSpecs:
    def __init__(self) -> None:
        self._known: dict[str, tuple[datetime, dict[str, Any]]] = {}

    @property
    def since(self) -> datetime | None:
        """Specs written after this are wanted again; None: all."""
        newest = max((at for at, _ in self._known.values()), default=None)
        return None if newest is None else newest - LATE

    def learn(self, rows: Iterable[Row], *, all_pools: bool) -> bool:
        """From ``pool``, ``spec`` (JSON, null: not written since) and ``updated_at``. ``all_pools``: what is not among them is gone.
        False: a spec is missing here that was not given, so that all must be read."""
        known = {} if all_pools else dict(self._known)
        complete = True
        for row in rows:
            pool, at = row["pool"], row["updated_at"]
            before = self._known.get(pool)
            if row["spec"] is not None and (before is None or before[0] <= at):
                known[pool] = at, msgspec.json.decode(row["spec"])
            elif before is not None:
                known[pool] = before
            else:
                complete = False
        self._known = known
        return complete

    def __getitem__(self, pool: str) -> dict[str, Any]:
        return self._known[pool][1]
