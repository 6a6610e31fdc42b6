"""Local processes, and worker pods made of two of them: a sidecar and an agent.

Nothing may outlive ``perdure dev``. Each process is the leader of its own group, and tells the :mod:`guardian` so *before* it becomes the
program that it is to run: a small shell writes its process id to the pipe that is its standard input, then execs. So there is no moment
at which a crash of ours would leave a process that nobody knows.

A pod ends as on a cluster: when the agent ends, the sidecar may finish what it is sending and is then terminated; when the sidecar ends
(a single-use pod's work is over) the agent is. A sidecar that was killed or broke does not come again here, and without it nothing that the
agent still does could be recorded: the agent is ended at once, whatever its grace period. Whatever was started with the pod's socket in
its environment is killed then, in whatever session it is (a run's process in a pod that forks has its own): only then does the pod count
as proven to have ended. A process that has left its session and cleared its environment is not found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

from perdure_operator.local import guardian
from perdure_operator.local.leftovers import end_pod

SIDECAR_COURTESY = 5.0, 2.0, 0.5
"""Seconds that a sidecar has to end by itself after its agent: exited with 0, exited with an error, was killed."""
AGENT_COURTESY = 1.0
"""Seconds that an agent has to end by itself after its sidecar did."""
ORPHAN_GRACE = 0.2
"""Seconds that an agent has to end after SIGTERM when its sidecar was killed or broke."""
SPOOL_SECONDS = 5.0
"""What the receipts that a killed sidecar had taken have to get to the store."""
KILL_AFTER = 5.0
"""Seconds between SIGTERM and SIGKILL for everything but an agent, whose template says."""

LEASE_LOST = 75
"""Exit code of an agent whose run was taken over elsewhere: nothing is wrong with it."""

FINISHES = "(an agent in Python calls serve(), others POST /v1/finish)"

_REGISTER = 'echo "+$$" >&0; exec "$@" 0</dev/null'


class Leash:
    """The guardian of this process and the pipe to it."""

    def __init__(self, pipe: int, process: asyncio.subprocess.Process) -> None:
        self.pipe = pipe
        self._process = process

    @classmethod
    async def start(cls) -> Leash:
        read, write = os.pipe()
        try:
            # A session of its own: Ctrl-C in the terminal is not for the guardian.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", guardian.__file__, stdin=read, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True, cwd="/"
            )
        finally:
            os.close(read)
        return cls(write, process)

    def add(self, pid: int, first: signal.Signals) -> None:
        """A process group that was started elsewhere; ``first`` is the signal that asks it to end."""
        os.write(self.pipe, f"+{pid} {int(first)}\n".encode())

    def remove(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self.pipe, f"-{pid}\n".encode())

    async def lost(self) -> None:
        """Returns when the guardian is gone: nothing holds the processes any more."""
        await self._process.wait()

    async def release(self) -> None:
        """Let the guardian go; it ends whatever it still knows."""
        os.close(self.pipe)
        await self._process.wait()


class Process:
    """One process group. ``code`` is the exit code, negative for a signal, None while it runs."""

    def __init__(self, process: asyncio.subprocess.Process, leash: Leash) -> None:
        self._process = process
        self._leash = leash
        self.pid = process.pid
        self.code: int | None = None
        self._reaper = asyncio.create_task(self._reap())

    @classmethod
    async def start(cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, leash: Leash) -> Process:
        """Raises OSError when the folder or the log cannot be used. A program that is not there exits with 127 and says so in the log."""
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", _REGISTER, "sh", *argv,
                stdin=leash.pipe, stdout=out, stderr=out, env=dict(env), cwd=cwd, start_new_session=True,
            )  # fmt: skip
        return cls(process, leash)

    async def wait(self) -> int:
        return await asyncio.shield(self._reaper)

    def send(self, number: signal.Signals) -> None:
        """To the whole group, as long as its leader has not been reaped."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def stop(self, grace: float = KILL_AFTER) -> int:
        """SIGTERM, and SIGKILL after ``grace`` seconds."""
        self.send(signal.SIGTERM)
        if not await self.ended_within(grace):
            self.send(signal.SIGKILL)
        return await self.wait()

    async def ended_within(self, seconds: float) -> bool:
        done, _ = await asyncio.wait([self._reaper], timeout=seconds)
        return bool(done)

    async def _reap(self) -> int:
        code = await self._process.wait()
        # What the leader left behind is still its group; the group's number is not given to anybody else while a member lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._leash.remove(self.pid)
        self.code = code
        return code


def describe(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "was not started"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    if code == 127:
        return "exited with code 127 (the program was not found)"
    return f"exited with code {code}"


@dataclass(frozen=True)
class Launch:
    """How to start one program."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    grace_seconds: float = KILL_AFTER


@dataclass(frozen=True)
class PodExit:
    """How a pod ended, ``seconds`` after its start.

    ``clean``: its sidecar said that its work was over; ``stopped``: we ended it; else something broke. ``proven``: no process that was
    started in it is left.
    """

    agent: int | None
    sidecar: int | None
    seconds: float
    clean: bool
    stopped: bool
    sidecar_first: bool
    pod_killed: bool = False
    proven: bool = True

    @property
    def broken(self) -> bool:
        """The program ended by itself with an error: starting it again at once would most likely give the same."""
        code = self.sidecar if self.sidecar_first else self.agent
        return not self.clean and not self.stopped and (code or 0) >= 0

    @property
    def superseded(self) -> bool:
        """The agent stopped because its run is held by another pod."""
        return self.agent == LEASE_LOST and not self.sidecar_first

    @property
    def reason(self) -> str:
        """One word for the store."""
        if self.stopped or self.clean:
            return "Stopped" if self.stopped else "Completed"
        if self.pod_killed:
            return "PodKilled"
        if self.sidecar_first:
            return "SidecarExited"
        return "AgentKilled" if (self.agent or 0) < 0 else "AgentExited"

    @property
    def words(self) -> str:
        """What happened, for people."""
        if self.stopped or self.clean:
            return "was stopped" if self.stopped else "had done its work"
        if self.sidecar_first:
            return f"sidecar {describe(self.sidecar)}"
        return f"agent {describe(self.agent)}" + ("" if self.agent else f" without finishing its run {FINISHES}")


class WorkerPod:
    """A sidecar process and an agent process that live and end together."""

    def __init__(
        self, pod_id: UUID, name: str, pool: str, sidecar: Process, agent: Process, launches: tuple[Launch, Launch], leash: Leash
    ) -> None:
        self.pod_id, self.name, self.pool = pod_id, name, pool
        self.sidecar, self.agent = sidecar, agent
        self._again, self._leash = launches[0], leash
        self._grace, self._socket = launches[1].grace_seconds, launches[1].env.get("PERDURE_SOCKET")
        self._stop = asyncio.Event()
        self._started = time.monotonic()
        self._life = asyncio.create_task(self._live())

    @classmethod
    async def start(cls, pod_id: UUID, name: str, pool: str, *, sidecar: Launch, agent: Launch, leash: Leash) -> WorkerPod:
        """Raises OSError when one of the two cannot be started; the other one is not left behind."""
        first = await _start(sidecar, leash)
        try:
            second = await _start(agent, leash)
        except BaseException:
            await first.stop()
            raise
        return cls(pod_id, name, pool, first, second, (sidecar, agent), leash)

    async def wait(self) -> PodExit:
        return await asyncio.shield(self._life)

    def stop(self, grace: float | None = None) -> None:
        """Ask both to end; ``grace`` seconds at most until the agent is killed, by default what its template says."""
        if grace is not None:
            self._grace = min(self._grace, grace)
        self._stop.set()

    def kill(self) -> None:
        """End both now, also if they stand still."""
        self._grace = 0.0
        for process in (self.agent, self.sidecar):
            process.send(signal.SIGKILL)
        self._stop.set()

    async def _live(self) -> PodExit:
        agent, sidecar, stop = (asyncio.create_task(w) for w in (self.agent.wait(), self.sidecar.wait(), self._stop.wait()))
        await asyncio.wait([agent, sidecar, stop], return_when=asyncio.FIRST_COMPLETED)
        seconds = time.monotonic() - self._started
        sidecar_first = self.agent.code is None and self.sidecar.code is not None
        orphaned = sidecar_first and self.sidecar.code != 0
        if orphaned:
            self._grace = min(self._grace, ORPHAN_GRACE)
        elif sidecar_first:
            await asyncio.wait([agent, stop], timeout=AGENT_COURTESY, return_when=asyncio.FIRST_COMPLETED)
        else:
            done, failed, killed = SIDECAR_COURTESY
            code = self.agent.code or 0
            courtesy = done if code == 0 else failed if code > 0 else killed
            await asyncio.wait([sidecar, stop], timeout=courtesy, return_when=asyncio.FIRST_COMPLETED)
            # Nobody has asked it to end yet: it was killed, and an agent that misses its sidecar ends by itself, at once.
            sidecar_first = (self.sidecar.code or 0) < 0 <= (self.agent.code or 0)
        clean = self.sidecar.code == 0
        stopped = self._stop.is_set() and not clean
        pod_killed = not stopped and max(self.agent.code or 0, self.sidecar.code or 0) < 0
        await self.agent.stop(self._grace)
        await self.sidecar.stop()
        stop.cancel()
        proven = self._socket is None or await asyncio.to_thread(end_pod, self._socket)
        if not clean:
            await self._empty_spool()
        return PodExit(self.agent.code, self.sidecar.code, seconds, clean, stopped, sidecar_first, pod_killed, proven)

    async def _empty_spool(self) -> None:
        """What the sidecar had taken and nobody has committed (pools with ``spool: Disk``) goes to the store before the pod counts as gone:
        another sidecar brings it, with the same identity."""
        spool = self._again.env.get("PERDURE_SPOOL_DIR")
        if spool is not None and any(segment.stat().st_size for segment in Path(spool).glob("*.wal")):  # noqa: ASYNC240  a few names
            again = replace(self._again, env={**self._again.env, "PERDURE_ONLY_SPOOL": "true"})
            with contextlib.suppress(OSError):
                process = await _start(again, self._leash)
                await process.ended_within(SPOOL_SECONDS)
                await process.stop()


async def _start(launch: Launch, leash: Leash) -> Process:
    return await Process.start(launch.argv, env=launch.env, cwd=launch.cwd, log=launch.log, leash=leash)
