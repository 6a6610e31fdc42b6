"""An event of a run as one line that a stranger understands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from perdure_operator.cli.views import EventView

PodName = Callable[[str], str]
"""Name of a pod by its id."""
PodNames = Callable[[str], PodName]
"""The same for the pods of a pool (namespace/name)."""

UNDELIVERABLE = "LeaseUndeliverable"
_QUESTION = re.compile(r"\bsignal effect:([0-9a-f]{12})[0-9a-f]{52}:[0-9]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(value: object, limit: int = 200) -> str:
    """Text from elsewhere for a terminal: one line, no control characters."""
    text = _CONTROL.sub(" ", str(value))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def tell(event: EventView, pod_name: PodName) -> str:
    """What happened, without time and run."""
    data: dict[str, Any] = event.data if isinstance(event.data, dict) else {}
    text = _TOLD.get(event.kind)
    if text is not None:
        said = event.payload if event.kind.startswith("agent.") and isinstance(event.payload, dict) else {}
        return plain(_QUESTION.sub(r"a decision about the call \1", text(_Data(data | said, event.epoch, pod_name))))
    if event.kind.startswith("agent."):
        payload = "" if event.payload is None else f" {json.dumps(event.payload, ensure_ascii=False)}"
        return plain(f"says {event.kind.removeprefix('agent.')}{payload}")
    return plain(f"{event.kind} {json.dumps(data, ensure_ascii=False)}" if data else event.kind)


class _Data:
    """The data of an event; what is missing is empty."""

    def __init__(self, data: dict[str, Any], epoch: int, pod_name: PodName) -> None:
        self._data = data
        self.epoch = epoch
        self.pod = pod_name(str(data["pod"])) if data.get("pod") else "a worker"

    def __getitem__(self, name: str) -> str:
        value = self._data.get(name)
        return "" if value is None else str(value)

    @property
    def why(self) -> str:
        """Reason and message, as far as they are there."""
        return ": ".join(part for part in (self["reason"], self["message"]) if part)

    def condition(self) -> str:
        """The first condition of a wait, and how many more there are."""
        first = self._data.get("first")
        more = int(self._data.get("conditions") or self._data.get("fired") or 1) - 1
        if not isinstance(first, dict):
            return self["name"]
        kind = str(first.get("kind", "")).replace("_", " ")
        text = f"{kind} {first.get('name') or ''}".strip()
        if first.get("seconds") is not None:
            text = f"{kind} of {float(first['seconds']):g} s"
        return text + (f" and {more} more" if more > 0 else "")


def _clock(value: str) -> str:
    try:
        return datetime.fromisoformat(value).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return value


def _after(text: str, rest: str) -> str:
    return f"{text}: {rest}" if rest else text


_RESOLVED = {"SUCCEEDED": "happened", "FAILED": "did not happen"}

_TOLD: dict[str, Callable[[_Data], str]] = {
    "run.created": lambda d: f"created for pool {d['pool']}" + (f" by {d['parent']}" if d["parent"] else ""),
    "run.leased": lambda d: f"leased by {d.pod} (epoch {d['epoch'] or d.epoch})",
    "run.suspended": lambda d: f"suspended, {d['message'] or 'waiting'}; its pod is free",
    "run.woken": lambda d: _after("woken", d["message"]),
    "run.lost": lambda d: (
        "its worker was told to end, which is no failure; queued again"
        if d["reason"] == "Terminated"
        else f"could not be given to its worker: {d['message']}; queued again"
        if d["reason"] == UNDELIVERABLE
        else f"lost its worker ({d['reason']}); queued again"
    ),
    "run.retrying": lambda d: _after("this attempt failed", d.why) + (f"; next try {_clock(d['runnableAt'])}" if d["runnableAt"] else ""),
    "run.yielded": lambda _: "gave its pod back; queued again",
    "run.paused": lambda d: _after("paused", d["message"]),
    "run.succeeded": lambda _: "succeeded",
    "run.failed": lambda d: _after("failed", d.why),
    "run.cancelled": lambda d: _after("cancelled", d["message"]),
    "run.cancel_requested": lambda d: _after("cancel requested", d["reason"]),
    "run.pause_requested": lambda _: "pause requested",
    "run.nearly_full": lambda d: (
        f"has written {d['bytes']} bytes of {d['maxBytes']}, {d['storedBytes']} as stored of {d['maxStoredBytes']}"
    ),
    "run.detached": lambda _: "goes on without its parent",
    "run.resume_requested": lambda _: "resume requested",
    "step.succeeded": lambda d: f"step {d['name']} done",
    "step.failed": lambda d: f"step {d['name']} failed",
    "step.skipped": lambda d: f"step {d['name']} skipped",
    "wait.opened": lambda d: f"waits for {d.condition()}",
    "wait.satisfied": lambda d: f"its wait is satisfied by {d.condition()}",
    "wait.timed_out": lambda _: "its wait timed out",
    "wait.abandoned": lambda _: "gave a wait up",
    "signal.received": lambda d: f"got the signal {d['name']}".replace("the signal effect:", "signal effect:"),
    "child.spawned": lambda d: f"started the child {d['name'] or d['child']} in pool {d['pool']}",
    "child.done": lambda d: f"its child {d['name'] or d['child']} is {d['status']}",
    "activity.started": lambda d: f"calls {d['tool']}" + (f" (attempt {d['attempt']})" if d["attempt"] not in ("", "1") else ""),
    "activity.succeeded": lambda d: f"{d['tool']} done" + (f" ({d['providerRef']})" if d["providerRef"] else ""),
    "activity.failed": lambda d: f"{d['tool']} was not executed",
    "activity.cancelled": lambda d: f"{d['tool']} cancelled",
    "activity.unknown": lambda d: f"nobody knows whether {d['tool']} happened",
    "activity.resolved": lambda d: (
        f"{'a person' if d['by'] == 'person' else 'the provider'} says: {d['tool']} {_RESOLVED.get(d['state'], d['state'])}"
    ),
    "activity.evidence": lambda d: f"late news of {d['tool']}: {d['state']}",
    "activity.duplicate_effect": lambda d: f"{d['tool']} HAPPENED TWICE",
    "agent.EffectUnknown": lambda d: _after(f"asks a person whether {d['tool']} happened (call {d['key'][:12]})", d["reason"]),
    "agent.SignalRejected": lambda d: f"dropped the signal {d['signal']} {d['payload']}: no {d['expected']}: {d['reason']}; waits on",
    "agent.AnswerRefused": lambda d: f"refused an answer about {d['tool']}: {d['reason']}; expected {d['expected']}; asks again",
    "checkpoint.saved": lambda d: f"checkpoint ({d['type']})",
}


def clock(at: str | None) -> str:
    """Local time of day."""
    return _clock(at) if at else "--:--:--"


def age(since: str | None, *, now: datetime | None = None) -> str:
    """Like kubectl: 12s, 3m20s, 2h5m, 4d."""
    if not since:
        return ""
    try:
        seconds = max(0, int(((now or datetime.now(UTC)) - datetime.fromisoformat(since)).total_seconds()))
    except (ValueError, TypeError):
        return "?"
    if seconds < 120:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 10:
        return f"{minutes}m{seconds}s" if seconds else f"{minutes}m"
    if minutes < 120:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes}m" if minutes and hours < 10 else f"{hours}h"
    return f"{hours // 24}d"
