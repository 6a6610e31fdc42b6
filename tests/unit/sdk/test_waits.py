"""Waits and suspension: W1-W5, and "suspending never raises"."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import BaseModel

from perdure import (
    InputChanged,
    InvalidDeclaration,
    ResultUndecodable,
    Run,
    StepFailed,
    WaitTimedOut,
    agent,
    at,
    days,
    gather,
    signal,
    step,
    timer,
    tool,
)
from perdure.testing import Simulation


class Approval(BaseModel):
    by: str
    ok: bool = True


def test_a_signal_wakes_with_its_payload() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        approval = await run.wait_signal("approve", Approval)
        return [approval.payload.by, approval.name, approval.id, [reason.kind for reason in run.reasons]]

    sim = Simulation(main).run()
    assert sim.suspended
    assert sim.record.suspensions == 1
    sim.signal("approve", {"by": "ann"}, id="s1").run()
    assert sim.result == ["ann", "approve", "s1", ["signal"]]


def test_a_signal_that_came_before_counts_and_signals_queue() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        return [(await run.wait_signal("n")).payload for _ in range(3)]

    sim = Simulation(main).signal("n", 1).signal("n", 2, id="x").signal("n", 2, id="x").signal("n", 3).run()
    assert sim.result == [1, 2, 3]
    assert sim.record.suspensions == 0


def test_sleep_waits_without_a_process_and_is_not_begun_again() -> None:
    @agent
    async def main(run: Run) -> str:
        await run.sleep(days(3))
        await run.wait_signal("go")
        return "awake"

    sim = Simulation(main).run()
    assert sim.clock.now == days(3).total_seconds()
    assert (sim.record.suspensions, sim.record.epoch) == (2, 2)
    assert sim.signal("go").run().result == "awake"
    assert sim.clock.now == days(3).total_seconds()


def test_time_passes_by_hand_too() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.sleep(100)

    sim = Simulation(main).advance(99)
    assert sim.suspended
    assert sim.advance(1).state == "Succeeded"


def test_a_crash_does_not_lengthen_a_sleep() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.sleep(1000)

    sim = Simulation(main).advance(600)
    sim.kill_at(2, "before").run()
    assert sim.clock.now == 1000


def test_sleep_until() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.sleep_until(datetime(2026, 1, 2, 1, tzinfo=timezone(timedelta(hours=1))))

    assert Simulation(main).run().clock.now == 86400


def test_a_short_sleep_keeps_the_pod() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.sleep(1)

    sim = Simulation(main).run()
    assert (sim.state, sim.record.suspensions, sim.clock.now) == ("Succeeded", 0, 1)


def test_hold_keeps_the_pod_for_a_while() -> None:
    @agent
    async def main(run: Run) -> str:
        return str((await run.wait_signal("go", hold=30)).payload)

    soon = Simulation(main).signal("go", "soon", after=29).run()
    late = Simulation(main).signal("go", "late", after=31).run()
    assert (soon.result, soon.record.suspensions) == ("soon", 0)
    assert (late.result, late.record.suspensions) == ("late", 1)
    assert [event.at for event in late.record.log if event.kind == "run.suspended"] == [30]


def test_hold_of_the_agent_is_the_default() -> None:
    @agent(hold=30)
    async def main(run: Run) -> None:
        await run.wait_signal("go")

    assert Simulation(main).signal("go", after=29).run().record.suspensions == 0


def test_timeout_raises_for_one_signal() -> None:
    @agent
    async def main(run: Run) -> str:
        try:
            await run.wait_signal("never", timeout=60)
        except WaitTimedOut:
            return f"timed out, {run.reasons[0].kind}"
        return "?"

    sim = Simulation(main).run()
    assert (sim.result, sim.clock.now) == ("timed out, timeout", 60)


def test_any_all_and_a_timeout_as_a_branch() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        one = await run.wait(signal("a"), signal("b", Approval), timer(100))
        two = await run.wait(signal("a"), signal("a"), timer(5), mode="all")
        three = await run.wait(signal("never"), timeout=7)
        four = await run.wait(at(datetime(2026, 1, 1, 0, 1, tzinfo=UTC)))
        return [
            one.first.index,
            one.first.payload.by,
            [fired.payload for fired in two.fired],
            three.timed_out,
            three.fired,
            four.first.kind,
        ]

    sim = Simulation(main).signal("b", {"by": "bob"}, after=10).signal("a", 1, after=11).signal("a", 2, after=12).run()
    assert sim.result == [1, "bob", [1, 2, None], True, [], "timer"]


def test_a_late_timer_says_so() -> None:
    @agent
    async def main(run: Run) -> float:
        waited = await run.wait(timer(10))
        return waited.first.late_seconds

    sim = Simulation(main).run()
    assert sim.result == 0
    late = Simulation(main)
    late.advance(0)
    late.clock.move_to(3610)
    assert late.run().result == 3600


def test_a_signal_of_another_type_is_dropped_and_the_wait_goes_on() -> None:
    @agent
    async def main(run: Run) -> list[str]:
        one = await run.wait_signal("approve", Approval)
        await run.sleep(60)
        two = await run.wait_signal("approve", Approval)
        return [one.payload.by, two.payload.by]

    sim = Simulation(main, max_retries=0).signal("approve", {"no": 1}).run()
    assert sim.suspended
    assert list(sim.record.waits.open) == ["wait:approve#0~1"]
    sim.signal("approve", 5).signal("approve", {"by": "ann"}).signal("approve", {"by": "bob"}).run()
    # Every attempt sees the same: the dropped ones are told once, and the second wait has kept its place.
    assert sim.result == ["ann", "bob"]
    assert sim.kinds().count("agent.SignalRejected") == 2
    assert list(sim.record.journal) == ["wait:approve#0", "wait:approve#0~1", "wait:approve#0~2", "sleep:#0", "wait:approve#1"]


def test_a_dropped_signal_stays_dropped_when_later_code_could_read_it() -> None:
    kinds: list[Any] = [Approval]

    @agent
    async def main(run: Run) -> Any:
        first = (await run.wait_signal("approve", kinds[0])).payload
        await run.wait_signal("go")
        return first

    sim = Simulation(main).signal("approve", {"no": 1}).signal("approve", {"by": "ann"}).run()
    assert sim.suspended
    kinds[0] = dict
    assert sim.signal("go").run().result == {"by": "ann"}


def test_a_checkpoint_beside_a_wait_that_goes_on_keeps_its_place() -> None:
    @agent
    async def main(run: Run) -> str:
        async def keep() -> None:
            if run.cursor() is None:
                await run.wait_signal("note")
                await run.checkpoint(cursor="noted")

        approved, _ = await gather(run.wait_signal("approve", Approval), keep())
        return approved.payload.by

    sim = Simulation(main).signal("approve", 1).run()
    assert sim.signal("note").run().suspended
    assert sim.signal("approve", {"by": "ann"}).run().result == "ann"


@pytest.mark.parametrize("mode", ["any", "all"])
def test_of_several_conditions_only_what_does_not_fit_is_dropped(mode: Any) -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        waited = await run.wait(signal("a", int), signal("b", Approval), mode=mode)
        return [[item.index, item.name, item.payload] for item in waited.fired]

    sim = Simulation(main).signal("b", "x").signal("a", 1, after=1).run()
    if mode == "all":
        assert sim.suspended
        assert [signal.name for signal in sim.record.waits.signals if signal.bound_to] == ["b"]
        sim.signal("b", {"by": "ann"}, after=1).run()
    assert sim.result == [[0, "a", 1], [1, "b", {"by": "ann", "ok": True}]][: 2 if mode == "all" else 1]
    assert sim.kinds().count("agent.SignalRejected") == 1


def test_a_dropped_signal_does_not_keep_the_timeout_from_coming() -> None:
    @agent
    async def main(run: Run) -> str:
        try:
            await run.wait_signal("approve", Approval, timeout=100)
        except WaitTimedOut as error:
            return str(error)
        return "?"

    sim = Simulation(main).signal("approve", 1, after=40).run()
    assert sim.result == "wait:approve#0: nothing happened in 100.0 s"
    assert sim.clock.now == 100


def test_a_timer_goes_on_when_a_signal_beside_it_is_dropped() -> None:
    @agent
    async def main(run: Run) -> list[str]:
        return [fired.kind for fired in (await run.wait(signal("a", int), timer(100))).fired]

    sim = Simulation(main).signal("a", "x", after=40).run()
    assert (sim.result, sim.clock.now) == (["timer"], 100)


def test_a_good_signal_survives_the_timeout_of_a_wait_for_all_that_got_a_bad_one() -> None:
    @agent
    async def main(run: Run) -> Any:
        waited = await run.wait(signal("a", int), signal("b", int), mode="all", timeout=100)
        return [waited.timed_out, (await run.wait_signal("a", int, timeout=10)).payload]

    assert Simulation(main).signal("a", 7).signal("b", "x").run().result == [True, 7]


def test_of_a_wait_for_all_too_what_was_dropped_stays_dropped() -> None:
    kinds: list[Any] = [int]

    @agent
    async def main(run: Run) -> list[Any]:
        waited = await run.wait(signal("a", kinds[0]), signal("b", int), mode="all")
        await run.wait_signal("go")
        return [fired.payload for fired in waited.fired]

    sim = Simulation(main).signal("a", "x").signal("b", 2).run()
    assert sim.signal("a", 5).run().suspended
    kinds[0] = Any
    assert sim.signal("go").run().result == [5, 2]


def test_a_signal_does_not_go_to_the_branch_of_a_gather_that_has_failed() -> None:
    @step
    async def check() -> None:
        raise ValueError("not good")

    @agent
    async def main(run: Run) -> Any:
        try:
            await gather(run.wait_signal("approved"), check())
        except StepFailed:
            return (await run.wait_signal("approved")).payload

    for after in (0.5, 10):
        sim = Simulation(main).signal("approved", "yes", after=after).run()
        assert sim.result == "yes", sim.kinds()


@pytest.mark.parametrize("when", [0.5, 1.5, 10])
def test_a_signal_does_not_go_to_a_wait_that_the_agent_has_given_up(when: float) -> None:
    """Given up at 1 s; the step holds the pod until 5 s, so the signal comes before, while and after the run holds its pod."""

    @step
    async def work() -> None:
        await asyncio.sleep(5)

    @agent
    async def main(run: Run) -> Any:
        async def wait() -> Any:
            try:
                async with asyncio.timeout(1):
                    return (await run.wait_signal("go")).payload
            except TimeoutError:
                return (await run.wait_signal("go")).payload

        return (await gather(wait(), work()))[0]

    assert Simulation(main).signal("go", "yes", after=when).run().result == "yes"


def test_a_wait_that_was_given_up_and_is_awaited_again_keeps_its_times() -> None:
    @agent
    async def main(run: Run) -> float:
        for _ in range(3):
            try:
                async with asyncio.timeout(1):
                    await gather(run.sleep(100, key="nap"), asyncio.sleep(2))
            except TimeoutError:
                continue
        await run.sleep(100, key="nap")
        return asyncio.get_running_loop().time()

    assert Simulation(main).run().result == 103  # 100 of the nap, and then a second for each turn of the loop


def test_what_gave_a_wait_up_need_not_come_again() -> None:
    """It was given up for a reason that is in no journal. Awaited for as long, it listens again."""
    begun: list[int] = []

    @step
    async def work() -> None:
        await asyncio.sleep(5)

    @agent
    async def main(run: Run) -> Any:
        async def wait() -> Any:
            begun.append(1)
            try:
                async with asyncio.timeout(2 if len(begun) == 1 else None):
                    return (await run.wait_signal("a")).payload
            except TimeoutError:
                return (await run.wait_signal("b")).payload

        return (await gather(wait(), work()))[0]

    sim = Simulation(main).signal("b", "second", after=10).run()
    assert sim.suspended
    assert sim.signal("a", "first").run().result == "first"


def test_one_signal_as_two_types_in_one_wait_is_refused() -> None:
    @agent
    async def main(run: Run) -> str:
        await run.wait(signal("n", int), signal("n", int), signal("m", str), mode="all", timeout=1)
        try:
            await run.wait(signal("n", int), signal("n", str), mode="all")
        except InvalidDeclaration as error:
            return str(error)
        return "taken"

    assert Simulation(main).run().result.startswith("one wait has the signal 'n' as int and as str; give them two names")


def test_an_accepted_signal_that_later_code_cannot_read_is_no_second_question() -> None:
    """Something was done with it already: to ask again would do that again."""
    kinds: list[Any] = [Any]
    sent: list[Any] = []

    @tool(effect="external")
    async def mail(to: str) -> None:
        sent.append(to)

    @agent
    async def main(run: Run) -> None:
        approved = await run.wait_signal("approve", kinds[0])
        await mail(str(approved.payload))
        await run.wait_signal("go")

    sim = Simulation(main, max_retries=0).signal("approve", "yes").run()
    kinds[0] = int
    sim.signal("go").signal("approve", 7).run()
    assert sim.error is not None
    assert (sim.error.type, sent) == (ResultUndecodable.code, ["yes"])


def test_a_key_like_that_of_a_wait_that_goes_on_is_another() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        return [(await run.wait_signal("n", key=key)).payload for key in ("doc~1", "doc", "doc~")]

    assert Simulation(main).signal("n", 1).signal("n", 2).signal("n", 3).run().result == [1, 2, 3]


def test_another_wait_under_the_same_key_is_refused() -> None:
    names = iter(["a", "b"])

    @agent
    async def main(run: Run) -> None:
        await run.wait(signal(next(names)), key="k", name="w")

    sim = Simulation(main, max_retries=0).signal("a", after=1).run()
    assert sim.error is not None
    assert sim.error.type == InputChanged.code


# ------------------------------------------------------------------------------------------------ suspension


def test_waits_at_once_suspend_once() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        found = await asyncio.gather(run.wait_signal("a"), run.wait_signal("b"), run.wait_signal("c"))
        return [one.payload for one in found]

    sim = Simulation(main).signal("c", 3, after=1).signal("a", 1, after=2).signal("b", 2, after=3).run()
    assert sim.result == [1, 2, 3]
    assert [commit.op for commit in sim.commits][:4] == ["wait", "wait", "wait", "suspend"]
    assert sim.record.suspensions == 3
    assert sim.kinds().count("wait.opened") == 3


def test_a_lone_wait_registers_and_suspends_in_one_operation() -> None:
    @agent
    async def main(run: Run) -> None:
        await run.wait_signal("a")

    assert [commit.op for commit in Simulation(main).run().commits] == ["wait"]


@pytest.mark.parametrize("own", [True, False], ids=["perdure.gather", "asyncio.gather"])
def test_a_wait_holds_the_pod_until_the_step_beside_it_is_done(own: bool) -> None:
    @step
    async def slow() -> str:
        await asyncio.sleep(50)
        return "done"

    @agent
    async def main(run: Run) -> list[Any]:
        together = gather(slow(), run.wait_signal("go")) if own else asyncio.gather(slow(), run.wait_signal("go"))
        done, go = await together
        return [done, go.payload]

    sim = Simulation(main).signal("go", 1, after=100).run()
    assert sim.result == ["done", 1]
    assert [commit.op for commit in sim.commits] == ["wait", "step.end", "suspend", "finish"]
    assert [event.at for event in sim.record.log if event.kind == "run.suspended"] == [50]


def test_what_starts_a_few_turns_of_the_loop_later_is_seen() -> None:
    """As frameworks do it, with tasks inside tasks: the wait that is there first must not end the process before the step begins."""

    @step
    async def slow() -> str:
        await asyncio.sleep(50)
        return "done"

    @agent
    async def main(run: Run) -> str:
        async def framework(depth: int) -> str:
            return await asyncio.create_task(framework(depth - 1)) if depth else await slow()

        _, done = await asyncio.gather(run.wait_signal("go"), framework(4))
        return done

    sim = Simulation(main).signal("go", after=100).run()
    assert sim.result == "done"
    assert [commit.op for commit in sim.commits] == ["wait", "step.end", "suspend", "finish"]


def test_a_wait_that_is_satisfied_while_a_step_runs_is_pushed() -> None:
    seen: list[Any] = []

    @step
    async def slow() -> None:
        await asyncio.sleep(50)

    @agent
    async def main(run: Run) -> None:
        async def listen() -> None:
            await run.wait_signal("go")
            seen.append(asyncio.get_running_loop().time())

        await gather(slow(), listen())

    sim = Simulation(main).signal("go", after=20).run()
    assert (sim.state, sim.record.suspensions, seen) == ("Succeeded", 0, [20])


def test_plain_code_in_a_branch_of_gather_holds_the_pod() -> None:
    @agent
    async def main(run: Run) -> int:
        async def compute() -> int:
            await asyncio.sleep(50)
            return 7

        result, _ = await gather(compute(), run.wait_signal("go"))
        return result

    sim = Simulation(main).signal("go", after=20).run()
    assert (sim.result, sim.record.suspensions) == (7, 0)


def test_a_wait_inside_a_step_suspends_too() -> None:
    @step
    async def ask(run: Run) -> str:
        return str((await run.wait_signal("answer")).payload)

    @agent
    async def main(run: Run) -> str:
        return await ask(run)

    sim = Simulation(main).signal("answer", "42", after=9).run()
    assert (sim.result, sim.record.suspensions) == ("42", 1)
    assert list(sim.record.journal) == ["step:ask#0/wait:answer#0", "step:ask#0"]


def test_suspending_never_raises() -> None:
    """Not even for a framework that catches everything around tools and tasks, and not in ``finally``."""
    caught: list[str] = []

    @agent
    async def main(run: Run) -> str:
        async def tool_of_a_framework() -> str:
            try:
                return str((await run.wait_signal("go")).payload)
            except Exception as error:  # noqa: BLE001
                caught.append(f"tool: {error!r}")
                return "the tool failed"
            finally:
                caught.append("finally" if run.reasons[0].kind == "start" else "woken")

        task = asyncio.create_task(tool_of_a_framework())
        try:
            return await task
        except BaseException as error:
            caught.append(f"task: {error!r}")
            raise

    sim = Simulation(main).signal("go", "fine", after=10).run()
    assert (sim.result, caught) == ("fine", ["woken"])


def test_a_crash_runs_no_finally() -> None:
    ran: list[str] = []

    @step
    async def work() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            ran.append("work")

    @agent
    async def main(run: Run) -> None:
        try:
            await work()
            await run.append("after")
        finally:
            ran.append("main")

    sim = Simulation(main).kill_at(1, "after").run()
    assert (sim.state, ran) == ("Succeeded", ["work", "main"])


def test_many_conditions_and_lanes_suspend_once() -> None:
    @agent
    async def main(run: Run) -> int:
        async def branch(n: int) -> int:
            await run.sleep(10 + n, key=str(n))
            await run.wait_signal(f"s{n}")
            return n

        return sum(await gather(*(branch(n) for n in range(5))))

    sim = Simulation(main)
    for n in range(5):
        sim.signal(f"s{n}", after=100)
    assert sim.run().result == 10
    assert sim.kinds().count("wait.opened") == 10
