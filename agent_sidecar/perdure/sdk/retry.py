"""How often a step is tried again inside one attempt of its run, and how long it waits in between (E10)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from perdure.sdk import declared
from perdure.sdk.errors import InvalidDeclaration, NotEncodable, PayloadTooLarge, PerdureError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``retries``: further tries after the first. Pause before the n-th further try: ``backoff * 2**(n-1)`` seconds, at most
    ``max_backoff``, times 0.5 to 1 at random."""

    retries: int = 0
    backoff: float = 0.5
    max_backoff: float = 60.0
    non_retryable: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        declared.count(self.retries, "retries")
        declared.exceptions(self.non_retryable, "non_retryable")
        if self.backoff < 0 or self.max_backoff < 0:
            raise InvalidDeclaration("backoff and max_backoff may not be negative")

    def helps(self, error: Exception) -> bool:
        """Whether another try could end otherwise."""
        if isinstance(error, (*self.non_retryable, NotEncodable, PayloadTooLarge)):
            return False
        return error.retryable if isinstance(error, PerdureError) else True

    def pause(self, tries: int) -> float:
        """Seconds to wait after ``tries`` failed tries."""
        return min(self.max_backoff, self.backoff * 2.0 ** min(tries - 1, 30)) * random.uniform(0.5, 1.0)
