"""Is the agent still there? What its channels tell: answered pings of a session, an open event stream, any request at all."""

from __future__ import annotations

from typing import Protocol

from perdure.sidecar.run import HeldRun, State


class Pinged(Protocol):
    """An open session. ``last_pong``: loop time at which the agent's event loop last answered, or was last given the chance to."""

    last_pong: float

    def ping(self) -> None: ...


class Presence:
    def __init__(self) -> None:
        self.sessions: set[Pinged] = set()
        self.streams: set[object] = set()
        self._seen = False

    def lease_began(self) -> None:
        self._seen = bool(self.sessions or self.streams)

    def seen(self) -> None:
        """The agent has made a request under this lease."""
        self._seen = True

    def ping(self) -> None:
        for session in self.sessions:
            session.ping()

    def age(self, now: float) -> float | None:
        """Seconds since the agent last showed that it lives; None when nothing can show it."""
        if self.sessions:
            return max(0.0, now - max(session.last_pong for session in self.sessions))
        return 0.0 if self.streams else None

    def stalled(self, run: HeldRun, now: float) -> bool:
        """No operation and no sign of life for the run's stall timeout. An agent that uses plain requests only gives no signs: whether it
        lives is for those to say who supervise its process."""
        limit = run.stall_timeout_seconds
        if limit is None or run.state is not State.LIVE or now - run.last_operation < limit:
            return False
        age = self.age(now)
        if age is None:
            return not self._seen
        return age >= limit
