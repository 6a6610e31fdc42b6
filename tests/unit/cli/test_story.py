"""Every event as one line, and times as kubectl writes them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.protocol import OPERATION_PATHS
from perdure_operator.cli import story
from perdure_operator.cli.story import age, plain, tell
from perdure_operator.cli.views import EventView

SQL = Path(story.__file__).parent.parent / "store" / "sql"


def told(kind: str, data: dict[str, Any] | None = None, payload: Any = None) -> str:
    return tell(EventView(1, "2026-11-21T12:00:00+00:00", kind, 2, data or {}, payload), lambda pod: f"worker-{pod}")


@pytest.mark.parametrize(
    ("kind", "data", "line"),
    [
        ("run.created", {"pool": "default/worker"}, "created for pool default/worker"),
        ("run.leased", {"pod": "3", "epoch": 2}, "leased by worker-3 (epoch 2)"),
        ("run.suspended", {"message": "waits for signal go"}, "suspended, waits for signal go; its pod is free"),
        ("run.lost", {"reason": "AgentKilled"}, "lost its worker (AgentKilled); queued again"),
        ("run.failed", {"reason": "Bad", "message": "it broke"}, "failed: Bad: it broke"),
        ("run.succeeded", {}, "succeeded"),
        ("step.succeeded", {"name": "crawl"}, "step crawl done"),
        ("wait.opened", {"conditions": 1, "first": {"kind": "signal", "name": "go"}}, "waits for signal go"),
        ("wait.opened", {"conditions": 1, "first": {"kind": "timer", "seconds": 90.0}}, "waits for timer of 90 s"),
        ("wait.opened", {"conditions": 3, "first": {"kind": "child_done", "name": "c"}}, "waits for child done c and 2 more"),
        ("activity.started", {"tool": "send_email", "attempt": 2}, "calls send_email (attempt 2)"),
        ("activity.unknown", {"tool": "send_email"}, "nobody knows whether send_email happened"),
        ("child.spawned", {"child": "0a1b", "name": "report-1", "pool": "ns/p"}, "started the child report-1 in pool ns/p"),
        ("child.done", {"child": "0a1b", "name": "report-1", "status": "Succeeded"}, "its child report-1 is Succeeded"),
        ("activity.resolved", {"tool": "mail", "state": "FAILED", "by": "query"}, "the provider says: mail did not happen"),
        ("activity.resolved", {"tool": "mail", "state": "SUCCEEDED", "by": "person"}, "a person says: mail happened"),
        (
            "run.lost",
            {"reason": "LeaseUndeliverable", "message": "its input is broken"},
            "could not be given to its worker: its input is broken; queued again",
        ),
        (
            "run.nearly_full",
            {"bytes": 80, "maxBytes": 100, "storedBytes": 8, "maxStoredBytes": 50},
            "has written 80 bytes of 100, 8 as stored of 50",
        ),
        ("something.new", {"a": 1}, 'something.new {"a": 1}'),
        ("something.new", {}, "something.new"),
    ],
)
def test_lines(kind: str, data: dict[str, Any], line: str) -> None:
    assert told(kind, data) == line


def test_an_agents_own_event_shows_its_payload() -> None:
    assert told("agent.progress", payload={"done": 3}) == 'says progress {"done": 3}'


@pytest.mark.parametrize("kind", sorted(story._TOLD))
def test_every_kind_is_told_even_without_data(kind: str) -> None:
    assert told(kind)
    assert told(kind, {"first": "?", "conditions": None, "pod": None})


def test_every_kind_that_the_store_writes_has_its_words() -> None:
    written = set()
    for file in SQL.glob("*.sql"):
        written |= set(re.findall(r"'((?:run|wait|child|activity|signal|checkpoint)\.[a-z_]+)'", file.read_text()))
    assert len(written) > 15
    assert written - OPERATION_PATHS.keys() - story._TOLD.keys() == set()


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert plain("a\x1b[31mb\r\nc\u202ed\x9b") == "a [31mb  c d "
    assert plain("x" * 300, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (200, "3m20s"), (3600, "60m"), (7500, "2h5m"), (86_400, "24h"), (400_000, "4d")],
)
def test_age(seconds: int, text: str) -> None:
    now = datetime(2026, 11, 21, tzinfo=UTC)
    assert age((now - timedelta(seconds=seconds)).isoformat(), now=now) == text


def test_age_of_nothing_and_of_nonsense() -> None:
    assert age(None) == ""
    assert age("yesterday") == "?"


def test_a_question_about_an_effect_is_told_in_words() -> None:
    first = {"kind": "signal", "name": f"effect:{'ab' * 32}:2"}
    assert told("wait.opened", {"conditions": 1, "first": first}) == "waits for a decision about the call abababababab"
    said = {"tool": "send", "key": "ab" * 32, "expected": '{"happened": false}'}
    assert told("agent.EffectUnknown", payload=said) == "asks a person whether send happened (call abababababab)"
    unasked = said | {"reason": "the provider could not be asked: ConnectionError: down"}
    assert told("agent.EffectUnknown", payload=unasked).endswith("abababab): the provider could not be asked: ConnectionError: down")
    said["reason"] = "response is no str"
    assert told("agent.AnswerRefused", payload=said).startswith("refused an answer about send: response is no str; expected {")
