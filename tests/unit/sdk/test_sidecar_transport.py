"""The WebSocket session to the sidecar: resending, pushes, pings, the end of a lease."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sdk.conftest import Exits
from tests.unit.sdk.fake_sidecar import PATIENCE, FakeSidecar, fake_sidecar, problem

from perdure import Agent, EffectUnknown, NotExecuted, Run, agent, step, tool
from perdure.protocol import ActivityEnd, EventAppend, Finish, Operation, encode_json
from perdure.sdk.errors import PodRetired, Refused, SidecarUnavailable
from perdure.sdk.exits import LEASE_LOST, TERMINATED
from perdure.sdk.sidecar import Address, SidecarTransport, address_from
from perdure.testing import Simulation


@step
async def work(n: int) -> int:
    return n


@agent
async def three_steps(run: Run) -> int:
    return await work(1) + await work(2) + await work(3)


_buried: list[asyncio.Task[Any]] = []


def _awaited(coroutine: Any) -> list[str]:
    """Names of the coroutines that wait for each other."""
    names = []
    while coroutine is not None:
        names.append(getattr(coroutine, "__name__", ""))
        coroutine = getattr(coroutine, "cr_await", None)
    return names


def _bury(attempt: asyncio.Task[Any]) -> None:
    """Production would have ended the process here. Parked tasks do not end, so the loop of the test must not wait for them."""
    for task in asyncio.all_tasks():
        if task is attempt or "park" in _awaited(task.get_coro()):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            asyncio.tasks._unregister_task(task)  # type: ignore[attr-defined]
            _buried.append(task)


class Attempt:
    """An attempt over a real socket. ``code``: what it gave or left the process with."""

    def __init__(self, main: Agent[..., Any], sidecar: FakeSidecar, **options: Any) -> None:
        self.exits = Exits()
        self._main = main
        self._sidecar = sidecar
        self._options = options
        self.execution: Any = None

    async def run(self) -> int:
        transport = SidecarTransport(Address(str(self._sidecar.socket)), **self._options)
        await transport.open()
        context = await transport.context()
        task = asyncio.create_task(self._main.attempt(context, transport, self.exits, observe=self._observe))
        task.add_done_callback(lambda _: self.exits.left.set())
        async with asyncio.timeout(PATIENCE):
            await self.exits.left.wait()
        code = self.exits[0] if self.exits else task.result()
        await transport.close()
        if not task.done():
            _bury(task)
        return code

    def _observe(self, execution: Any) -> None:
        self.execution = execution


async def attempt(main: Agent[..., Any], sidecar: FakeSidecar, **options: Any) -> int:
    return await Attempt(main, sidecar, **options).run()


async def test_a_run_over_the_socket(tmp_path: Path) -> None:
    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(three_steps).record
        await sidecar.hold(record)
        assert await attempt(three_steps, sidecar) == 0
        assert (record.state, record.output) == ("Succeeded", b"6")
        assert len({req for req, _ in sidecar.operations}) == 4


@pytest.mark.parametrize("cut", ["before the commit", "after the commit"])
async def test_a_cut_connection_is_mended_and_everything_sent_again_once(tmp_path: Path, cut: str) -> None:
    def act(number: int, _: Operation) -> None:
        if number in (2, 4):
            sidecar.cut()
            if cut == "before the commit":
                raise Refused(problem("cut"))

    async with fake_sidecar(tmp_path) as sidecar:
        if cut == "before the commit":
            sidecar.react = act
        else:
            sidecar.after = act
        record = Simulation(three_steps).record
        await sidecar.hold(record)
        assert await attempt(three_steps, sidecar) == 0
        assert record.output == b"6"
        assert [event.kind for event in record.log].count("step.succeeded") == 3
        requests = [req for req, _ in sidecar.operations]
        assert len(requests) == 6
        assert len(set(requests)) == 4
        assert sidecar.connections == 3


async def test_operations_that_wait_for_a_connection_go_out_in_order(tmp_path: Path) -> None:
    @agent
    async def main(run: Run) -> None:
        sidecar.cut()
        await asyncio.gather(*(run.append(f"e{n}") for n in range(20)))

    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(main).record
        await sidecar.hold(record)
        assert await attempt(main, sidecar) == 0
        assert [event.kind for event in record.log if event.kind.startswith("agent.")] == [f"agent.e{n}" for n in range(20)]


async def test_a_restarted_sidecar_is_found_again(tmp_path: Path) -> None:
    @agent
    async def main(run: Run) -> int:
        first = await work(1)
        await sidecar.stop()
        sidecar.socket.unlink(missing_ok=True)
        restart = asyncio.create_task(later())
        second = await work(2)
        await restart
        return first + second

    async def later() -> None:
        await asyncio.sleep(0.1)
        await sidecar.start()

    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(main).record
        await sidecar.hold(record)
        assert await attempt(main, sidecar) == 0
        assert record.output == b"3"


async def test_without_a_sidecar_for_long_the_process_ends(tmp_path: Path) -> None:
    @agent
    async def main(run: Run) -> None:
        await sidecar.stop()
        sidecar.socket.unlink(missing_ok=True)
        await work(1)

    async with fake_sidecar(tmp_path) as sidecar:
        await sidecar.hold(Simulation(main).record)
        assert await attempt(main, sidecar, give_up=0.1) == LEASE_LOST
    with pytest.raises(SidecarUnavailable):
        await SidecarTransport(Address(str(tmp_path / "none.sock")), give_up=0.05).open()
    with pytest.raises(SidecarUnavailable):
        await SidecarTransport(Address(str(tmp_path / "none.sock")), give_up=0.05).context()


async def test_without_a_sidecar_the_process_ends_also_when_it_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sidecar that was there; one that comes first is waited for longer."""
    monkeypatch.setattr("perdure.sdk.sidecar.AWAY_SECONDS", 0.1)

    @agent
    async def main(run: Run) -> None:
        await sidecar.stop()
        sidecar.socket.unlink(missing_ok=True)
        await asyncio.Event().wait()

    async with fake_sidecar(tmp_path) as sidecar:
        await sidecar.hold(Simulation(main).record)
        assert await attempt(main, sidecar, give_up=600) == LEASE_LOST


async def test_what_may_help_again_is_sent_again_and_what_may_not_is_raised(tmp_path: Path) -> None:
    def react(number: int, _: Operation) -> None:
        if number <= 3:
            raise Refused(problem("unavailable", status=503, retryable=True))

    async with fake_sidecar(tmp_path, react=react) as sidecar:
        record = Simulation(three_steps).record
        await sidecar.hold(record)
        assert await attempt(three_steps, sidecar) == 0
        assert len({req for req, _ in sidecar.operations[:4]}) == 1

    def refuse(number: int, _: Operation) -> None:
        if number == 1:
            raise Refused(problem("invalid-input", status=400))

    async with fake_sidecar(tmp_path, react=refuse) as sidecar:
        record = Simulation(three_steps, max_retries=0).record
        await sidecar.hold(record)
        assert await attempt(three_steps, sidecar) == 1
        assert record.error is not None
        assert record.error.type == "refused"


async def test_pings_are_answered_by_the_loop(tmp_path: Path) -> None:
    @agent
    async def main(run: Run) -> None:
        await sidecar.push({"ping": 7})
        await sidecar.until(lambda: sidecar.pongs)

    async with fake_sidecar(tmp_path) as sidecar:
        await sidecar.hold(Simulation(main).record)
        assert await attempt(main, sidecar) == 0
        assert sidecar.pongs == [7]


async def test_a_pushed_outcome_and_a_pushed_cancel(tmp_path: Path) -> None:
    @agent
    async def main(run: Run) -> str:
        got = (await run.wait_signal("go", hold=60)).payload
        await run.append("got", got)
        await run.wait_signal("never", hold=60)
        return "?"

    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(main).record

        async def push(poke: Any) -> None:
            await sidecar.push({"push": poke})

        tasks: set[asyncio.Task[None]] = set()

        def pushed(_: Any, poke: Any) -> None:
            tasks.add(asyncio.create_task(push(json.loads(encode_json(poke)))))

        record.pushed = pushed
        await sidecar.hold(record)
        running = asyncio.create_task(attempt(main, sidecar))
        await sidecar.until(lambda: record.waits.open)
        record.signal("go", b'"now"', "1")
        await sidecar.until(lambda: "never" in str(list(record.waits.open)))
        record.cancel()
        assert await running == 0
        assert record.state == "Cancelled"
        assert record.log[-3].kind == "run.cancel_requested"


async def test_an_outcome_that_was_pushed_to_nobody_is_asked_for_after_the_reconnect(tmp_path: Path) -> None:
    @agent
    async def main(run: Run) -> str:
        return str((await run.wait_signal("go", hold=60)).payload)

    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(main).record
        await sidecar.hold(record)
        running = asyncio.create_task(attempt(main, sidecar))
        await sidecar.until(lambda: record.waits.open)
        record.pushed = lambda *_: None
        record.signal("go", b'"found"', "1")
        sidecar.cut()
        assert await running == 0
        assert record.output == b'"found"'


async def test_a_lost_lease_ends_the_process_at_once(tmp_path: Path) -> None:
    ran: list[str] = []

    @agent
    async def main(run: Run) -> None:
        try:
            await sidecar.push({"lost": "superseded"})
            await run.wait_signal("never", hold=60)
        finally:
            ran.append("finally")

    async with fake_sidecar(tmp_path) as sidecar:
        await sidecar.hold(Simulation(main).record)
        assert await attempt(main, sidecar) == LEASE_LOST
        assert ran == []


@pytest.mark.parametrize("told", ["lost", "terminated"])
async def test_the_receipt_of_a_tool_at_work_gets_out_after_the_lease_is_lost(tmp_path: Path, told: str) -> None:
    ran: list[str] = []
    runs: list[Run] = []
    acted = asyncio.Event()

    @tool(effect="external")
    async def send() -> str:
        if told == "lost":
            sidecar.record.lost(gone=False)  # type: ignore[union-attr]
            await sidecar.push({"lost": "superseded"})
        else:
            doing.execution.give_back(TERMINATED)
        await doing.execution._stop.wait()
        other = asyncio.create_task(runs[0].append("not any more"))
        for _ in range(5):
            await asyncio.sleep(0)
            other.cancel()
        assert not other.done(), "an operation that has no end cannot be cancelled either"
        acted.set()
        return "sent"

    @agent
    async def main(run: Run) -> None:
        runs.append(run)
        await send()
        ran.append("after the tool")

    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(main).record
        await sidecar.hold(record)
        doing = Attempt(main, sidecar)
        assert await doing.run() == (LEASE_LOST if told == "lost" else TERMINATED)
        assert acted.is_set()
        assert ran == []
        last = [body for _, body, *_ in sidecar.operations[-2:]]
        if told == "terminated":
            finish = last.pop()
            assert isinstance(finish, Finish)
            assert finish.outcome == "yielded"
            assert record.state == "Pending"
        assert isinstance(last[-1], ActivityEnd)
        assert [entry.state for entry in record.ledger.entries.values()] == ["SUCCEEDED"]


async def test_a_call_that_waits_for_its_next_try_is_closed_when_the_process_is_told_to_end(tmp_path: Path) -> None:
    """It has been granted and not been made: left open, a person would be asked about a call that never happened."""

    @tool(effect="external", retries=5)
    async def send() -> str:
        asyncio.get_running_loop().call_later(0.02, doing.execution.give_back, TERMINATED)
        raise NotExecuted("no connection")

    @agent
    async def main(run: Run) -> None:
        await send()

    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(main).record
        await sidecar.hold(record)
        doing = Attempt(main, sidecar)
        assert await doing.run() == TERMINATED
        assert [entry.state for entry in record.ledger.entries.values()] == ["FAILED"]
        assert record.state == "Pending"


async def test_a_thread_that_was_given_up_is_said_to_run_on_until_it_ends(tmp_path: Path) -> None:
    release = threading.Event()

    @tool(effect="external", on_unknown="fail", timeout=0.05)
    def send() -> None:
        release.wait(10)
        raise OSError("broken")

    @agent
    async def main(run: Run) -> None:
        with pytest.raises(EffectUnknown):
            await send.aio()
        release.set()
        await sidecar.until(lambda: sum(isinstance(body, ActivityEnd) for _, body in sidecar.operations) == 2)

    async with fake_sidecar(tmp_path) as sidecar:
        await sidecar.hold(Simulation(main).record)
        assert await Attempt(main, sidecar).run() == 0
        ends = [body for _, body in sidecar.operations if isinstance(body, ActivityEnd)]
        assert [(end.state, end.still_running) for end in ends] == [("unknown", True), ("unknown", False)]


async def test_what_was_on_its_way_when_the_lease_was_lost_does_not_come_back(tmp_path: Path) -> None:
    answered: list[str] = []

    @tool(effect="external")
    async def send(run: Run) -> None:
        async def note() -> None:
            answered.append(f"seq {await run.append('on its way')}")

        other = asyncio.create_task(note())
        await doing.execution._stop.wait()
        await sidecar.until(lambda: sidecar.record.log[-1].kind == "agent.on its way")  # type: ignore[union-attr]
        await sidecar.push({"ping": 1})
        await sidecar.until(lambda: sidecar.pongs)
        assert not other.done()

    @agent
    async def main(run: Run) -> None:
        await send(run)

    async def react(number: int, body: Operation) -> None:
        if isinstance(body, EventAppend):
            await sidecar.push({"lost": "superseded"})

    async with fake_sidecar(tmp_path, react=react) as sidecar:
        await sidecar.hold(Simulation(main).record)
        doing = Attempt(main, sidecar)
        assert await doing.run() == LEASE_LOST
        assert answered == []
        assert isinstance(sidecar.operations[-1][1], ActivityEnd)


async def test_a_refusal_that_means_the_attempt_is_over_ends_it(tmp_path: Path) -> None:
    def react(number: int, _: Operation) -> None:
        raise Refused(problem("not-running"))

    async with fake_sidecar(tmp_path, react=react) as sidecar:
        await sidecar.hold(Simulation(three_steps).record)
        assert await attempt(three_steps, sidecar) == LEASE_LOST


async def test_the_secret_of_the_lease_is_shown(tmp_path: Path) -> None:
    async with fake_sidecar(tmp_path, secret="s3") as sidecar:
        record = Simulation(three_steps).record
        await sidecar.hold(record)
        assert await attempt(three_steps, sidecar, secret="s3") == 0
        with pytest.raises(PodRetired):
            await SidecarTransport(Address(str(sidecar.socket)), "wrong").open()
        with pytest.raises(Refused, match="unauthorized"):
            await SidecarTransport(Address(str(sidecar.socket)), "wrong").context()


async def test_a_pod_that_retires_gives_no_run(tmp_path: Path) -> None:
    async with fake_sidecar(tmp_path) as sidecar:
        waiting: Coroutine[Any, Any, bytes] = SidecarTransport(Address(str(sidecar.socket))).context()
        task = asyncio.create_task(waiting)
        await sidecar.retire()
        with pytest.raises(PodRetired):
            await task


async def test_large_messages_pass_both_ways(tmp_path: Path) -> None:
    @step
    async def echo(text: str) -> str:
        return text

    @agent
    async def main(run: Run, input: dict[str, int]) -> list[int]:
        sizes = []
        for size in (1, 124, 125, 126, 127, 65_400, 65_536, 70_000, 1_500_000):
            sizes.append(len(await echo("é" * (size // 2) + "x" * (size % 2))))
        return sizes

    async with fake_sidecar(tmp_path) as sidecar:
        record = Simulation(main, {"x" * 300_000: 1}).record
        await sidecar.hold(record)
        assert await attempt(main, sidecar) == 0
        assert len(record.journal) == 9
        assert bytes(record.journal["step:echo#8"].output) == b'"' + "é".encode() * 750_000 + b'"'


def test_where_the_sidecar_is() -> None:
    assert address_from({"PERDURE_SOCKET": "/x.sock"}) == Address("/x.sock")
    assert address_from({}) == Address(None, 4555)
    assert address_from({"PERDURE_SOCKET": "off", "PERDURE_PORT": "99"}) == Address(None, 99)
