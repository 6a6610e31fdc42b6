"""What a tool declares, and what a call of it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

R = TypeVar("R")
EffectClass = Literal["external", "memory", "local", "read_only"]
UnknownPolicy = Literal["query", "retry-same-key", "ask", "fail", "assume-not-done"]


@dataclass(frozen=True, slots=True)
class ToolOptions:
    name: str
    effect: EffectClass | None = None
    scope: tuple[str, ...] | None = None
    scope_is_identity: bool = False
    ignore: tuple[str, ...] = ()
    namespace: str = ""
    occurrence: int = 0
    repeatable: bool = False
    on_unknown: UnknownPolicy | None = None
    timeout: float = 300.0
    retries: int | None = None
    not_executed: tuple[type[Exception], ...] = ()
    rejected: tuple[type[Exception], ...] = ()
    provider_ref: Callable[[Any], str | None] | None = None
    key_parameter: str = "key"
    ledger: bool = True


@dataclass(frozen=True, slots=True)
class Receipt(Generic[R]):
    """A result with what the ledger says about it. ``replayed``: this call executed nothing, the effect had happened; ``message`` says how
    to ask for a distinct one."""

    value: R
    key: str
    replayed: bool = False
    provider_ref: str | None = None
    message: str = ""
