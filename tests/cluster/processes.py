"""The long-running programs of one cluster, and the file that remembers them.

Programs outlive the process that starts them (``up`` returns, a test run is killed), so every start is written down at once: name, command
line, pid, and the time the kernel says it began. Pids are used again; a pid together with its beginning is not, within one boot.
So whoever reads the file, in whatever process, can stop or restart a program, and never signals a stranger.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.errors import ClusterError, last_lines

STOP_SECONDS = 75.0
CHECK_SECONDS = 0.05


@dataclass(frozen=True)
class Program:
    name: str
    argv: list[str]
    pid: int
    began: int  # clock ticks since boot

    @contextmanager
    def handle(self) -> Iterator[int | None]:
        """A pidfd of this very process; None if it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield fd if _began(self.pid) == self.began else None
        finally:
            os.close(fd)


class Processes:
    """``folder/processes.json`` and ``folder/logs/NAME.log``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "processes.json"
        self._logs = folder / "logs"

    def start(self, name: str, argv: Sequence[str | Path], env: dict[str, str] | None = None) -> Program:
        if self.is_running(name):
            raise ClusterError(f"{name} runs already")
        self._logs.mkdir(parents=True, exist_ok=True)
        command = [str(part) for part in argv]
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True, cwd=self._file.parent
            )
        program = Program(name, command, process.pid, _began(process.pid) or 0)
        # Whoever needs its end waits on its pidfd; Popen would warn about a child that is still alive.
        process.returncode = 0
        self._write({**self._read(), name: program})
        return program

    def start_again(self, name: str) -> Program:
        """With the command line that it had before."""
        return self.start(name, self.get(name).argv)

    def stop(self, name: str, sig: signal.Signals = signal.SIGTERM) -> None:
        """Returns when the process is gone; one that is gone already is fine."""
        program = self.get(name)
        with program.handle() as fd:
            if fd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, sig)
                if not _ends(fd, STOP_SECONDS):
                    raise ClusterError(f"{name} (pid {program.pid}) did not end on {sig.name}; {last_lines(self.log(name))}")
        with suppress(ChildProcessError):
            os.waitpid(program.pid, os.WNOHANG)

    def stop_all(self) -> None:
        for name in reversed(list(self._read())):
            self.stop(name, signal.SIGKILL)

    def wait_for(self, name: str, ready: Callable[[], bool], seconds: float, what: str = "ready") -> None:
        """Until ``ready()``. Ends early, with the end of the log, when the program ends."""
        deadline = time.monotonic() + seconds
        with self.get(name).handle() as fd:
            while True:
                if fd is None or _ends(fd, 0):
                    raise ClusterError(f"{name} ended before it was {what}; {last_lines(self.log(name))}")
                if ready():
                    return
                if time.monotonic() > deadline:
                    raise ClusterError(f"{name} was not {what} after {seconds:.0f} s; {last_lines(self.log(name))}")
                _ends(fd, CHECK_SECONDS)

    def is_running(self, name: str) -> bool:
        program = self._read().get(name)
        if program is None:
            return False
        with program.handle() as fd:
            return fd is not None and not _ends(fd, 0)

    def get(self, name: str) -> Program:
        try:
            return self._read()[name]
        except KeyError:
            raise ClusterError(f"{name} was never started") from None

    def names(self) -> list[str]:
        return list(self._read())

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _read(self) -> dict[str, Program]:
        try:
            state = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        return {item["name"]: Program(**item) for item in state["programs"]} if state["boot"] == _boot() else {}

    def _write(self, programs: dict[str, Program]) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"boot": _boot(), "programs": [asdict(program) for program in programs.values()]}, indent=1))
        new.replace(self._file)


def _ends(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _began(pid: int) -> int | None:
    try:
        # The name, in brackets, may contain anything; the beginning is the 20th field after it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
