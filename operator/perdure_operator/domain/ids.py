"""Ids of runs and pods: UUIDv7, so that they sort by the time at which they were minted."""

from __future__ import annotations

import os
import time
from uuid import UUID


def uuid7() -> UUID:
    """RFC 9562, version 7: 48 bits of Unix milliseconds, then randomness."""
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 7 << 76
    return UUID(int=value & ~(0x3 << 62) | 2 << 62)
