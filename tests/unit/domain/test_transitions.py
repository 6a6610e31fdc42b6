"""The table of transitions: total, sane in every row, and the same in its generated copies (L1)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from perdure_operator.domain import transitions
from perdure_operator.domain.errors import BY_CODE, RunFinished
from perdure_operator.domain.run import ACTIVE, TERMINAL, Effect, Event, State
from perdure_operator.domain.transitions import TABLE, Move, Refuse, transition

MOVES = [(state, event, entry) for (state, event), entry in TABLE.items() if isinstance(entry, Move)]
REFUSALS = [(state, event, entry) for (state, event), entry in TABLE.items() if isinstance(entry, Refuse)]


def test_the_table_is_total() -> None:
    assert set(TABLE) == {(state, event) for state in State for event in Event}
    assert set(State) == ACTIVE | TERMINAL


@pytest.mark.parametrize(("state", "event", "entry"), REFUSALS)
def test_a_refusal_raises_its_typed_error(state: State, event: Event, entry: Refuse) -> None:
    with pytest.raises(entry.error) as caught:
        transition(state, event)
    assert BY_CODE[caught.value.code] is entry.error
    assert not caught.value.retryable


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_terminal_run_refuses_everything(state: State) -> None:
    assert {TABLE[state, event] for event in Event} == {Refuse(RunFinished)}


@pytest.mark.parametrize(("state", "event", "move"), MOVES)
class TestEveryMove:
    def test_only_a_lease_starts_a_worker(self, state: State, event: Event, move: Move) -> None:
        starts = move.state is State.RUNNING and state is not State.RUNNING
        assert starts == (event is Event.LEASE) == (Effect.GRANT in move.effects)

    def test_leaving_running_frees_the_pod_and_the_open_effects(self, state: State, event: Event, move: Move) -> None:
        leaves = state is State.RUNNING and move.state is not State.RUNNING
        assert leaves == (Effect.RELEASE in move.effects) == (Effect.ORPHAN in move.effects)

    def test_a_worker_that_did_not_end_by_itself_is_fenced(self, state: State, event: Event, move: Move) -> None:
        """A worker that suspended or finished has said so in this commit; any other must lose its epoch. A terminal run needs no fence."""
        must = state is State.RUNNING and not move.state.terminal and event not in (Event.SUSPEND, Event.WAKE)
        assert must == (Effect.REVOKE in move.effects)

    def test_release_and_orphan_come_before_the_epoch_moves(self, state: State, event: Event, move: Move) -> None:
        if Effect.REVOKE in move.effects:
            assert move.effects[:3] == (Effect.RELEASE, Effect.ORPHAN, Effect.REVOKE)

    def test_an_end_is_finished_last(self, state: State, event: Event, move: Move) -> None:
        assert move.state.terminal == (Effect.FINISH in move.effects) == (move.effects[-1:] == (Effect.FINISH,))

    def test_the_active_clock_runs_exactly_while_pending_or_running(self, state: State, event: Event, move: Move) -> None:
        ticking = {State.PENDING, State.RUNNING}
        assert (state in ticking and move.state not in ticking) == (Effect.CLOCK_OFF in move.effects and state is not State.SUSPENDED)
        assert (state not in ticking and move.state in ticking) == (Effect.CLOCK_ON in move.effects)

    def test_whoever_becomes_pending_is_queued_once(self, state: State, event: Event, move: Move) -> None:
        becomes = move.state is State.PENDING and state is not State.PENDING
        assert becomes == (Effect.ENQUEUE in move.effects)

    def test_an_attempt_is_counted_when_one_failed_or_was_lost(self, state: State, event: Event, move: Move) -> None:
        assert (Effect.ATTEMPT in move.effects) == (event in (Event.LOSE, Event.RETRY))

    def test_no_effect_twice(self, state: State, event: Event, move: Move) -> None:
        assert len(set(move.effects)) == len(move.effects)


def test_every_active_state_can_reach_every_end_but_success_only_by_running() -> None:
    for state in ACTIVE:
        ends = {move.state for at, _, move in MOVES if at is state and move.state.terminal}
        assert ends == (TERMINAL if state is State.RUNNING else TERMINAL - {State.SUCCEEDED})


def test_the_generated_sql_is_the_table() -> None:
    assert files("perdure_operator.store").joinpath("sql/00_transitions.sql").read_text() == transitions.to_sql()


def test_the_generated_document_is_the_table() -> None:
    assert (Path(__file__).parents[3] / "docs/state_machine.md").read_text() == transitions.to_markdown()
