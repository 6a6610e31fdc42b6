"""What the harness says while it works: on standard error, so that ``exec`` leaves its command's output alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

WORTH_MENTIONING = 2.0  # seconds


def say(text: str) -> None:
    print(f"» {text}", file=sys.stderr, flush=True)


@contextmanager
def doing(text: str) -> Iterator[None]:
    """Says what begins, and how long it took if anybody could have wondered."""
    say(text)
    start = time.monotonic()
    yield
    if (took := time.monotonic() - start) > WORTH_MENTIONING:
        say(f"  done in {took:.0f} s")
