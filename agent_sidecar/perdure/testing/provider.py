"""A stand-in for what is outside: it remembers what was done to it, by idempotency key."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Provider:
    """``dedupes``: a second call under a key does nothing and gives the first answer, as good providers do."""

    def __init__(self, *, dedupes: bool = False) -> None:
        self.dedupes = dedupes
        self.calls: list[tuple[str, Any]] = []
        self._found: dict[str, dict[str, Any]] = {}
        self._broken: set[int] = set()

    def break_after(self, *calls: int) -> None:
        """The calls with these numbers (from 1) act, and then their connection breaks."""
        self._broken.update(calls)

    def act(self, key: str, what: Any = None) -> dict[str, Any]:
        """Does it. Raises ConnectionError where ``break_after`` says so."""
        if not (self.dedupes and key in self._found):
            self.calls.append((key, what))
            self._found.setdefault(key, {"id": f"ref-{len(self.calls)}", "what": what})
        if len(self.calls) in self._broken:
            self._broken.discard(len(self.calls))
            raise ConnectionError("the connection broke after the call")
        return self._found[key]

    def find(self, key: str) -> dict[str, Any] | None:
        return self._found.get(key)

    def assert_once(self, expected: int | None = None) -> None:
        """No key acted twice; ``expected``: so many effects in all."""
        twice = {key: count for key, count in Counter(key for key, _ in self.calls).items() if count > 1}
        assert not twice, f"effects happened more than once: {twice}"
        assert expected is None or len(self.calls) == expected, f"{len(self.calls)} effects happened, {expected} were expected"
