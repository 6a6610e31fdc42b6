"""Who is at work: what decides whether a run may let its pod go.

A *strand* is one line of execution that the SDK knows: the agent itself, the body of a step or a tool, a branch of ``gather``. A strand
runs until it enters an operation, and again when it has left all of them. When no strand runs, every open operation is a wait (W3).
Strands of one ``gather`` are siblings; their lane tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Lane = tuple[tuple[int, int], ...]
"""Path of (gather, branch) pairs from the agent down."""


class Strands:
    """Counts the strands that run. ``on_idle`` is called whenever that count falls to zero."""

    __slots__ = ("_on_idle", "running")

    def __init__(self, on_idle: Callable[[], None]) -> None:
        self.running = 0
        self._on_idle = on_idle

    def begin(self, lane: Lane = (), group: Group | None = None, parent: Strand | None = None) -> Strand:
        self.running += 1
        return Strand(self, lane, group, parent)

    def shift(self, by: int) -> None:
        self.running += by
        if self.running == 0:
            self._on_idle()


class Group:
    """One ``gather``. ``stopped``: a branch has failed, so the others may not begin anything new."""

    __slots__ = ("number", "stopped")

    def __init__(self, number: int) -> None:
        self.number = number
        self.stopped = False


class Strand:
    __slots__ = ("_ended", "_open", "_parent", "_strands", "group", "lane")

    def __init__(self, strands: Strands, lane: Lane, group: Group | None, parent: Strand | None) -> None:
        self._strands = strands
        self._open = 0
        self._ended = False
        self.group = group
        self._parent = parent
        self.lane = lane

    @property
    def stopped(self) -> bool:
        """Whether a gather that this strand works for, at any depth, has failed elsewhere."""
        strand: Strand | None = self
        while strand is not None:
            if strand.group is not None and strand.group.stopped:
                return True
            strand = strand._parent
        return False

    def within(self, group: Group) -> bool:
        strand: Strand | None = self
        while strand is not None:
            if strand.group is group:
                return True
            strand = strand._parent
        return False

    def enter(self) -> None:
        self._open += 1
        if self._open == 1 and not self._ended:
            self._strands.shift(-1)

    def leave(self) -> None:
        self._open -= 1
        if self._open == 0 and not self._ended:
            self._strands.shift(+1)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            if self._open == 0:
                self._strands.shift(-1)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """This strand waits for an operation that is itself at work, for instance a commit."""
        self._strands.shift(+1)
        self.enter()
        try:
            yield
        finally:
            self.leave()
            self._strands.shift(-1)


def apart(one: Lane, other: Lane) -> bool:
    """Whether two lanes are different branches of the same gather, so that nothing orders what they do."""
    for (gather, branch), (other_gather, other_branch) in zip(one, other, strict=False):
        if gather != other_gather:
            return False
        if branch != other_branch:
            return True
    return False
