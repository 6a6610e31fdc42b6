"""Perdure: durable AI agents. This package is what goes into an agent's image: the SDK (``perdure.sdk``, exported here), the sidecar
(``perdure.sidecar``), and the wire between them (``perdure.protocol``); ``perdure.testing`` runs agents in memory.

Names are imported when they are first used: the sidecar is in this package too and must not pay for the SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.sdk.agents import Agent, agent
    from perdure.sdk.children import Child, ChildResult
    from perdure.sdk.conditions import Fired, Signal, Waited, at, signal, timer
    from perdure.sdk.durations import days, hours, minutes
    from perdure.sdk.errors import (
        ChildFailed,
        ConcurrentUnnamed,
        EffectBusy,
        EffectConflict,
        EffectDenied,
        EffectError,
        EffectFailed,
        EffectUnknown,
        InputChanged,
        InvalidDeclaration,
        InvalidInput,
        NotEncodable,
        NotExecuted,
        PayloadTooLarge,
        PerdureError,
        Refused,
        ResultUndecodable,
        RunCancelled,
        StepFailed,
        StepTimedOut,
        ToolTimedOut,
        WaitTimedOut,
    )
    from perdure.sdk.gather import gather
    from perdure.sdk.retry import RetryPolicy
    from perdure.sdk.run import Run, inside
    from perdure.sdk.session import AppendSlice, Slice, Snapshot
    from perdure.sdk.steps import Step, step
    from perdure.sdk.sync_run import SyncRun
    from perdure.sdk.tool_options import Receipt
    from perdure.sdk.tools import Tool, tool

_HOME = {
    "agents": ("Agent", "agent"),
    "children": ("Child", "ChildResult"),
    "conditions": ("Fired", "Signal", "Waited", "at", "signal", "timer"),
    "durations": ("days", "hours", "minutes"),
    "errors": (
        "ChildFailed",
        "ConcurrentUnnamed",
        "EffectBusy",
        "EffectConflict",
        "EffectDenied",
        "EffectError",
        "EffectFailed",
        "EffectUnknown",
        "InputChanged",
        "InvalidDeclaration",
        "InvalidInput",
        "NotEncodable",
        "NotExecuted",
        "PayloadTooLarge",
        "PerdureError",
        "Refused",
        "ResultUndecodable",
        "RunCancelled",
        "StepFailed",
        "StepTimedOut",
        "ToolTimedOut",
        "WaitTimedOut",
    ),
    "gather": ("gather",),
    "retry": ("RetryPolicy",),
    "run": ("Run", "inside"),
    "session": ("AppendSlice", "Slice", "Snapshot"),
    "steps": ("Step", "step"),
    "sync_run": ("SyncRun",),
    "tool_options": ("Receipt",),
    "tools": ("Tool", "tool"),
}
_MODULE_OF = {name: f"perdure.sdk.{module}" for module, names in _HOME.items() for name in names}

__all__ = [
    "Agent",
    "AppendSlice",
    "Child",
    "ChildFailed",
    "ChildResult",
    "ConcurrentUnnamed",
    "EffectBusy",
    "EffectConflict",
    "EffectDenied",
    "EffectError",
    "EffectFailed",
    "EffectUnknown",
    "Fired",
    "InputChanged",
    "InvalidDeclaration",
    "InvalidInput",
    "NotEncodable",
    "NotExecuted",
    "PayloadTooLarge",
    "PerdureError",
    "Receipt",
    "Refused",
    "ResultUndecodable",
    "RetryPolicy",
    "Run",
    "RunCancelled",
    "Signal",
    "Slice",
    "Snapshot",
    "Step",
    "StepFailed",
    "StepTimedOut",
    "SyncRun",
    "Tool",
    "ToolTimedOut",
    "WaitTimedOut",
    "Waited",
    "agent",
    "at",
    "days",
    "gather",
    "hours",
    "inside",
    "minutes",
    "signal",
    "step",
    "timer",
    "tool",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
