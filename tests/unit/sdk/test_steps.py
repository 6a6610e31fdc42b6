"""Steps: E8, E9, E10, L11."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import (
    ConcurrentUnnamed,
    InputChanged,
    InvalidDeclaration,
    NotEncodable,
    ResultUndecodable,
    RetryPolicy,
    Run,
    StepFailed,
    agent,
    gather,
    step,
)
from perdure.testing import Simulation


@dataclass
class Page:
    url: str
    size: int


class Calls(list[Any]):
    def note(self, what: Any) -> None:
        self.append(what)


async def test_outside_a_run_a_step_is_its_function() -> None:
    @step(retries=5)
    async def double(n: int) -> int:
        """Doubles."""
        return n * 2

    @step
    def half(n: int) -> int:
        return n // 2

    assert await double(2) == 4
    assert half(4) == 2
    assert await half.aio(4) == 2
    assert double.__name__ == "double"
    assert double.__doc__ == "Doubles."
    assert asyncio.iscoroutinefunction(double)
    assert not asyncio.iscoroutinefunction(half)


def test_a_done_step_is_not_done_again() -> None:
    calls = Calls()

    @step
    async def fetch(url: str) -> Page:
        calls.note(url)
        return Page(url, len(url))

    @agent
    async def main(run: Run) -> int:
        first = await fetch("a")
        second = await fetch("bb")
        assert isinstance(first, Page)
        await run.wait_signal("go")
        return first.size + second.size

    sim = Simulation(main).signal("go", after=5).run()
    assert (sim.result, calls, sim.record.epoch) == (3, ["a", "bb"], 2)
    assert list(sim.record.journal) == ["step:fetch#0", "step:fetch#1", "wait:go#0"]


def test_a_call_that_does_not_fit_names_the_step() -> None:
    @step
    async def fetch(url: str) -> str:
        return url

    @agent
    async def main(run: Run) -> None:
        await fetch()  # type: ignore[call-arg]

    assert Simulation(main, max_retries=0).run().error.message == "step fetch: missing a required argument: 'url'"


def test_replay_costs_no_round_trip() -> None:
    @step
    async def work(n: int) -> int:
        return n

    @agent
    async def main(run: Run) -> int:
        total = 0
        for n in range(5):
            total += await work(n)
        await run.wait_signal("go")
        return total

    sim = Simulation(main).signal("go", after=5).run()
    assert [commit.op for commit in sim.commits] == ["step.end"] * 5 + ["wait", "finish"]


def test_results_without_a_declared_type_are_plain_from_the_first_time() -> None:
    seen = Calls()

    @step
    async def fetch():  # type: ignore[no-untyped-def]  # the point of the test
        return Page("a", 1)

    @agent
    async def main(run: Run) -> None:
        seen.note(await fetch())
        await run.sleep(100)
        seen.note(await fetch.options(name="other")())

    Simulation(main).run()
    assert seen == [{"url": "a", "size": 1}] * 3


def test_scopes_nest_and_ordinals_start_at_zero_inside_a_step() -> None:
    @step
    async def inner(n: int) -> int:
        return n

    @step
    async def outer(n: int) -> int:
        return await inner(n) + await inner(n + 1)

    @agent
    async def main(run: Run) -> int:
        return await outer(1) + await outer(10)

    sim = Simulation(main).run()
    assert sim.result == 1 + 2 + 10 + 11
    assert list(sim.record.journal) == [
        "step:outer#0/step:inner#0",
        "step:outer#0/step:inner#1",
        "step:outer#0",
        "step:outer#1/step:inner#0",
        "step:outer#1/step:inner#1",
        "step:outer#1",
    ]


def test_unnamed_at_once_is_an_error_and_named_is_not() -> None:
    @step
    async def fetch(n: int) -> int:
        await asyncio.sleep(1)
        return n

    @step(key=lambda n: f"n{n}")
    async def keyed(n: int) -> int:
        await asyncio.sleep(1)
        return n

    @agent
    async def unnamed(run: Run) -> tuple[int, ...]:
        return await gather(fetch(1), fetch(2))

    @agent
    async def named(run: Run) -> list[int]:
        return [*await gather(*(keyed(n) for n in range(3))), *await gather(fetch.options(key="a")(7), fetch.options(key="b")(8))]

    refused = Simulation(unnamed, max_retries=0).run()
    assert refused.state == "Failed"
    assert refused.error is not None
    assert refused.error.type == ConcurrentUnnamed.code
    assert "key=" in refused.error.message
    sim = Simulation(named).run()
    assert sim.result == [0, 1, 2, 7, 8]
    assert "step:keyed=n1" in sim.record.journal


def test_calls_are_counted_in_the_order_of_the_calls() -> None:
    @step
    async def fetch(n: int) -> int:
        return n

    @agent
    async def main(run: Run) -> int:
        one, two = fetch(1), fetch(2)
        await two
        return await one

    sim = Simulation(main).run()
    assert [bytes(entry.output) for entry in sim.record.journal.values()] == [b"2", b"1"]
    assert list(sim.record.journal) == ["step:fetch#1", "step:fetch#0"]


def test_retries_with_backoff() -> None:
    calls = Calls()

    @step(retries=3, backoff=10, max_backoff=15)
    async def flaky() -> str:
        calls.note(asyncio.get_running_loop().time())
        if len(calls) < 4:
            raise ConnectionError("no")
        return "done"

    @agent
    async def main(run: Run) -> str:
        return await flaky()

    sim = Simulation(main).run()
    assert sim.result == "done"
    pauses = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert 5 <= pauses[0] <= 10
    assert all(7.5 <= pause <= 15 for pause in pauses[1:])
    assert sim.record.log[-3].data["attempts"] == 4


def test_non_retryable_fails_at_once_and_is_recorded() -> None:
    calls = Calls()

    @step(retries=5, non_retryable=(KeyError,))
    async def broken() -> None:
        calls.note(1)
        raise KeyError("gone")

    @agent
    async def main(run: Run) -> str:
        try:
            await broken()
        except StepFailed as error:
            await run.wait_signal("go")
            return f"{error.error.type} {error.retryable}"
        return "?"

    sim = Simulation(main).signal("go", after=1).run()
    assert (sim.result, len(calls)) == ("KeyError False", 1)
    assert sim.record.journal["step:broken#0"].state == "failed"


def test_a_failure_that_the_agent_handles_is_an_outcome() -> None:
    calls = Calls()

    @step
    async def broken() -> None:
        calls.note("broken")
        raise ValueError("bad")

    @step
    async def fallback() -> str:
        calls.note("fallback")
        return "fallback"

    @agent
    async def main(run: Run) -> str:
        with pytest.raises(StepFailed, match="ValueError: bad") as caught:
            await broken()
        assert caught.value.retryable
        result = await fallback()
        await run.wait_signal("go")
        return result

    sim = Simulation(main).signal("go", after=1).run()
    assert (sim.result, calls) == ("fallback", ["broken", "fallback"])
    assert [entry.state for entry in sim.record.journal.values()] == ["failed", "succeeded", "satisfied"]


def test_a_failure_that_ends_the_attempt_is_tried_again_by_the_next() -> None:
    calls = Calls()

    @step
    async def flaky() -> str:
        calls.note(1)
        if len(calls) == 1:
            raise ConnectionError("no")
        return "done"

    @agent
    async def main(run: Run) -> str:
        return await flaky()

    sim = Simulation(main).run()
    assert (sim.state, sim.result, len(calls), sim.record.attempt) == ("Succeeded", "done", 2, 2)


def test_inner_failures_are_forgotten_when_the_outer_step_tries_again() -> None:
    calls = Calls()

    @step
    async def inner() -> str:
        calls.note(1)
        if len(calls) == 1:
            raise ConnectionError("no")
        return "done"

    @step(retries=1)
    async def outer() -> str:
        return await inner()

    @agent
    async def main(run: Run) -> str:
        return await outer()

    sim = Simulation(main).run()
    assert sim.result == "done"
    assert {key: entry.state for key, entry in sim.record.journal.items()} == {
        "step:outer#0/step:inner#0": "succeeded",
        "step:outer#0": "succeeded",
    }


def test_inner_results_survive_the_outer_retry() -> None:
    calls = Calls()

    @step
    async def inner() -> int:
        calls.note("inner")
        return 7

    @step(retries=1)
    async def outer() -> int:
        got = await inner()
        calls.note("outer")
        if calls.count("outer") == 1:
            raise ConnectionError("no")
        return got

    @agent
    async def main(run: Run) -> int:
        return await outer()

    assert Simulation(main).run().result == 7
    assert calls == ["inner", "outer", "outer"]


def test_timeout_is_of_one_try() -> None:
    calls = Calls()

    @step(timeout=10, retries=1, backoff=0)
    async def slow() -> str:
        calls.note(1)
        await asyncio.sleep(30 if len(calls) == 1 else 9)
        return "done"

    @step(timeout=1)
    async def never() -> None:
        await asyncio.Event().wait()

    @agent
    async def main(run: Run) -> list[str]:
        first = await slow()
        try:
            await never()
        except StepFailed as error:
            return [first, error.error.type]
        return []

    sim = Simulation(main).run()
    assert sim.result == ["done", "step-timed-out"]
    assert sim.clock.now == pytest.approx(10 + 9 + 1)


def test_a_timeout_of_the_body_itself_is_its_own() -> None:
    @step(timeout=100)
    async def body() -> None:
        async with asyncio.timeout(1):
            await asyncio.sleep(5)

    @agent
    async def main(run: Run) -> str:
        try:
            await body()
        except StepFailed as error:
            return error.error.type
        return "?"

    assert Simulation(main).run().result == "TimeoutError"


@pytest.mark.parametrize(("policy", "result", "times"), [("reuse", "v1", 1), ("redo", "v2", 2), ("fail", None, 1)])
def test_changed_inputs(policy: Any, result: str | None, times: int) -> None:
    calls = Calls()
    attempts = Calls()

    @step(on_input_change=policy)
    async def write(version: int) -> str:
        calls.note(version)
        return f"v{version}"

    @agent
    async def main(run: Run) -> str:
        attempts.note(1)
        text = await write(min(len(attempts), 2))
        await run.wait_signal("go")
        await run.wait_signal("go")
        return text

    sim = Simulation(main, max_retries=0).signal("go", after=1).signal("go", after=2).run()
    assert len(calls) == times
    assert "agent.StepInputChanged" in sim.kinds()
    if result is None:
        assert sim.error is not None
        assert sim.error.type == InputChanged.code
    else:
        assert sim.result == result
        assert len(attempts) == 3


def test_a_result_that_no_longer_decodes_is_an_error_and_not_redone() -> None:
    calls = Calls()
    kind: list[Any] = [str]

    @agent
    async def main(run: Run) -> None:
        async def body() -> Any:
            calls.note(1)
            return "text"

        body.__annotations__["return"] = kind[0]
        await step(name="load")(body)()
        kind[0] = int
        await run.wait_signal("go")

    sim = Simulation(main, max_retries=0).signal("go", after=1).run()
    assert sim.error is not None
    assert sim.error.type == ResultUndecodable.code
    assert "load" in sim.error.message
    assert len(calls) == 1


def test_a_result_without_json_form_fails_where_it_arises() -> None:
    @step(retries=3)
    async def load() -> object:
        return object()

    @agent
    async def main(run: Run) -> None:
        await load()

    sim = Simulation(main, max_retries=3).run()
    assert (sim.state, sim.record.attempt) == ("Failed", 1)
    assert sim.error is not None
    assert sim.error.type == NotEncodable.code


def test_phase_and_name() -> None:
    @step(name="crawl-all", phase="research")
    async def crawl() -> None: ...

    @agent
    async def main(run: Run) -> None:
        await crawl()
        await crawl.options(phase="later", retry=RetryPolicy(2))()

    sim = Simulation(main).run()
    assert [event.data["phase"] for event in sim.record.log if event.kind == "step.succeeded"] == ["research", "later"]
    assert list(sim.record.journal) == ["step:crawl-all#0", "step:crawl-all#1"]


def test_methods_are_steps_too() -> None:
    class Crawler:
        def __init__(self) -> None:
            self.client = object()

        @step
        async def fetch(self, n: int) -> int:
            return n

    @agent
    async def main(run: Run) -> int:
        crawler = Crawler()
        result = await crawler.fetch(4)
        await run.wait_signal("go")
        assert isinstance(result, int)
        return result

    sim = Simulation(main).signal("go", after=1).run()
    assert sim.result == 4
    assert "agent.StepInputChanged" not in sim.kinds()


def test_declarations_that_cannot_work() -> None:
    async def plain() -> None: ...

    async def stream() -> Any:
        yield 1

    with pytest.raises(InvalidDeclaration):
        step(name="a/b")(plain)
    with pytest.raises(InvalidDeclaration):
        step(step(plain))
    with pytest.raises(InvalidDeclaration):
        step(stream)
    with pytest.raises(InvalidDeclaration):
        step(retries=-1)(plain)


def test_types_that_are_not_there_at_run_time_are_said_so() -> None:
    async def body() -> Missing:  # type: ignore[name-defined]  # noqa: F821
        return 1

    load = step(body)

    @agent
    async def main(run: Run) -> None:
        await load()

    sim = Simulation(main, max_retries=0).run()
    assert sim.error is not None
    assert sim.error.type == InvalidDeclaration.code
    assert "Missing" in sim.error.message


def test_a_step_that_is_cancelled_while_it_commits_is_recorded() -> None:
    calls = Calls()

    ran = asyncio.Event()

    @step(key="only")
    async def work() -> int:
        calls.note(1)
        ran.set()
        return len(calls)

    @agent
    async def main(run: Run) -> list[Any]:
        task = asyncio.create_task(work())
        await ran.wait()
        task.cancel()
        await asyncio.wait([task])
        return [task.cancelled(), await work()]

    sim = Simulation(main).run()
    assert (sim.result, len(calls)) == ([True, 1], 1)


def test_timeouts_of_the_agent_around_a_commit_stay_timeouts() -> None:
    @step
    async def work() -> None:
        await asyncio.sleep(10)

    @agent
    async def main(run: Run) -> str:
        try:
            async with asyncio.timeout(5):
                await work()
        except TimeoutError:
            return "timeout"
        return "?"

    assert Simulation(main).run().result == "timeout"


def test_a_run_that_a_step_has_failed_says_which() -> None:
    @step
    async def flaky() -> None:
        raise RuntimeError("service said 503")

    @agent
    async def calls(run: Run, input: Any) -> None:
        await flaky()

    done = Simulation(calls).run()
    assert done.state == "Failed"
    assert done.error is not None
    assert (done.error.type, done.error.message) == ("RuntimeError", "step flaky: service said 503")
