"""The simulation itself: crashes at every commit point, and what it says when it cannot go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Agent, ChildResult, Run, Slice, agent, days, gather, step, tool
from perdure.testing import Provider, Report, Simulation, Stuck, kill_everywhere


@dataclass
class Draft:
    pages: int = 0
    words: int = 0


DRAFT = Slice("draft", Draft)


@step
async def crawl(urls: list[str]) -> list[str]:
    await asyncio.sleep(5)
    return [url.upper() for url in urls]


@step
async def write(run: Run, pages: list[str]) -> str:
    draft = run.session[DRAFT]
    draft.pages += len(pages)
    draft.words += 100
    return f"{len(pages)} pages"


@agent
async def check_facts(run: Run, input: list[str]) -> int:
    await run.sleep(30)
    return len(input)


class World:
    """A report with everything in it: a step, a child, waits, an effect outside, the session."""

    def __init__(self, policy: Any = "query", *, broken: bool = False) -> None:
        self.mail = Provider(dedupes=policy == "retry-same-key")

        @tool(effect="external", scope=("to", "subject"), on_unknown=policy, retries=3)
        async def send(to: str, subject: str, *, key: str = "") -> dict[str, Any]:
            return self.mail.act("" if broken else key, to) | {"broken": self.mail.calls} if broken else self.mail.act(key, to)

        @send.reconcile
        async def _(key: str) -> dict[str, Any] | None:
            return None if broken else self.mail.find(key)

        @agent
        async def report(run: Run, input: dict[str, list[str]]) -> list[Any]:
            facts: ChildResult[int]
            pages, facts = await gather(crawl(input["urls"]), run.spawn(pool="facts", input=input["urls"], result=int).join())
            draft = await write(run, pages)
            approval = await run.wait_signal("approve", timeout=days(3))
            receipt = await send("ann", draft)
            return [draft, facts.result, approval.payload, receipt["id"], run.session[DRAFT].pages, run.session[DRAFT].words]

        self.report: Agent[..., Any] = report

    def simulation(self, seed: int = 1) -> Simulation:
        sim = Simulation(self.report, {"urls": ["a", "b"]}, agents={"facts": check_facts}, seed=seed)
        return sim.signal("approve", "ann", after=days(2))


def test_without_faults() -> None:
    world = World()
    sim = world.simulation().run()
    assert sim.result == ["2 pages", 2, "ann", "ref-1", 2, 100]
    assert sim.clock.now == days(2).total_seconds()
    assert (sim.record.epoch, sim.record.attempt, sim.record.suspensions) == (3, 1, 2)


@pytest.mark.parametrize("policy", ["query", "ask", "retry-same-key"])
def test_killed_anywhere_it_comes_to_the_same_end_and_does_everything_once(policy: Any) -> None:
    worlds: list[World] = []

    def build() -> Simulation:
        worlds.append(World(policy))
        return worlds[-1].simulation()

    report = kill_everywhere(build, lambda sim: worlds[-1].mail.assert_once(1), seed=3, pairs=40)
    assert report == Report(commits=11, runs=11 * 3 + 40, seed=3)


def test_it_finds_a_tool_that_does_not_tell_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    """A reconcile function that never finds anything leads to a second effect, and the failure names the fault and the seed."""
    worlds: list[World] = []

    def build() -> Simulation:
        worlds.append(World(broken=True))
        return worlds[-1].simulation()

    with pytest.raises(AssertionError, match=r"fault before commit \d+ \(activity.end .*seed 7"):
        kill_everywhere(build, seed=7)
    assert "seed 7" in capsys.readouterr().err


def test_it_finds_an_effect_that_is_no_step_and_no_tool() -> None:
    sent: list[str] = []

    def build() -> Simulation:
        sent.clear()

        @agent
        async def main(run: Run) -> int:
            sent.append("mail")
            await run.append("sent")
            return len(sent)

        return Simulation(main)

    with pytest.raises(AssertionError, match="the result is 2, not 1"):
        kill_everywhere(build, seed=1)


def test_the_seed_is_printed_when_nobody_chose_one(capsys: pytest.CaptureFixture[str]) -> None:
    report = kill_everywhere(lambda: World().simulation(), pairs=1)
    assert f"seed {report.seed}" in capsys.readouterr().err


def test_a_lost_worker_is_replaced_after_its_lease() -> None:
    @agent
    async def main(run: Run) -> int:
        await asyncio.sleep(60)
        return run.attempt

    sim = Simulation(main).lose_worker(after=10).run()
    assert (sim.result, sim.clock.now) == (2, 10 + 15 + 60)


def test_retries_and_their_end() -> None:
    @agent
    async def main(run: Run) -> int:
        if run.attempt < 3:
            raise ConnectionError("no")
        return run.attempt

    assert Simulation(main).run().result == 3
    failed = Simulation(main, max_retries=1).run()
    assert (failed.state, failed.record.attempt) == ("Failed", 2)


def test_what_cannot_go_on_is_said() -> None:
    @agent
    async def main(run: Run) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match=r"run\.leased.*seed 5"):
        Simulation(main, seed=5).run()


def test_a_mistake_in_the_harness_is_not_swallowed() -> None:
    @agent
    async def main(run: Run) -> None: ...

    sim = Simulation(main)
    sim.record.perform = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        sim.run()


def test_input_that_does_not_fit_fails_for_good() -> None:
    @agent
    async def main(run: Run, input: Draft) -> None: ...

    sim = Simulation(main, {"pages": "many"}).run()
    assert (sim.state, sim.record.attempt) == ("Failed", 1)
    assert sim.error is not None
    assert sim.error.type == "invalid-input"


def test_facts_of_the_run() -> None:
    @agent
    async def main(run: Run) -> list[Any]:
        return [run.id, run.namespace, run.attempt, run.epoch, run.objective, run.spec, run.parent, run.root, run.reasons[0].kind]

    sim = Simulation(main, objective="win", spec={"priority": 3}).run()
    assert sim.result == ["run", "simulation", 1, 1, "win", {"priority": 3}, None, "run", "start"]


def test_logs_carry_where_they_come_from(caplog: pytest.LogCaptureFixture) -> None:
    @step
    async def work(run: Run) -> None:
        run.log.info("inside", extra={"more": 1})

    @agent
    async def main(run: Run) -> None:
        await work(run)
        run.log.info("outside")

    with caplog.at_level("INFO", "perdure.run"):
        Simulation(main).run()
    inside, outside = (vars(record) for record in caplog.records)
    assert (inside["run_id"], inside["attempt"], inside["step"], inside["more"]) == ("run", 1, "step:work#0", 1)
    assert outside["step"] is None


def test_simulated_deaths_say_nothing() -> None:
    """What they leave behind is collected some time, at the latest when the interpreter ends."""
    code = """
from perdure import Run, agent, gather, step, tool
from perdure.testing import Simulation, kill_everywhere

@step(key=str)
async def one(n: int) -> int:
    return n

@tool(effect="external", on_unknown="assume-not-done")
async def send(n: int) -> int:
    return n

@agent
async def main(run: Run) -> int:
    await gather(one(1), one(2))
    await send(3)
    return (await run.wait_signal("go")).payload

kill_everywhere(lambda: Simulation(main).signal("go", 4, after=1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stderr.splitlines() if not line.startswith("kill_everywhere: seed")] == []
