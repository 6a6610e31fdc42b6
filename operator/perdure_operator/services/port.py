"""What the services ask of the process they run in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from perdure_operator.store.operations import Control, Outcome


class Settle(Protocol):
    """Puts a ``settle`` operation for each run through the batch and waits for all of them. Raises nothing for single runs."""

    async def __call__(self, runs: Sequence[UUID], /) -> None: ...


class Apply(Protocol):
    """Puts one operation through the batch. Raises the typed error of a refusal."""

    async def __call__(self, operation: Control, /) -> Outcome: ...
