"""Waits of one simulated run: conditions, buffered signals, ended children, and the outcome that binds them (W1, W2, W4, W5)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from perdure.protocol import ChildResult, Fired, WaitBegin, WaitOutcome, encode_json
from perdure.testing.clock import Clock, seconds_of


@dataclass
class StoredSignal:
    name: str
    id: str
    at: str
    payload: bytes
    bound_to: str | None = None


@dataclass
class OpenWait:
    """``due``: absolute times of its timers, by condition."""

    body: WaitBegin
    due: dict[int, float]
    timeout_at: float | None

    def times(self) -> list[float]:
        return [*self.due.values(), *([] if self.timeout_at is None else [self.timeout_at])]


@dataclass
class Waits:
    clock: Clock
    open: dict[str, OpenWait] = field(default_factory=dict)
    decided: dict[str, tuple[OpenWait, WaitOutcome]] = field(default_factory=dict)
    abandoned: dict[str, OpenWait] = field(default_factory=dict)
    signals: list[StoredSignal] = field(default_factory=list)
    children: dict[str, tuple[str, ChildResult]] = field(default_factory=dict)

    def register(self, body: WaitBegin) -> None:
        """Raises KeyError when ``body`` comes instead of a wait that is not there."""
        if body.instead_of is not None:
            before = self._give_back(body.instead_of, body.dropped)
            self.open[body.key] = OpenWait(body, before.due, before.timeout_at)
            return
        now = self.clock.now
        due = {
            index: now + (condition.seconds or 0.0) if condition.at is None else seconds_of(condition.at)
            for index, condition in enumerate(body.on)
            if condition.kind == "timer"
        }
        self.open[body.key] = OpenWait(body, due, None if body.timeout_seconds is None else now + body.timeout_seconds)

    def abandon(self, key: str) -> bool:
        """Nobody listens there any more: what it took is there again. False if it was not there."""
        if key in self.decided:
            wait, _ = self.decided.pop(key)
        elif key in self.open:
            wait = self.open.pop(key)
        else:
            return False
        self.abandoned[key] = wait
        for signal in self.signals:
            if signal.bound_to == key:
                signal.bound_to = None
        return True

    def listen_again(self, key: str) -> bool:
        if (wait := self.abandoned.pop(key, None)) is not None:
            self.open[key] = wait
        return wait is not None

    def decide(self) -> dict[str, WaitOutcome]:
        """Outcomes of the open waits that can be decided now; their signals are taken."""
        decided: dict[str, WaitOutcome] = {}
        for key, wait in list(self.open.items()):
            outcome = self._outcome(wait)
            if outcome is not None:
                del self.open[key]
                decided[key] = outcome
                self.decided[key] = wait, outcome
                self._bind(key, outcome)
        return decided

    def _outcome(self, wait: OpenWait) -> WaitOutcome | None:
        met = self._met(wait)
        mode, now = wait.body.mode, self.clock.now
        failed = [fired for fired in met if fired.kind == "child_done" and self.children[fired.name][1].status != "Succeeded"]
        if mode == "any" and met:
            return WaitOutcome(status="satisfied", fired=[min(met, key=lambda fired: (fired.at, fired.index))])
        if mode == "first_failure" and failed:
            return WaitOutcome(status="satisfied", fired=[min(failed, key=lambda fired: (fired.at, fired.index))])
        if mode != "any" and len(met) == len(wait.body.on):
            return WaitOutcome(status="satisfied", fired=met)
        if wait.timeout_at is not None and wait.timeout_at <= now:
            late = round(now - wait.timeout_at, 3)
            return WaitOutcome(
                status="timed_out", fired=[Fired(index=-1, kind="timeout", at=self.clock.rfc3339(wait.timeout_at), late_seconds=late)]
            )
        return None

    def _met(self, wait: OpenWait) -> list[Fired]:
        met: list[Fired] = []
        wanted: Counter[str] = Counter()
        for index, condition in enumerate(wait.body.on):
            if condition.kind == "timer":
                due = wait.due[index]
                if due <= self.clock.now:
                    late = round(self.clock.now - due, 3)
                    met.append(Fired(index=index, kind="timer", at=self.clock.rfc3339(due), late_seconds=late))
            elif condition.kind == "signal":
                buffered = [signal for signal in self.signals if signal.name == condition.name and signal.bound_to is None]
                if len(buffered) > wanted[condition.name]:
                    found = buffered[wanted[condition.name]]
                    wanted[condition.name] += 1
                    payload = msgspec.Raw(found.payload)
                    met.append(Fired(index=index, kind="signal", name=found.name, id=found.id, at=found.at, payload=payload))
            elif condition.name in self.children:
                at, result = self.children[condition.name]
                payload = msgspec.Raw(encode_json(result))
                met.append(Fired(index=index, kind="child_done", name=condition.name, id=condition.name, at=at, payload=payload))
        return met

    def _bind(self, key: str, outcome: WaitOutcome) -> None:
        for fired in outcome.fired:
            for signal in self.signals:
                if fired.kind == "signal" and signal.bound_to is None and (signal.name, signal.id) == (fired.name, fired.id):
                    signal.bound_to = key

    def _give_back(self, key: str, dropped: list[int]) -> OpenWait:
        wait, outcome = self.decided[key]
        for fired in outcome.fired:
            for signal in self.signals:
                if fired.index not in dropped and signal.bound_to == key and (signal.name, signal.id) == (fired.name, fired.id):
                    signal.bound_to = None
        return wait
