"""The answers of the public API as the commands read them. Tolerant: fields that a newer gateway adds are ignored."""

from __future__ import annotations

import json
from typing import Any

import msgspec

TERMINAL = frozenset({"Succeeded", "Failed", "Cancelled"})


class View(msgspec.Struct, rename="camel", frozen=True):
    """Base of the answers."""


class ErrorView(View, frozen=True):
    type: str = ""
    message: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class CallView(View, frozen=True):
    """A call of which nobody knows whether it happened."""

    key: str
    tool: str
    effect: str = ""
    step: str | None = None
    attempts: int = 1
    error: ErrorView | None = None
    arguments: Any = None

    def __str__(self) -> str:
        given = self.arguments if isinstance(self.arguments, dict) else {}
        return f"{self.tool}({', '.join(f'{name}={json.dumps(value, ensure_ascii=False)}' for name, value in given.items())})"


class RefusedView(View, frozen=True):
    """What came and was no ``expected``."""

    expected: str = ""
    reason: str = ""


class WaitingFor(View, frozen=True):
    """``tool``: the signal is a person's answer about a call of this tool; ``call``: which one. ``refused``: one came, of no use."""

    kind: str
    name: str = ""
    at: str | None = None
    timeout_at: str | None = None
    since: str | None = None
    refused: RefusedView | None = None
    key: str = ""
    tool: str = ""
    call: CallView | None = None

    def __str__(self) -> str:
        return f"decision about {self.tool}" if self.tool else f"{self.kind.replace('_', ' ')} {self.name}".strip()


class Children(View, frozen=True):
    active: int = 0
    succeeded: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.active + self.ended

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed


class RunView(View, frozen=True):
    run_id: str
    namespace: str
    name: str
    pool: str = ""
    state: str = ""
    reason: str = ""
    message: str = ""
    epoch: int = 0
    attempt: int = 0
    summary: str = ""
    objective: str = ""
    parent: str | None = None
    root: str | None = None
    pod_id: str | None = None
    created_at: str | None = None
    started_at: str | None = None
    finished_at: str | None = None
    waiting_for: list[WaitingFor] | None = None
    input: Any = None
    result: Any = None
    error: ErrorView | None = None
    last_seq: int = 0
    cancel_requested: bool = False
    paused: bool = False
    labels: dict[str, str] | None = None
    children: Children = Children()
    steps: int = 0
    progress: Any = None
    usage: dict[str, Any] | None = None

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def parked(self) -> bool:
        """Given up until a person resumes it."""
        return self.state == "Suspended" and self.reason == "LossesExhausted"

    @property
    def phase(self) -> str:
        """The state, and what a person did to it."""
        if self.terminal:
            return self.state
        return "Cancelling" if self.cancel_requested else "Paused" if self.paused and self.state == "Suspended" else self.state


class EventView(View, frozen=True):
    seq: int
    at: str
    kind: str
    epoch: int = 0
    data: Any = None
    payload: Any = None


class TroubleView(View, frozen=True):
    """Why pods of a pool fail. ``last_words``: the end of the log of the last one, where it is at hand."""

    reason: str = ""
    message: str = ""
    last_words: list[str] = []
    failures: int = 0
    next_try: str | None = None


class SizeView(View, frozen=True):
    """What a run has written that comes near to what it may write. None: no limit."""

    bytes: int = 0
    max_bytes: int | None = None
    stored_bytes: int = 0
    max_stored_bytes: int | None = None


class WhyView(View, frozen=True):
    state: str
    reason: str = ""
    message: str = ""
    since: str | None = None
    paused_by: list[str] = []
    pool_trouble: TroubleView | None = None
    waiting_for: list[WaitingFor] = []
    size: SizeView | None = None


class LedgerView(View, frozen=True):
    key: str
    tool: str
    effect: str = ""
    state: str = ""
    occurrence: int = 0
    attempts: int = 0
    step: str | None = None
    provider_ref: str | None = None
    response: Any = msgspec.UNSET
    policy: str = ""
    error: ErrorView | None = None

    @property
    def receipt(self) -> str:
        """What the call returned, empty if there is none."""
        if self.state != "SUCCEEDED":
            return ""
        return "(large)" if self.response is msgspec.UNSET else json.dumps(self.response, ensure_ascii=False)


class JournalView(View, frozen=True):
    key: str
    kind: str
    name: str = ""
    state: str = ""
    seq: int = 0
    attempts: int = 0
    error: ErrorView | None = None


class DeliveryView(msgspec.Struct, frozen=True):
    """A firing of a trigger. The names of its fields are the store's."""

    delivery_id: str
    dedup_key: str = ""
    source: str = ""
    state: str = ""
    fire_at: str | None = None
    attempts: int = 0
    message: str = ""
    run: str | None = None
    superseded_by: str | None = None
    created_at: str | None = None


class PoolView(View, frozen=True):
    """``pool`` is namespace/name."""

    pool: str
    runnable: int = 0
    idle: int = 0
    starting: int = 0
    leased: int = 0
    spec: dict[str, Any] = {}
    trouble: TroubleView | None = None
