"""Run, pod and request ids as the driver has them: its UUID is a ``uuid.UUID`` made in C, four times cheaper to make and twice to send."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from asyncpg.pgproto import pgproto

parse_uuid: Callable[[str], UUID] = pgproto.UUID
"""Raises ValueError."""
