"""Redo identity (E9): the key under which an operation's outcome is journaled and found again by the next attempt.

A key is ``{scope}/{kind}:{name}#{ordinal}``, or ``{scope}/{kind}:{name}={key}`` where the author chose a key; the scope is the key of the
enclosing step, and the agent itself has none. Ordinals count, in each scope, the operations of one kind and name in the order in which
the code calls them; they matter only for a name that is used several times. A step's body always starts at 0. So does the agent,
unless it goes on from a checkpoint: then the counts are those of the moment when the checkpoint was taken, because the code goes on from
there and does not call again what came before.

Counting needs an order. Two unnamed operations of one kind and name that are in flight at once, or are called by different branches of
one ``gather``, have none that a restart would repeat: that is an error that says to give them a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from perdure.sdk.errors import ConcurrentUnnamed, InvalidDeclaration
from perdure.sdk.strands import Lane, apart

_MAX_KEY: Final = 1024
_UNSAFE = str.maketrans("/#=", "___")


class Scope:
    """Ordinals and operations in flight below one step, or of the agent itself (``path`` empty)."""

    __slots__ = ("_counts", "_flying", "_lanes", "path")

    def __init__(self, path: str = "", counts: Mapping[str, int] | None = None) -> None:
        self.path = path
        self._counts: dict[str, int] = dict(counts or {})
        self._lanes: dict[str, Lane] = {}
        self._flying: dict[str, int] = {}

    def claim(self, kind: str, name: str, key: str | None = None, lane: Lane = ()) -> Claim:
        """The identity of the next operation of this kind and name. Raises ConcurrentUnnamed, InvalidDeclaration."""
        slot = f"{kind}:{name.translate(_UNSAFE)}"
        if key is not None:
            full = self._full(f"{slot}={key.replace('~', '~~')}")  # one alone is that of `again`
            return Claim(self, full, full, named=True)
        last = self._lanes.get(slot)
        if last is not None and last is not lane and apart(last, lane):
            raise ConcurrentUnnamed(
                f"{slot} is called in several branches of one gather, so a restart could not tell which is which; give each call a key="
            )
        self._lanes[slot] = lane
        ordinal = self._counts.get(slot, 0)
        self._counts[slot] = ordinal + 1
        return Claim(self, self._full(f"{slot}#{ordinal}"), slot, named=False)

    def _full(self, last: str) -> str:
        full = f"{self.path}/{last}" if self.path else last
        if len(full) > _MAX_KEY:
            full = f"~{hashlib.sha256(self.path.encode()).hexdigest()[:32]}/{last}"
            if len(full) > _MAX_KEY:
                raise InvalidDeclaration(f"the name or key of {last[:100]}… is too long")
        return full

    def counts(self) -> dict[str, int]:
        """Ordinals to save in a checkpoint: those of operations in flight are not used up yet, a restart calls them again."""
        return {slot: count - self._flying.get(slot, 0) for slot, count in self._counts.items() if count > self._flying.get(slot, 0)}

    @contextmanager
    def _fly(self, claim: Claim) -> Iterator[None]:
        flying = self._flying.get(claim.slot, 0)
        if flying:
            raise ConcurrentUnnamed(
                f"{claim.key} is in flight already; a key is used by one operation at a time"
                if claim.named
                else f"{claim.slot} is in flight already, and a restart could not tell the two calls apart; give each call a key="
            )
        self._flying[claim.slot] = 1
        try:
            yield
        finally:
            del self._flying[claim.slot]


class Claim:
    """One operation's identity. ``key`` is the full redo key."""

    __slots__ = ("_scope", "key", "named", "slot")

    def __init__(self, scope: Scope, key: str, slot: str, *, named: bool) -> None:
        self._scope = scope
        self.key = key
        self.slot = slot
        self.named = named

    def again(self, count: int) -> Claim:
        """The same operation once more, because its outcome was no use. It takes no ordinal: what comes after it keeps its own."""
        return Claim(self._scope, f"{self.key}~{count}", self.slot, named=self.named)

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Raises ConcurrentUnnamed if another operation under the same kind and name, or key, has begun and not ended."""
        with self._scope._fly(self):
            yield
