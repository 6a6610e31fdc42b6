"""The one transition table of a run: ``(state, event) -> (state, effects)``, total.

It is the only copy of the rules. ``store/sql/transitions.sql`` is generated from it and joined by the SQL that moves runs, the
in-memory oracle reads it, and ``docs/state_machine.md`` is drawn from it. A pair without a next state is a refusal with a typed
error. When several things are due at once the order is cancel, deadline, pause, wake (``perdure.settle`` in SQL).
"""

from __future__ import annotations

from dataclasses import dataclass

from perdure_operator.domain.errors import IllegalTransition, NotRunning, PerdureError, RunFinished
from perdure_operator.domain.run import TERMINAL, Effect, Event, State


@dataclass(frozen=True)
class Move:
    """The run goes to ``state`` and ``effects`` happen in the same commit."""

    state: State
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True)
class Refuse:
    """The event is not allowed in this state; the caller gets ``error``."""

    error: type[PerdureError]


P, R, S = State.PENDING, State.RUNNING, State.SUSPENDED
_LEAVE = (Effect.RELEASE, Effect.ORPHAN)
_END = (Effect.CLOCK_OFF, Effect.FINISH)

_MOVES: dict[tuple[State, Event], Move] = {
    (P, Event.LEASE): Move(R, (Effect.GRANT,)),
    (P, Event.WAKE): Move(P),  # coalesced: queued once, however many wakes arrive
    (P, Event.PAUSE): Move(S, (Effect.CLOCK_OFF,)),
    (P, Event.FAIL): Move(State.FAILED, _END),
    (P, Event.CANCEL): Move(State.CANCELLED, _END),
    (R, Event.SUSPEND): Move(S, (*_LEAVE, Effect.CLOCK_OFF)),
    (R, Event.WAKE): Move(R),  # coalesced: the holder is told
    (R, Event.LOSE): Move(P, (*_LEAVE, Effect.REVOKE, Effect.ATTEMPT, Effect.ENQUEUE)),
    (R, Event.RETRY): Move(P, (*_LEAVE, Effect.REVOKE, Effect.ATTEMPT, Effect.ENQUEUE)),
    (R, Event.YIELD): Move(P, (*_LEAVE, Effect.REVOKE, Effect.ENQUEUE)),
    (R, Event.PAUSE): Move(S, (*_LEAVE, Effect.REVOKE, Effect.CLOCK_OFF)),
    (R, Event.SUCCEED): Move(State.SUCCEEDED, (*_LEAVE, *_END)),
    (R, Event.FAIL): Move(State.FAILED, (*_LEAVE, *_END)),
    (R, Event.CANCEL): Move(State.CANCELLED, (*_LEAVE, *_END)),
    (S, Event.WAKE): Move(P, (Effect.ENQUEUE, Effect.CLOCK_ON)),
    (S, Event.PAUSE): Move(S),
    (S, Event.FAIL): Move(State.FAILED, _END),
    (S, Event.CANCEL): Move(State.CANCELLED, _END),
}


def _entry(state: State, event: Event) -> Move | Refuse:
    if state in TERMINAL:
        return Refuse(RunFinished)
    move = _MOVES.get((state, event))
    if move is not None:
        return move
    return Refuse(IllegalTransition if event is Event.LEASE else NotRunning)


TABLE: dict[tuple[State, Event], Move | Refuse] = {(state, event): _entry(state, event) for state in State for event in Event}


def transition(state: State, event: Event) -> Move:
    """The move for this pair. Raises the typed error of the table when it is refused."""
    entry = TABLE[state, event]
    if isinstance(entry, Refuse):
        raise entry.error(f"a run that is {state} cannot take the event {event}")
    return entry


def to_sql() -> str:
    """``store/sql/transitions.sql``: the table as rows, replaced as a whole at every migration."""
    rows = []
    for (state, event), entry in TABLE.items():
        if isinstance(entry, Move):
            effects = "{" + ",".join(entry.effects) + "}"
            rows.append(f"  ('{state}', '{event}', '{entry.state}', '{effects}', null)")
        else:
            rows.append(f"  ('{state}', '{event}', null, '{{}}', '{entry.error.code}')")
    return (
        "-- Generated from domain/transitions.py by `make generate`. Do not edit.\n"
        "delete from perdure.transitions;\n"
        "insert into perdure.transitions (state, event, next_state, effects, refusal) values\n" + ",\n".join(rows) + ";\n"
    )


def to_markdown() -> str:
    """``docs/state_machine.md``."""
    lines = [
        "# The states of a run",
        "",
        "Generated from `domain/transitions.py` by `make generate`. Do not edit.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> Pending",
    ]
    lines += [f"    {s} --> {m.state}: {e}" for (s, e), m in _MOVES.items() if s is not m.state]
    lines += [f"    {s} --> [*]" for s in State if s.terminal]
    lines += ["```", "", "| state | event | next | effects in the same commit |", "|---|---|---|---|"]
    for (s, e), entry in TABLE.items():
        if s.terminal:
            continue
        if isinstance(entry, Move):
            lines.append(f"| {s} | {e} | {entry.state} | {', '.join(entry.effects) or '–'} |")
        else:
            lines.append(f"| {s} | {e} | refused: `{entry.error.code}` | |")
    lines += ["", f"Every event on {', '.join(s for s in State if s.terminal)} is refused with `{RunFinished.code}`.", ""]
    return "\n".join(lines)
