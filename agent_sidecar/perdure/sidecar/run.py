"""What this process knows about the one run that its pod holds, and the rules that need no I/O.

``LIVE`` until the gateway says otherwise; ``ENDING`` while the sidecar's own finish is under way; ``RELEASED`` when an answer ended the
lease; ``LOST`` when the gateway took it away. From ``RELEASED`` and ``LOST`` there is no way back.
"""

from __future__ import annotations

import enum
import hmac

import msgspec
from msgspec import Raw, Struct

from perdure.protocol import Lease


class State(enum.Enum):
    LIVE = "live"
    ENDING = "ending"
    RELEASED = "released"
    LOST = "lost"


class _Pieces(Struct, omit_defaults=True):
    """A Poke whose parts stay bytes."""

    cancel: bool = False
    pause: bool = False
    outcomes: Raw = Raw()
    signals: Raw = Raw()


class _Decision(Struct):
    """What the sidecar looks at in an answer; all else is skipped over."""

    decision: str = ""
    key: str = ""
    token: str | None = None
    status: str = ""


class _Token(Struct):
    token: str = ""


class _Tag(Struct):
    op: str = ""


_pieces = msgspec.json.Decoder(_Pieces)
_decision = msgspec.json.Decoder(_Decision)
_token = msgspec.json.Decoder(_Token)
_tag = msgspec.json.Decoder(_Tag)


def _look(answer: bytes) -> _Decision:
    """The agent gets the answer whatever it is; one of another shape tells the sidecar nothing."""
    try:
        return _decision.decode(answer)
    except msgspec.DecodeError:
        return _Decision()


_TAG_PREFIX = b'{"op":"'
TOO_DEEP = "the JSON is nested too deeply"


def closed_token(body: bytes) -> str:
    """The execution token that an activity.end closes. Raises msgspec.DecodeError, msgspec.ValidationError."""
    try:
        return _token.decode(body).token
    except RecursionError:
        raise msgspec.DecodeError(TOO_DEEP) from None


def operation_tag(body: bytes) -> str:
    """The ``op`` of a JSON operation, "" if it has none. Raises msgspec.DecodeError.

    Cheap when the tag comes first, as every encoder of the protocol's models writes it."""
    if body.startswith(_TAG_PREFIX):
        end = body.find(b'"', len(_TAG_PREFIX), 64)
        if end > 0:
            return body[len(_TAG_PREFIX) : end].decode("latin-1")
    try:
        return _tag.decode(body).op
    except RecursionError:
        raise msgspec.DecodeError(TOO_DEEP) from None


class HeldRun:
    """A lease and what has happened under it. ``marked``: something of the context is to be fetched.

    ``secret``: what its agent process must show, None when every local process may act.
    Times are the event loop's."""

    def __init__(self, lease: Lease, *, secret: str | None, now: float) -> None:
        self.run = lease.run
        self.epoch = lease.epoch
        self.context = lease.context
        self.marked = lease.fetch
        self.grace_seconds = lease.grace_seconds
        self.stall_timeout_seconds = lease.stall_timeout_seconds
        self.secret = secret
        self.state = State.LIVE
        self.reason = ""
        self.cancel = False
        self.pause = False
        self.handed_out = False
        self.granted_at = now
        self.last_operation = now
        self.in_flight = 0
        self.activities: dict[str, str] = {}
        self._acknowledged_since_pause = False
        self._only_waits = False

    @property
    def over(self) -> bool:
        return self.state in (State.RELEASED, State.LOST)

    def admits(self, secret: str | None) -> bool:
        """May who shows this secret act for the run?"""
        return self.secret is None or (secret is not None and hmac.compare_digest(self.secret, secret))

    def matches(self, run: str, epoch: int) -> bool:
        return self.run == run and self.epoch == epoch

    def poked(self, poke: bytes) -> list[tuple[str, bytes]]:
        """Takes a Poke; gives its parts as (event name, JSON). Raises msgspec.DecodeError, msgspec.ValidationError."""
        pieces = _pieces.decode(poke)
        parts: list[tuple[str, bytes]] = []
        if pieces.cancel:
            self.cancel = True
            parts.append(("cancel", b'{"cancel":true}'))
        if pieces.pause:
            self.pause = True
            parts.append(("pause", b'{"pause":true}'))
        if bytes(pieces.outcomes) not in (b"", b"{}"):
            self._only_waits = False
            parts.append(("wait", b'{"outcomes":%b}' % bytes(pieces.outcomes)))
        if bytes(pieces.signals) not in (b"", b"[]"):
            parts.append(("signal", b'{"signals":%b}' % bytes(pieces.signals)))
        return parts

    def flags(self) -> list[tuple[str, bytes]]:
        """What an agent that connects now has to be told again."""
        return [("cancel", b'{"cancel":true}')] * self.cancel + [("pause", b'{"pause":true}')] * self.pause

    def began(self, now: float) -> None:
        """The agent has sent an operation."""
        self.last_operation = now
        self.in_flight += 1
        self._only_waits = False

    def acknowledged(self, op: str, closed: str, answer: bytes | None, now: float) -> None:
        """The agent's operation has its answer; None: it was refused. ``closed``: the token that it closes if it is an activity.end."""
        self.in_flight -= 1
        self.last_operation = now
        if answer is None:
            return
        self._acknowledged_since_pause = self.pause
        if op == "wait":
            self._only_waits = _look(answer).status == "open"
        elif op == "activity.begin":
            taken = _look(answer)
            if taken.decision in ("execute", "retry") and taken.token:
                self.activities[taken.token] = taken.key
        elif op == "activity.end":
            self.activities.pop(closed, None)

    def may_pause(self) -> bool:
        """True when stopping here loses no work that an operation could still record, and no activity is between intent and receipt."""
        quiet = self.state is State.LIVE and self.pause and not self.cancel and not self.in_flight and not self.activities
        return quiet and (self._acknowledged_since_pause or self._only_waits)
