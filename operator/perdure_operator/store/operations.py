"""Operations as the store takes them: validated, with keys and policies decided, payloads still raw JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Fence:
    """A worker's right to write: compared with the run's row under its lock."""

    epoch: int
    holder: UUID


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a run may write: bytes of JSON, and bytes as they are stored. None: as much as it likes."""

    raw: int | None = None
    stored: int | None = None


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class SliceWrite:
    name: str
    value: bytes
    version: int = 1
    append: bool = False


class JournalStep(Struct, frozen=True):
    """The outcome of a step: the hot path of the batch, so it is a struct, four times faster to make than a dataclass."""

    run: UUID
    fence: Fence
    request: UUID
    key: str
    name: str
    state: str
    output: bytes
    fingerprint: str | None = None
    phase: str | None = None
    attempts: int = 1
    error: str | None = None  # JSON
    slices: tuple[SliceWrite, ...] = ()


@dataclass(frozen=True, slots=True)
class Control:
    """Any other operation on one run. ``fence`` None: not a worker's. ``request`` None: naturally idempotent (settle, expire).

    ``payload_run``: whose payload it is, when not the run's own (the input of a spawned child).
    """

    run: UUID
    kind: str
    body: dict[str, Any]
    fence: Fence | None = None
    request: UUID | None = None
    payload: bytes | None = None
    payload_run: UUID | None = None
    slices: tuple[SliceWrite, ...] = field(default=())


Operation = JournalStep | Control


class Outcome(Struct, frozen=True):
    """The store's answer to one operation. ``code`` is ``ok`` or the code of a typed error (domain/errors.py).

    ``state``: the run's state after it (control only). ``leased``/``epoch``: the direct path gave the run to this pod in the same commit.
    ``nearly_full``: the run has written most of what it may, and its log does not say so yet: settle it (steps only).
    """

    code: str
    answer: dict[str, Any]
    detail: str = ""
    state: str | None = None
    leased: UUID | None = None
    epoch: int | None = None
    nearly_full: bool = False
