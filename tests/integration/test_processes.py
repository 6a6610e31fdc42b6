"""Worker pods as real processes: how they end, what is known of it, and that nothing outlives the one who started them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from perdure_operator.local.processes import Launch, Leash, PodExit, Process, WorkerPod, describe

FOREVER = "import time\nwhile True: time.sleep(60)"
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n{FOREVER}"


@pytest.fixture
async def leash() -> AsyncIterator[Leash]:
    found = await Leash.start()
    yield found
    await found.release()


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def start(code: str, leash: Leash, folder: Path, name: str = "p") -> Process:
    return await Process.start(python(code), env=dict(os.environ), cwd=folder, log=folder / f"{name}.log", leash=leash)


async def printed(file: Path, text: str) -> None:
    """Waits until ``text`` is in the log."""
    async with asyncio.timeout(20):
        while not file.exists() or text not in file.read_text():  # noqa: ASYNC110, ASYNC240  another process writes it
            await asyncio.sleep(0.01)


async def gone(*pids: int) -> None:
    async with asyncio.timeout(20):
        while any(_alive(pid) for pid in pids):  # noqa: ASYNC110  no event of somebody else's child
            await asyncio.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Pod:
    """Starts a worker pod of two small programs."""

    def __init__(self, leash: Leash, folder: Path) -> None:
        self.leash, self.folder = leash, folder

    async def start(self, sidecar: str, agent: str, grace: float = 5.0) -> WorkerPod:
        env = {**os.environ, "PERDURE_SOCKET": str(self.folder / "agent.sock")}
        launch = [
            Launch(python(code), env, self.folder, self.folder / f"{name}.log", grace)
            for name, code in (("sidecar", sidecar), ("agent", agent))
        ]
        return await WorkerPod.start(uuid4(), "worker-1", "default/worker", sidecar=launch[0], agent=launch[1], leash=self.leash)

    async def end(self, sidecar: str, agent: str) -> PodExit:
        return await (await self.start(sidecar, agent)).wait()


@pytest.fixture
def pod(leash: Leash, tmp_path: Path) -> Pod:
    return Pod(leash, tmp_path)


# -------------------------------------------------------------------------------------------------------- processes


async def test_exit_code_and_output(leash: Leash, tmp_path: Path) -> None:
    process = await start("import sys, os; print(os.getcwd(), os.read(0, 1)); sys.exit(3)", leash, tmp_path)
    assert await process.wait() == 3
    assert (tmp_path / "p.log").read_text() == f"{tmp_path} b''\n", "its standard input is empty"


async def test_a_log_is_appended_to(leash: Leash, tmp_path: Path) -> None:
    for _ in range(2):
        await (await start("print('line')", leash, tmp_path)).wait()
    assert (tmp_path / "p.log").read_text() == "line\nline\n"


async def test_a_program_that_is_not_there(leash: Leash, tmp_path: Path) -> None:
    process = await Process.start(["no-such-program"], env=dict(os.environ), cwd=tmp_path, log=tmp_path / "p.log", leash=leash)
    assert await process.wait() == 127
    assert "no-such-program" in (tmp_path / "p.log").read_text()
    assert "not found" in describe(127)


async def test_a_folder_that_is_not_there(leash: Leash, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await Process.start(["true"], env={}, cwd=tmp_path / "none", log=tmp_path / "p.log", leash=leash)


async def test_stop_asks_and_then_kills(leash: Leash, tmp_path: Path) -> None:
    polite = await start(FOREVER, leash, tmp_path, "polite")
    assert await polite.stop(20) == -signal.SIGTERM
    stubborn = await start(STUBBORN, leash, tmp_path, "stubborn")
    await printed(tmp_path / "stubborn.log", "ready")
    assert await stubborn.stop(0.1) == -signal.SIGKILL


async def test_what_a_process_leaves_in_its_group_is_killed(leash: Leash, tmp_path: Path) -> None:
    code = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])\nprint(child.pid, flush=True)"
    await (await start(code, leash, tmp_path)).wait()
    await gone(int((tmp_path / "p.log").read_text()))


def test_exit_codes_in_words() -> None:
    assert describe(0) == "exited with code 0"
    assert describe(-9) == "was killed by SIGKILL"
    assert describe(None) == "was not started"


# ------------------------------------------------------------------------------------------------------------- pods


async def test_a_pod_whose_work_is_over(pod: Pod) -> None:
    found = await pod.end("pass", FOREVER)
    assert (found.sidecar, found.agent, found.clean, found.reason) == (0, -signal.SIGTERM, True, "Completed")


async def test_an_agent_that_breaks(pod: Pod) -> None:
    found = await pod.end(FOREVER, "raise SystemExit(1)")
    assert (found.agent, found.clean, found.broken, found.reason) == (1, False, True, "AgentExited")
    assert found.words == "agent exited with code 1"


async def test_the_sidecar_reports_an_agent_that_broke(pod: Pod) -> None:
    """It ends by itself after the agent: the run was given back in order, so the pod is clean."""
    watch = "import os, time\nwhile not os.path.exists('gone'): time.sleep(0.01)"
    found = await pod.end(watch, "open('gone', 'w').close(); raise SystemExit(1)")
    assert (found.agent, found.sidecar, found.clean) == (1, 0, True)


async def test_an_agent_that_is_killed_is_not_broken(pod: Pod) -> None:
    started = await pod.start(FOREVER, FOREVER)
    started.agent.send(signal.SIGKILL)
    found = await started.wait()
    assert (found.agent, found.broken, found.reason) == (-signal.SIGKILL, False, "AgentKilled")


async def test_a_sidecar_that_breaks_takes_the_agent_along(pod: Pod) -> None:
    found = await pod.end("raise SystemExit(2)", FOREVER)
    assert (found.sidecar, found.agent, found.clean, found.reason) == (2, -signal.SIGTERM, False, "SidecarExited")
    assert found.words == "sidecar exited with code 2"


async def test_an_agent_whose_sidecar_was_killed_has_no_grace(pod: Pod) -> None:
    started = await pod.start(FOREVER, STUBBORN, grace=600)
    await printed(pod.folder / "agent.log", "ready")
    started.sidecar.send(signal.SIGKILL)
    found = await asyncio.wait_for(started.wait(), 20)
    assert (found.sidecar, found.agent, found.reason) == (-signal.SIGKILL, -signal.SIGKILL, "SidecarExited")


@pytest.mark.parametrize("killed", ["agent", "sidecar"])
async def test_a_pod_has_ended_when_what_it_detached_has_too(pod: Pod, killed: str) -> None:
    """In a session of its own, its parent gone: neither a group nor a tree of processes leads to it."""
    code = f"import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nprint(os.getpid(), 'detached', flush=True)\n{FOREVER}"
    agent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], start_new_session=True)\n{FOREVER}"
    started = await pod.start(FOREVER, agent)
    await printed(pod.folder / "agent.log", "detached")
    left = int((pod.folder / "agent.log").read_text().split()[0])
    getattr(started, killed).send(signal.SIGKILL)
    await started.wait()
    assert not _alive(left)


async def test_stopping_gives_the_agent_its_grace(pod: Pod) -> None:
    code = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('ready', flush=True)\n{FOREVER}"
    started = await pod.start(FOREVER, code)
    await printed(pod.folder / "agent.log", "ready")
    started.stop()
    found = await started.wait()
    assert (found.agent, found.stopped, found.reason) == (0, True, "Stopped")


async def test_stopping_in_a_hurry_kills(pod: Pod) -> None:
    started = await pod.start(FOREVER, STUBBORN, grace=60)
    await printed(pod.folder / "agent.log", "ready")
    started.stop(0.1)
    assert (await started.wait()).agent == -signal.SIGKILL


# --------------------------------------------------------------------------------------------------------- the leash

OWNER = """
import asyncio, sys
from pathlib import Path
from perdure_operator.local.processes import Leash, Process

async def main():
    leash = await Leash.start()
    for n in range(3):
        code = sys.argv[1]
        process = await Process.start([sys.executable, "-c", code], env={}, cwd=Path.cwd(), log=Path(f"{n}.log"), leash=leash)
        print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [FOREVER, STUBBORN], ids=["polite", "stubborn"])
async def test_nothing_outlives_its_owner(tmp_path: Path, number: signal.Signals, code: str) -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, code, stdout=asyncio.subprocess.PIPE, cwd=tmp_path)
    assert owner.stdout is not None
    pids = [int(await owner.stdout.readline()) for _ in range(3)]
    children = [child.pid for child in psutil.Process(owner.pid).children()]
    assert len(children) == 4, "three processes and the guardian"
    owner.send_signal(number)
    await owner.wait()
    await gone(*pids, *children)


async def test_a_process_is_known_before_it_is_the_program(tmp_path: Path) -> None:
    """The owner dies in the moment of the start; whichever of the two is faster, nothing stays."""
    code = OWNER.replace("await asyncio.sleep(600)", "import os; os.kill(os.getpid(), 9)")
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, FOREVER, stdout=asyncio.subprocess.PIPE, cwd=tmp_path)
    assert owner.stdout is not None
    pids = [int(line) for line in (await owner.stdout.read()).split()]
    await gone(*pids)


async def test_a_group_from_elsewhere_is_ended_with_its_own_signal(tmp_path: Path) -> None:
    handler = "lambda *_: (print('int', flush=True), sys.exit(0))"
    code = f"import signal, sys\nsignal.signal(signal.SIGINT, {handler})\nprint('ready', flush=True)\n{FOREVER}"
    with (tmp_path / "x.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*python(code), stdout=log, start_new_session=True)
    await printed(tmp_path / "x.log", "ready")
    leash = await Leash.start()
    leash.add(process.pid, signal.SIGINT)
    await leash.release()
    assert await process.wait() == 0
    assert "int" in (tmp_path / "x.log").read_text()


async def test_a_process_that_has_ended_is_forgotten(leash: Leash, tmp_path: Path) -> None:
    process = await start("pass", leash, tmp_path)
    await process.wait()
    process.send(signal.SIGKILL)  # does nothing: the number may belong to somebody else by now
    assert process.code == 0
