"""Random agents, killed at random: they come to the same result, do every effect once, and do no recorded step again."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import Run, agent, gather, step, tool
from perdure.testing import Provider, Simulation
from perdure.testing.process import Fault


@dataclass(frozen=True)
class Do:
    """A piece of an agent. ``kind``: step, wait, tool, sleep, child, plain, or seq and par of ``parts``; a step has its parts inside."""

    kind: str
    number: int = 0
    parts: tuple[Do, ...] = ()


leaves = st.builds(Do, st.sampled_from(["step", "wait", "tool", "sleep", "child", "plain"]), st.integers(0, 2))
programs = st.recursive(
    leaves,
    lambda inner: st.builds(
        Do, st.sampled_from(["seq", "seq", "par", "step"]), st.integers(0, 2), st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=8,
)
faults = st.dictionaries(st.integers(1, 30), st.sampled_from(["before", "after", "lost"]), max_size=4)


class Interpreter:
    """An agent that does a program. In ``par`` each branch gives its operations a key of their own."""

    def __init__(self, program: Do) -> None:
        self.program = program
        self.provider = Provider()
        self.recorded: set[str] = set()
        self.again: list[str] = []

        @tool(effect="external", on_unknown="query", scope=("where",))
        async def act(where: str, *, key: str = "") -> str:
            return str(self.provider.act(key, where)["what"])

        @act.reconcile
        async def _(key: str) -> str | None:
            found = self.provider.find(key)
            return str(found["what"]) if found else None

        @step
        async def body(run: Run, number: int, parts: tuple[Do, ...], where: str) -> list[Any]:
            return [number, *[await self.do(run, part, "", f"{where}.{n}") for n, part in enumerate(parts)]]

        @agent
        async def child(run: Run, input: int) -> int:
            await run.sleep(input + 2)
            return input * 10

        @agent
        async def main(run: Run) -> Any:
            return await self.do(run, self.program, "", "")

        self.act, self.body, self.child, self.main = act, body, child, main

    async def do(self, run: Run, what: Do, branch: str, where: str) -> Any:
        """``where``: place in the program. ``branch``: place below the last ``par`` of this scope, for the keys; empty outside of one."""
        key = f"{branch}{where}" if branch else None
        match what.kind:
            case "step":
                return await self.body.options(key=key, name=f"s{what.number}")(run, what.number, what.parts, where)
            case "wait":
                return (await run.wait_signal(f"w{what.number}", key=key, hold=what.number)).name
            case "tool":
                return await self.act(where)
            case "sleep":
                await run.sleep(what.number * 2, key=key)
                return "slept"
            case "child":
                started = await run.spawn(pool="child", input=what.number, result=int, key=key)
                return (await started.join(key=key)).result
            case "plain":
                await asyncio.sleep(what.number)
                return "plain"
            case "seq":
                return [await self.do(run, part, branch, f"{where}.{n}") for n, part in enumerate(what.parts)]
            case _:
                return list(await gather(*(self.do(run, part, "par", f"{where}.{n}") for n, part in enumerate(what.parts))))

    def run(self, planned: dict[int, Fault]) -> Simulation:
        sim = Simulation(self.main, agents={"child": self.child}, seed=1)
        for commit, fault in planned.items():
            sim.kill_at(commit, fault)
        for number in range(3):
            for count in range(10):
                sim.signal(f"w{number}", after=5 * (count + 1), id=f"{count}")
        return sim.run()


@settings(max_examples=150)
@given(programs, faults)
def test_killed_anywhere_a_random_agent_comes_to_the_same_end(program: Do, planned: dict[int, Fault]) -> None:
    plain, killed = Interpreter(program), Interpreter(program)
    expected, got = plain.run({}), killed.run(planned)
    assert (got.state, got.result) == (expected.state, expected.result) == ("Succeeded", expected.result)
    killed.provider.assert_once(len(plain.provider.calls))
    got.assert_effects_once()
    assert set(got.record.journal) == set(expected.record.journal)
    assert "agent.StepInputChanged" not in got.kinds()
    recorded = Counter(event.data["key"] for event in got.record.log if event.kind.startswith("step."))
    assert set(recorded.values()) <= {1}


@settings(max_examples=60)
@given(programs)
def test_the_same_seed_makes_the_same_run(program: Do) -> None:
    one, other = Interpreter(program).run({}), Interpreter(program).run({})
    assert [(event.kind, event.at) for event in one.record.log] == [(event.kind, event.at) for event in other.record.log]
