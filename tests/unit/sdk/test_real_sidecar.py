"""The SDK against the real sidecar process: what each believes of the wire is the same."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sidecar_harness import PATIENCE, Gateway, Pod, running

import perdure
from perdure import Run, agent, protocol
from perdure.protocol import Answer, Idle, Lease, Op, Push, Refusal, Retire
from perdure.sdk.errors import Refused
from perdure.testing import Simulation
from perdure.testing.record import RunRecord

CODE = """
from __future__ import annotations
import os
from perdure import Run, agent, gather, step, tool

@step(key=lambda n: str(n))
async def work(n: int) -> int:
    return n

@tool(effect="external")
async def send(to: str, *, key: str = "") -> str:
    return key[:4]

@agent
async def main(run: Run, input: int) -> list:
    numbers = await gather(*(work(n) for n in range(20)))
    go = await run.wait_signal("go", hold=input)
    return [sum(numbers), go.payload, len(await send("ann")), os.getpid()]

if __name__ == "__main__":
    main.serve()
"""


def a_run(hold: int) -> RunRecord:
    @agent
    async def unused(run: Run) -> None: ...

    return Simulation(unused, hold).record


class Recorded(Gateway):
    """A gateway over the record of a simulation. ``leases``: how many it grants before it retires the pod."""

    def __init__(self, record: RunRecord, *, leases: int = 1) -> None:
        super().__init__()
        self.record = record
        self.leases = leases
        record.pushed = self._pushed
        self.react = self._react
        self._tasks: set[asyncio.Task[None]] = set()

    async def _react(self, pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op):
            await pod.send(self._perform(frame))
        elif isinstance(frame, Idle):
            if self.record.state == "Suspended":
                self.record.signal("go", b'"signal"', "s")
            await (self._grant(pod) if self.leases else pod.send(Retire(reason="enough")))
        elif isinstance(frame, protocol.Hello):
            self.store.held = False
            await self.greet(pod, frame)
            await self._grant(pod)

    async def _grant(self, pod: Pod) -> None:
        self.leases -= 1
        context = self.record.lease()
        await pod.send(Lease(run=self.record.run_id, epoch=self.record.epoch, context=context, grace_seconds=5.0))

    def _perform(self, op: Op) -> Answer | Refusal:
        try:
            body = self.record.perform(op.epoch, op.req, protocol.decode_operation(op.body))
        except Refused as refusal:
            return Refusal(id=op.id, problem=refusal.problem)
        return Answer(id=op.id, body=body, released=self.record.state != "Running")

    def _pushed(self, record: RunRecord, poke: protocol.Poke) -> None:
        push = Push(run=record.run_id, epoch=record.epoch, poke=protocol.encode_json(poke))
        task = asyncio.create_task(self.pod.send(push))
        self._tasks.add(task)


async def start_agent(folder: Path, socket: Path, **env: str) -> asyncio.subprocess.Process:
    script = folder / "agent.py"
    script.write_text(CODE)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    root = str(Path(perdure.__file__).parents[1])
    return await asyncio.create_subprocess_exec(
        sys.executable, str(script), env={**inherited, "PYTHONPATH": root, "PERDURE_SOCKET": str(socket), **env}
    )


@pytest.mark.parametrize("hold", [0, 60], ids=["suspends", "holds its pod"])
async def test_single_use(tmp_path: Path, hold: int) -> None:
    record = a_run(hold)
    gateway = Recorded(record)
    async with running(tmp_path, gateway) as sidecar:
        process = await start_agent(tmp_path, sidecar.socket)
        if hold:
            await gateway.until(lambda: record.waits.open)
            record.signal("go", b'"signal"', "s")
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0
        assert await sidecar.exit_code() == 0
        assert record.state == ("Succeeded" if hold else "Suspended")
        if hold:
            assert json.loads(record.output)[:3] == [190, "signal", 4]


@pytest.mark.skipif(sys.platform != "linux", reason="forks need Linux")
async def test_fork_per_run_through_a_suspension(tmp_path: Path) -> None:
    record = a_run(0)
    gateway = Recorded(record, leases=2)
    async with running(tmp_path, gateway, PERDURE_POD_REUSE="ForkPerRun") as sidecar:
        process = await start_agent(tmp_path, sidecar.socket, PERDURE_POD_REUSE="ForkPerRun")
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0
        result: list[Any] = json.loads(record.output)
        assert (record.state, record.epoch, result[:3]) == ("Succeeded", 2, [190, "signal", 4])
        assert result[3] != process.pid
