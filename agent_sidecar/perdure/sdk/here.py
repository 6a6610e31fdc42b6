"""Where the code that is running now stands in its run. It travels in one context variable, so that decorated functions find their run
through any framework that keeps contexts; outside a run there is none, and they are plain functions."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perdure.sdk.execution import Execution
    from perdure.sdk.identity import Scope
    from perdure.sdk.strands import Strand


class Here(NamedTuple):
    """``step``: key of the enclosing step, None in the agent itself."""

    execution: Execution
    scope: Scope
    strand: Strand
    step: str | None = None


HERE: ContextVar[Here | None] = ContextVar("perdure.here", default=None)
