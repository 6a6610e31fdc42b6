"""What is wrong with a declaration is said at import, by name."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from perdure import InvalidDeclaration, Run, SyncRun, agent, step, tool

Declare = Callable[..., Any]


def plain(to: str = "") -> str:
    return to


async def with_lock(to: str, lock: object = threading.Lock()) -> None:  # what the test is about
    del to, lock


async def keyword_only(run: Run, *, input: int) -> None: ...
async def not_from_json(run: Run, input: list[int] | set[int]) -> None: ...
def of_async(run: Run) -> None: ...
async def of_sync(run: SyncRun) -> None: ...


WRONG: list[tuple[Declare, dict[str, Any], Any, str]] = [
    (tool, {"effect": "extrenal"}, plain, "tool plain: effect is one of 'external'.*not 'extrenal'"),
    (tool, {"on_unknown": "retry"}, plain, "tool plain: on_unknown is one of .*'ask'"),
    (tool, {"on_unkown": "ask"}, plain, "tool plain: got an unexpected keyword argument 'on_unkown'"),
    (tool, {"scope": "to"}, plain, "tool plain: scope is a tuple"),
    (tool, {"scope": ("too",)}, plain, "tool plain: its scope names too"),
    (tool, {"ignore": "to"}, plain, "tool plain: ignore is a tuple"),
    (tool, {"not_executed": ValueError}, plain, "tool plain: not_executed is a tuple of exception classes"),
    (tool, {"rejected": ("ValueError",)}, plain, "tool plain: rejected is a tuple of exception classes"),
    (tool, {"retries": -1}, plain, "tool plain: retries is a whole number"),
    (tool, {"timeout": "5m"}, plain, "a duration is a number of seconds or a timedelta, not '5m'"),
    (tool, {"timeout": 0}, plain, "tool plain: its timeout must be positive"),
    (tool, {"ledger": False}, plain, "tool plain: only a tool with effect='read_only'"),
    (tool, {}, with_lock, "tool with_lock: the default of lock has no JSON form"),
    (tool, {}, socket.socket, "decorates a function"),
    (step, {"on_input_change": "ignore"}, plain, "step plain: on_input_change is one of 'reuse', 'redo', 'fail'"),
    (step, {"retries": 1.5}, plain, "retries is a whole number"),
    (step, {"non_retryable": ValueError}, plain, "non_retryable is a tuple"),
    (step, {"timeout": -1}, plain, "step plain: its timeout must be positive"),
    (step, {"key": 5}, plain, "step plain: key is a string or a function"),
    (agent, {"on_input_change": "x"}, of_sync, "agent of_sync: on_input_change is one of"),
    (agent, {"non_retryable": [ValueError]}, of_sync, "agent of_sync: non_retryable is a tuple"),
    (agent, {"hold": -1}, of_sync, "agent of_sync: hold cannot be negative"),
    (agent, {}, of_async, "agent of_async is not async: its run is a SyncRun"),
    (agent, {}, of_sync, "agent of_sync is async: its run is a Run"),
    (agent, {}, keyword_only, r"agent keyword_only must take \(run\) or \(run, input\)"),
    (agent, {}, not_from_json, "cannot be read from JSON"),
    (agent, {}, step(plain), "agent plain is a decorated function already"),
]


@pytest.mark.parametrize(("decorator", "options", "fn", "message"), WRONG)
def test_a_mistake_is_said_at_import(decorator: Declare, options: dict[str, Any], fn: Any, message: str) -> None:
    with pytest.raises(InvalidDeclaration, match=message):
        decorator(**options)(fn)


@pytest.mark.parametrize("decorator", [agent, step, tool])
def test_an_option_that_is_given_by_position_is_no_function(decorator: Declare) -> None:
    with pytest.raises(InvalidDeclaration, match="decorates a function, not 'name'; options are given by name"):
        decorator("name")


def test_what_is_unusual_and_right_is_let_pass() -> None:
    async def not_yet_defined(run: Run, input: Later) -> None: ...

    tool(ignore=("lock",), scope=("to",), retries=0)(with_lock)
    step(key=lambda to: to, timeout=0.5, retries=3, non_retryable=(ValueError, KeyError))(plain)
    assert agent(hold=5, non_retryable=(ValueError,))(not_yet_defined).name == "not_yet_defined"


class Later: ...
