"""What happens to runs, as it happens: one poll gives the runs as they are and what is new in their logs.

Polling, because it is the same for one run and for all, survives a gateway that restarts, and costs one small query when nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from perdure_operator.cli.client import Client, NotFound
from perdure_operator.cli.views import EventView, RunView

MAX_LOGS = 50
"""Logs that one poll reads at most; the rest is read by the next."""


@dataclass(frozen=True)
class News:
    """``runs``: all of them now. ``events``: new ones with their run, in the order of time."""

    runs: list[RunView]
    events: list[tuple[RunView, EventView]] = field(default_factory=list)


class Follower:
    """``known``: the last sequence already told, by run id; a run that is not in it is told from its beginning."""

    def __init__(self, client: Client, namespace: str, known: dict[str, int] | None = None) -> None:
        self._client, self._namespace = client, namespace
        self._told = dict(known or {})

    def poll(self) -> News:
        runs = list(self._client.runs(self._namespace))
        return News(runs, self.news_of(runs))

    def news_of(self, runs: Iterable[RunView]) -> list[tuple[RunView, EventView]]:
        changed = [run for run in runs if run.last_seq > self._told.get(run.run_id, 0)][:MAX_LOGS]
        events = []
        for run in changed:
            try:
                found = list(self._client.events(run.namespace, run.run_id, self._told.get(run.run_id, 0) + 1))
            except NotFound:  # collected meanwhile
                found = []
            self._told[run.run_id] = found[-1].seq if found else run.last_seq
            events += [(run, event) for event in found]
        return sorted(events, key=lambda pair: (pair[1].at, pair[0].run_id, pair[1].seq))
