"""Agents as processes: exit codes, suspension, and a fresh copy of the process for each run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sdk.fake_sidecar import PATIENCE, FakeSidecar, fake_sidecar

import perdure
from perdure import InvalidDeclaration, Run, agent
from perdure.sdk.exits import LEASE_LOST
from perdure.testing import Simulation
from perdure.testing.record import RunRecord

SOURCE_ROOT = Path(perdure.__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="forks need Linux")

PROLOGUE = """
from __future__ import annotations
import asyncio, atexit, json, os, random, signal, subprocess, sys, tempfile, time
from pathlib import Path
from perdure import Run, SyncRun, agent, step, tool

served = 0
print("imported", flush=True)
"""
EPILOGUE = """
if __name__ == "__main__":
    main.serve()
"""


class AgentProcess:
    """A running agent. ``lines``: what it has written to standard output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.lines: list[str] = []
        self.errors = b""

    async def line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            text = (await self._process.stdout.readline()).decode().rstrip()
        self.lines.append(text)
        return text

    async def error(self) -> str:
        assert self._process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            return (await self._process.stderr.readline()).decode()

    async def end(self) -> int:
        async with asyncio.timeout(PATIENCE):
            out, self.errors = await self._process.communicate()
        self.lines += out.decode().splitlines()
        assert self._process.returncode is not None
        return self._process.returncode

    def tell(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


@contextlib.asynccontextmanager
async def agent_process(sidecar: FakeSidecar, code: str, **env: str) -> AsyncIterator[AgentProcess]:
    script = sidecar.socket.parent / "agent.py"
    script.write_text(PROLOGUE + code + EPILOGUE)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        env={**inherited, "PYTHONPATH": str(SOURCE_ROOT), "PERDURE_SOCKET": str(sidecar.socket), **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    running = AgentProcess(process)
    try:
        yield running
    finally:
        running.kill()
        await process.wait()


def a_run(input: object = None) -> RunRecord:
    @agent
    async def unused(run: Run) -> None: ...

    return Simulation(unused, input).record


async def test_finished(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run, input: int) -> int:
    atexit.register(print, "atexit")
    return input + 1
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code) as process:
        assert await process.line() == "imported"
        record = a_run(41)
        await sidecar.hold(record)
        assert await process.end() == 0
        assert (record.state, record.output, process.lines[1:]) == ("Succeeded", b"42", ["atexit"])


async def test_without_a_sidecar_it_says_so_at_once_and_goes_on_trying(tmp_path: Path) -> None:
    code = "@agent\nasync def main(run: Run) -> int:\n    return 5\n"
    later = tmp_path / "later.sock"
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code, PERDURE_SOCKET=str(later)) as process:
        said = await process.error()
        assert f"no sidecar at {later}" in said
        assert "perdure dev" in said
        later.symlink_to(sidecar.socket)
        record = a_run()
        await sidecar.hold(record)
        assert await process.end() == 0
        assert (record.state, process.errors) == ("Succeeded", b""), "it is said once"


async def test_suspended_ends_at_once_with_its_streams_flushed(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run) -> None:
    atexit.register(print, "atexit")
    print("before", end="")
    try:
        await run.wait_signal("go")
    finally:
        print("finally")
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code) as process:
        record = a_run()
        await sidecar.hold(record)
        assert await process.end() == 0
        assert (record.state, process.lines) == ("Suspended", ["imported", "before"])


async def test_failed_is_reported_with_a_traceback_in_the_log(tmp_path: Path) -> None:
    code = """
@agent
def main(run: SyncRun) -> None:
    raise ValueError("bad luck")
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code) as process:
        record = a_run()
        await sidecar.hold(record)
        assert await process.end() == 1
        assert record.error is not None
        assert (record.state, record.error.type, record.error.message) == ("Pending", "ValueError", "bad luck")
        assert b"Traceback" in process.errors


@pytest.mark.parametrize("how", ["sys.exit(3)", "raise KeyboardInterrupt"])
async def test_an_agent_that_exits_has_failed(tmp_path: Path, how: str) -> None:
    code = f"""
@agent
async def main(run: Run) -> None:
    {how}
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code) as process:
        record = a_run()
        await sidecar.hold(record)
        assert await process.end() == 1
        assert record.failures == 1


async def test_a_lost_lease(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run) -> None:
    await run.append("there")
    await run.wait_signal("go", hold=100)
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code) as process:
        await sidecar.hold(a_run())
        await sidecar.until(lambda: len(sidecar.operations) == 2)
        await sidecar.push({"lost": "superseded"})
        assert await process.end() == 75


async def test_told_to_end(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run) -> None:
    await run.append("there")
    await asyncio.sleep(100)
"""
    async with fake_sidecar(tmp_path) as sidecar:
        async with agent_process(sidecar, code) as process:
            await sidecar.until(lambda: sidecar.connections)
            process.tell(signal.SIGTERM)
            assert await process.end() == 0
        async with agent_process(sidecar, code) as process:
            await sidecar.hold(a_run())
            await sidecar.until(lambda: sidecar.operations)
            process.tell(signal.SIGTERM)
            assert await process.end() == 143


async def test_a_pod_that_retires(tmp_path: Path) -> None:
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, "@agent\nasync def main(run: Run) -> None: ...\n") as process:
        await process.line()
        await sidecar.retire()
        assert await process.end() == 0


# ------------------------------------------------------------------------------------------------ ForkPerRun

FORK = {"PERDURE_POD_REUSE": "ForkPerRun"}


async def serve_runs(sidecar: FakeSidecar, inputs: list[Any]) -> list[RunRecord]:
    """Lets the pod hold one run after the other, each with a secret of its own."""
    records = []
    for number, each in enumerate(inputs):
        sidecar.secret = f"secret-{number}"
        records.append(a_run(each))
        await sidecar.hold(records[-1])
        await sidecar.until(lambda number=number: len(sidecar.idles) > number)
    await sidecar.retire()
    return records


@LINUX
async def test_each_run_is_a_fork_with_fresh_memory(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run, input: int) -> dict:
    global served
    served += 1
    folder = tempfile.gettempdir()
    Path(folder, "left").write_text("x")
    return {
        "served": served, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "tmp": folder, "random": random.random(),
        "secret": [v for v in os.environ.values() if "secret" in v], "sockets": open_sockets(),
    }

def open_sockets() -> int:
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("socket:" in os.readlink(fd) for fd in fds if os.path.islink(fd))
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code, **FORK) as process:
        records = await serve_runs(sidecar, [1, 2, 3])
        assert await process.end() == 0
        assert process.lines == ["imported"]
        found = [json.loads(record.output) for record in records]
        assert [one["served"] for one in found] == [1, 1, 1]
        assert {one["parent"] for one in found} == {process.pid}
        for field in ("pid", "tmp", "random", "session"):
            assert len({one[field] for one in found}) == 3
        assert all(one["session"] == one["pid"] for one in found)
        assert not {one["tmp"] for one in found} & {str(left) for left in Path(found[0]["tmp"]).parent.iterdir()}
        assert not any(one["secret"] for one in found)
        assert len({one["sockets"] for one in found}) == 1
        assert sidecar.idles == [{"clean": True, "exitCode": 0}] * 3


@LINUX
async def test_exit_codes_are_told_and_a_dead_child_does_not_end_the_parent(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run, input: str) -> None:
    if input == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if input == "failed":
        raise ValueError(input)
    if input == "suspended":
        await run.wait_signal("go")
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code, **FORK) as process:
        records = await serve_runs(sidecar, ["killed", "failed", "suspended", "fine"])
        assert await process.end() == 0
        assert [idle["exitCode"] for idle in sidecar.idles] == [-9, 1, 0, 0]
        assert [record.state for record in records] == ["Running", "Pending", "Suspended", "Succeeded"]


@LINUX
async def test_whatever_a_run_leaves_behind_is_killed(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run) -> list[int]:
    double = "import os, sys, time\\nif os.fork() == 0:\\n os.setsid()\\n if os.fork() == 0:\\n  sys.stdout.write(str(os.getpid())); sys.stdout.close(); os.close(1); time.sleep(1000)\\n os._exit(0)"
    detached = subprocess.run([sys.executable, "-c", double], stdout=subprocess.PIPE, text=True).stdout
    child = subprocess.Popen(["sleep", "1000"])
    deaf = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"])
    return [int(detached), child.pid, deaf.pid]
"""  # noqa: E501
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code, **FORK) as process:
        records = await serve_runs(sidecar, [None])
        assert await process.end() == 0
        assert sidecar.idles == [{"clean": True, "exitCode": 0}]
        pids = json.loads(records[0].output)
        assert len(pids) == 3
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@LINUX
@pytest.mark.parametrize("daemon", [True, False], ids=["daemon", "a thread that no interpreter ends without"])
async def test_threads_at_import_time_are_named_and_each_run_gets_a_new_process(tmp_path: Path, daemon: bool) -> None:
    (tmp_path / "busybody.py").write_text(f"import threading\nthreading.Thread(target=threading.Event().wait, daemon={daemon}).start()\n")
    code = """
import busybody

@agent
async def main(run: Run) -> int:
    return os.getpid()
"""
    async with fake_sidecar(tmp_path) as sidecar, agent_process(sidecar, code, **FORK) as process:
        records = await serve_runs(sidecar, [None, None])
        if not daemon:
            await asyncio.sleep(0.3)
            process.tell(signal.SIGTERM)  # as the kubelet does
        assert await process.end() == 0
        assert [record.state for record in records] == ["Succeeded", "Succeeded"]
        assert records[0].output != records[1].output
        assert b"importing busybody" in process.errors
        assert process.lines == ["imported"] * 3
        assert sidecar.idles == [{"clean": True, "exitCode": 0}] * 2


AWAY = """
import perdure.sdk.forkserver, perdure.sdk.sidecar
perdure.sdk.forkserver.AWAY_SECONDS = perdure.sdk.sidecar.AWAY_SECONDS = 0.2
"""


@LINUX
@pytest.mark.parametrize("at_work", [False, True])
async def test_the_parent_and_its_child_end_without_their_sidecar(tmp_path: Path, at_work: bool) -> None:
    code = f"""{AWAY}
@agent
async def main(run: Run, input: bool) -> None:
    print(os.getpid(), flush=True)
    while input:
        await asyncio.sleep(100)
"""
    async with fake_sidecar(tmp_path, secret="s") as sidecar, agent_process(sidecar, code, **FORK) as process:
        await sidecar.hold(a_run(at_work))
        assert await process.line() == "imported"
        child = int(await process.line())
        if not at_work:
            await sidecar.until(lambda: sidecar.idles)
        await sidecar.stop()
        sidecar.socket.unlink(missing_ok=True)
        assert await process.end() == LEASE_LOST
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@LINUX
async def test_the_parent_is_told_to_end(tmp_path: Path) -> None:
    code = """
@agent
async def main(run: Run) -> None:
    await run.append("there")
    await asyncio.sleep(100)
"""
    async with fake_sidecar(tmp_path, secret="s") as sidecar:
        async with agent_process(sidecar, code, **FORK) as process:
            await process.line()
            process.tell(signal.SIGTERM)
            assert await process.end() in (0, -signal.SIGTERM)  # the latter before it has begun to serve
        async with agent_process(sidecar, code, **FORK) as process:
            record = a_run()
            await sidecar.hold(record)
            await sidecar.until(lambda: sidecar.operations)
            process.tell(signal.SIGTERM)
            assert await process.end() == 0
            assert record.state == "Pending", "the run was given back"
            assert sidecar.idles == [{"clean": False, "exitCode": 143}], "and the pod takes no other"


async def test_forks_need_the_socket_and_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @agent
    async def main(run: Run) -> None: ...

    monkeypatch.setenv("PERDURE_POD_REUSE", "ForkPerRun")
    monkeypatch.delenv("PERDURE_SOCKET", raising=False)
    with pytest.raises(InvalidDeclaration, match="PERDURE_SOCKET"):
        main.serve()
    monkeypatch.setenv("PERDURE_SOCKET", str(tmp_path / "agent.sock"))
    with pytest.raises(InvalidDeclaration, match="event loop"):
        main.serve()
    with pytest.raises(InvalidDeclaration, match="main thread"):
        await asyncio.to_thread(main.serve)
