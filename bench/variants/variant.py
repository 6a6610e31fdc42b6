"""What the rounds ask of a variant."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bench.samples import Sample
from bench.stage import Gateway, Stage

OUTPUT = b'{"text":"' + b"x" * 189 + b'"}'
"""200 bytes of JSON: the result of every step, and the row of every bare commit."""


class Variant:
    """``name`` is the key in the results. ``what`` says in the table what one operation is."""

    name: str
    what: str

    async def prepare(self, stage: Stage) -> None:
        """Once, before all rounds."""

    async def close(self) -> None:
        """Once, after all rounds, also when ``prepare`` failed."""


class AtPostgres(Variant, ABC):
    """Needs no gateway, and none runs while it is sampled."""

    @abstractmethod
    async def sample(self, stage: Stage, seconds: float) -> Sample: ...


class AtGateway(Variant, ABC):
    """Sampled at the gateway process that the round has started on the database ``perdure``."""

    @abstractmethod
    async def sample(self, stage: Stage, gateway: Gateway, seconds: float) -> Sample: ...
