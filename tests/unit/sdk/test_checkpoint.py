"""Checkpoints: the session and the root ordinals of a moment to go on from (C5, C7, E9)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from perdure import AppendSlice, Run, Slice, agent, step
from perdure.sdk.errors import Refused
from perdure.testing import Simulation, kill_everywhere
from perdure.testing.record import RunRecord, refused


@dataclass
class Progress:
    turn: int = 0
    seen: list[str] = field(default_factory=list)


PROGRESS = Slice("progress", Progress)
TALK = AppendSlice("talk", str)


def test_a_loop_that_is_driven_by_its_session_goes_on_where_it_was() -> None:
    """The ordinals matter: turn 3 must not get the recorded result of turn 0."""
    ran: list[int] = []

    @step
    async def think() -> int:
        ran.append(1)
        return len(ran)

    @agent
    async def main(run: Run) -> list[str]:
        progress = run.session[PROGRESS]
        while progress.turn < 6:
            thought = await think()
            progress.seen.append(str(thought))
            progress.turn += 1
            await run.checkpoint()
            if progress.turn == 3:
                await run.sleep(60)
        return progress.seen

    sim = Simulation(main).run()
    assert sim.result == ["1", "2", "3", "4", "5", "6"]
    assert list(sim.record.journal)[:4] == ["step:think#0", "step:think#1", "step:think#2", "sleep:#0"]


def test_what_was_in_flight_at_the_checkpoint_is_called_again() -> None:
    @step
    async def turn(run: Run, n: int) -> int:
        await run.checkpoint()
        await run.sleep(60)
        return n

    @agent
    async def main(run: Run) -> list[int]:
        progress = run.session[PROGRESS]
        results = []
        while progress.turn < 2:
            results.append(await turn(run, progress.turn))
            progress.turn += 1
            await run.checkpoint()
        return results

    sim = Simulation(main).run()
    assert sim.result == [1]
    assert [key for key in sim.record.journal if "/" not in key] == ["step:turn#0", "step:turn#1"]


def test_the_cursor() -> None:
    @agent
    async def main(run: Run) -> list[object]:
        start = run.cursor(Progress)
        for turn in range(start.turn if start else 0, 3):
            await run.checkpoint(type="phase", cursor=Progress(turn + 1))
            await run.wait_signal("go")
        return [start.turn if start else None, run.cursor()]

    sim = Simulation(main)
    for n in range(3):
        sim.signal("go", after=n + 1)
    assert sim.run().result == [3, {"turn": 3, "seen": []}]
    assert sim.record.checkpoint is not None
    assert sim.record.checkpoint.type == "phase"


def test_covers_what_the_client_had_seen() -> None:
    covered: list[int] = []
    save = RunRecord._apply

    @step
    async def work() -> None: ...

    @agent
    async def main(run: Run) -> None:
        await work()
        await run.checkpoint()
        await run.append("note", {"a": 1})
        await run.checkpoint()

    with pytest.MonkeyPatch.context() as patch:

        def apply(record: RunRecord, body: object, live: bool) -> msgspec.Struct:
            if hasattr(body, "covers_seq"):
                covered.append(body.covers_seq)
            return save(record, body, live)  # type: ignore[arg-type]

        patch.setattr(RunRecord, "_apply", apply)
        sim = Simulation(main).run()
    assert covered == [event.seq for event in sim.record.log if event.kind in ("step.succeeded", "agent.note")]


def test_a_save_that_fails_warns_and_the_run_goes_on() -> None:
    save = RunRecord._apply

    @agent
    async def main(run: Run) -> int:
        run.session[PROGRESS].turn = 7
        await run.checkpoint()
        return 1

    with pytest.MonkeyPatch.context() as patch:

        def apply(record: RunRecord, body: object, live: bool) -> msgspec.Struct:
            if hasattr(body, "covers_seq"):
                raise refused("payload-too-large", "no")
            return save(record, body, live)  # type: ignore[arg-type]

        patch.setattr(RunRecord, "_apply", apply)
        sim = Simulation(main).run()
    assert sim.result == 1
    assert "agent.CheckpointFailed" in sim.kinds()
    assert sim.session("progress")["turn"] == 7


def test_dirty_slices_travel_with_step_wait_and_end() -> None:
    @step
    async def write(run: Run) -> None:
        run.session[TALK].append("in the step")

    @agent
    async def main(run: Run) -> int:
        await write(run)
        progress = run.session[PROGRESS]
        if progress.turn == 0:
            progress.turn = 1
        await run.wait_signal("go")
        progress.turn = 2
        return len(run.session[TALK])

    sim = Simulation(main).run()
    assert sim.session("talk") == ["in the step"]
    assert sim.session("progress")["turn"] == 1
    sim.signal("go").run()
    assert sim.session("progress")["turn"] == 2
    assert (sim.result, sim.session("talk")) == (1, ["in the step"])


def test_what_a_failed_attempt_did_between_its_steps_is_not_kept() -> None:
    """The next attempt does it again."""

    @agent
    async def main(run: Run) -> list[str]:
        run.session[TALK].append(f"attempt {run.attempt}")
        if run.attempt == 1:
            raise ConnectionError("no")
        return list(run.session[TALK])

    assert Simulation(main).run().result == ["attempt 2"]


def test_a_slice_that_starts_fresh_is_an_event() -> None:
    newer = Slice("progress", Progress, version=2)
    slices = iter([PROGRESS, newer])

    @agent
    async def main(run: Run) -> int:
        declared = next(slices)
        run.session[declared].turn += 1
        await run.wait_signal("go")
        return run.session[declared].turn

    sim = Simulation(main).signal("go", after=1).run()
    assert sim.result == 1
    assert "agent.SliceStartedFresh" in sim.kinds()
    assert sim.record.slices["progress"][0].version == 2


def test_a_loop_with_checkpoints_survives_a_kill_anywhere() -> None:
    def build() -> Simulation:
        @step
        async def think(turn: int) -> str:
            return f"thought {turn}"

        @agent
        async def main(run: Run) -> list[str]:
            progress = run.session[PROGRESS]
            while progress.turn < 4:
                thought = await think(progress.turn)
                if progress.turn == 2:
                    await run.sleep(30)
                run.session[TALK].append(thought)
                progress.turn += 1
                await run.checkpoint(cursor=progress.turn)
            return list(run.session[TALK])

        return Simulation(main)

    def check(sim: Simulation) -> None:
        assert sim.result == [f"thought {turn}" for turn in range(4)]
        assert "agent.StepInputChanged" not in sim.kinds()

    kill_everywhere(build, check, seed=5, pairs=60)


def test_expected_sequence_is_for_the_caller() -> None:
    @agent
    async def main(run: Run) -> list[object]:
        seq = await run.append("a")
        try:
            await run.append("b", expected_seq=seq - 1)
        except Refused as error:
            return [error.problem_code, error.retryable, await run.append("c", expected_seq=seq)]
        return []

    result = Simulation(main).run().result
    assert result[:2] == ["concurrent-append", True]
