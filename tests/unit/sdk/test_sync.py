"""Synchronous agents, steps and tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import pytest

from perdure import EffectUnknown, Run, StepFailed, SyncRun, agent, gather, step, tool
from perdure.testing import Provider, Simulation, kill_everywhere
from perdure.testing.record import Event, RunRecord

WHO: ContextVar[str] = ContextVar("who", default="nobody")


@step
def double(n: int) -> int:
    return n * 2


@step
async def triple(n: int) -> int:
    await asyncio.sleep(1)
    return n * 3


def test_a_synchronous_agent_reads_like_a_script() -> None:
    mail = Provider()

    @tool(effect="external")
    def send(to: str, *, key: str = "") -> str:
        return str(mail.act(key, to)["id"])

    @agent
    def main(run: SyncRun, input: int) -> list[Any]:
        first = double(input)
        run.sleep(60)
        second = run.block_on(triple(first))
        go = run.wait_signal("go")
        run.append("note", {"n": second})
        run.checkpoint()
        return [first, second, go.payload, send("ann"), run.block_on(gather(double.aio(1), triple(2)))]

    sim = Simulation(main, 2).signal("go", "yes", after=100).run()
    assert sim.result == [4, 12, "yes", "ref-1", [2, 6]]
    assert sim.record.suspensions == 2
    mail.assert_once(1)


def test_a_synchronous_agent_and_its_steps_share_one_thread() -> None:
    """As a database connection that was opened in the agent expects."""
    threads: list[int] = []

    @step
    def inner() -> int:
        threads.append(threading.get_ident())
        return 1

    @step
    def outer() -> int:
        threads.append(threading.get_ident())
        return inner() + inner()

    @agent
    def main(run: SyncRun) -> int:
        threads.append(threading.get_ident())
        return outer()

    sim = Simulation(main).run()
    assert (sim.result, len(set(threads))) == (2, 1)
    assert threads[0] != threading.get_ident()
    assert list(sim.record.journal) == ["step:outer#0/step:inner#0", "step:outer#0/step:inner#1", "step:outer#0"]


def test_synchronous_steps_in_an_asynchronous_agent_run_in_threads_at_once() -> None:
    barrier = threading.Barrier(2, timeout=10)

    @step
    def meet(name: str) -> str:
        barrier.wait()
        return name

    @agent
    async def main(run: Run) -> list[str]:
        return list(await gather(meet.options(key="a").aio("a"), meet.options(key="b").aio("b")))

    assert Simulation(main).run().result == ["a", "b"]


def test_contextvars_are_carried() -> None:
    @step
    def who() -> str:
        return WHO.get()

    @agent
    async def main(run: Run) -> list[str]:
        WHO.set("ann")
        return [await who.aio(), await asyncio.to_thread(who.options(name="in a thread of asyncio"))]

    sim = Simulation(main).run()
    assert sim.result == ["ann", "ann"]
    assert list(sim.record.journal) == ["step:who#0", "step:in a thread of asyncio#0"]


def test_errors_cross_the_threads() -> None:
    @step
    def broken() -> None:
        raise ValueError("bad")

    @step
    def stops() -> None:
        raise StopIteration("never")

    @agent
    def main(run: SyncRun) -> list[str]:
        found = []
        for each in (broken, stops):
            try:
                each()
            except StepFailed as error:
                found.append(error.error.type)
        return found

    assert Simulation(main).run().result == ["ValueError", "RuntimeError"]


def test_a_synchronous_step_with_a_timeout_is_given_up(real_time: Callable[..., RunRecord]) -> None:
    released = threading.Event()

    @step(timeout=0.05)
    def hangs() -> None:
        released.wait(10)

    @agent
    async def main(run: Run) -> str:
        try:
            await hangs.aio()
        except StepFailed as error:
            return error.error.type
        finally:
            released.set()
        return "?"

    assert real_time(main).output == b'"step-timed-out"'


def test_a_late_receipt_of_a_tool_that_was_given_up_is_sent(real_time: Callable[..., RunRecord]) -> None:
    released = threading.Event()

    @tool(effect="external", timeout=0.05, on_unknown="fail")
    def send(*, key: str = "") -> str:
        released.wait(10)
        return "sent"

    @agent
    async def main(run: Run) -> str:
        try:
            await send.aio()
        except EffectUnknown as error:
            assert [entry.state for entry in record.ledger.entries.values()] == ["UNKNOWN"]
            released.set()
            await recorded.wait()
            return error.code
        return "?"

    record = Simulation(main).record
    recorded = asyncio.Event()
    event = record.event

    def watched(kind: str, data: Mapping[str, Any]) -> Event:
        if kind == "activity.succeeded":
            recorded.set()
        return event(kind, data)

    record.event = watched  # type: ignore[method-assign]
    real_time(main, record=record)
    assert record.output == b'"effect-unknown"'
    assert [entry.state for entry in record.ledger.entries.values()] == ["SUCCEEDED"]


def test_suspending_ends_a_synchronous_agent_too() -> None:
    ran: list[str] = []

    @agent
    def main(run: SyncRun) -> str:
        try:
            return str(run.wait_signal("go").payload)
        except BaseException as error:
            ran.append(repr(error))
            raise
        finally:
            ran.append("finally")

    sim = Simulation(main).signal("go", "x", after=5).run()
    assert (sim.result, ran) == ("x", ["finally"])


def test_a_synchronous_step_that_is_awaited_in_an_asynchronous_agent() -> None:
    @agent
    async def main(run: Run) -> int:
        return int(await double(4))  # type: ignore[misc]  # at run time it is a coroutine there

    assert Simulation(main).run().result == 8


def test_a_coroutine_on_another_loop_finds_its_way() -> None:
    """A framework that runs tools on a loop of its own, in a thread that keeps the context."""

    @agent
    async def main(run: Run) -> list[Any]:
        def framework() -> list[Any]:
            async def work() -> list[Any]:
                return [await triple(5), (await run.wait_signal("go", hold=100)).payload]

            return asyncio.run(work())

        return await asyncio.to_thread(framework)

    sim = Simulation(main).signal("go", 1).run()
    assert sim.result == [15, 1]
    assert list(sim.record.journal) == ["step:triple#0", "wait:go#0"]


def test_a_thread_without_the_context_is_told() -> None:
    @agent
    async def main(run: Run) -> str:
        found: list[str] = []

        def lost() -> None:
            try:
                asyncio.run(run.append("x"))
            except Exception as error:  # noqa: BLE001
                found.append(str(error))

        thread = threading.Thread(target=lost)
        thread.start()
        thread.join()
        return found[0]

    assert "copy_context" in Simulation(main).run().result


@pytest.mark.slow
def test_kill_everywhere_with_a_synchronous_agent() -> None:
    worlds: list[Provider] = []

    def build() -> Simulation:
        worlds.append(Provider())

        @tool(effect="external", on_unknown="query")
        def send(to: str, *, key: str = "") -> str:
            return str(worlds[-1].act(key, to)["id"])

        @send.reconcile
        def _(key: str) -> str | None:
            found = worlds[-1].find(key)
            return found["id"] if found else None

        @agent
        def main(run: SyncRun) -> list[Any]:
            n = double(2)
            run.sleep(30)
            return [n, send("ann"), run.wait_signal("go").payload, double(n)]

        return Simulation(main).signal("go", 1, after=100)

    kill_everywhere(build, lambda sim: worlds[-1].assert_once(1), seed=2)
