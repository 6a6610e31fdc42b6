"""What an earlier ``perdure dev`` on the same state folder has left running: nothing, unless its guardian was killed with it. And what
a pod has left that broke: processes that have detached themselves.

An agent that is still at work there would do again what its run is about to be asked for, so nothing else begins before it has ended.
Processes are known by what they were started with, not by number: numbers are given to others in time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from perdure_operator.domain.errors import PerdureError

PATIENCE_SECONDS = 10.0


class LeftoversAlive(PerdureError):
    """A process of an earlier session does not end."""

    code, status = "leftovers-alive", 409
    action = "End these processes, then start `perdure dev` again; its runs are as they were."


def end_leftovers(secret: Path, runtime_dir: Path | None) -> int:
    """Kills the gateways that sign with this secret and the pods below this folder; gives how many processes there were. Blocks until all
    have ended. Raises LeftoversAlive."""

    def is_ours(environ: Mapping[str, str]) -> bool:
        socket = environ.get("PERDURE_SOCKET")
        of_pod = socket is not None and runtime_dir is not None and runtime_dir in Path(socket).parents
        return of_pod or environ.get("PERDURE_TOKEN_SECRET_FILE") == str(secret)

    return _end(is_ours, "an earlier `perdure dev`")


def end_pod(socket: str) -> int:
    """Kills what was started with this pod's socket; gives how many processes there were. Blocks until all have ended: then nothing of the
    pod can act any more. Raises LeftoversAlive."""
    return _end(lambda environ: environ.get("PERDURE_SOCKET") == socket, "a pod")


def _end(is_ours: Callable[[Mapping[str, str]], bool], whose: str) -> int:
    count = 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    # Again until there is none: one of them may have been starting another.
    while left := list(_started_with(is_ours)):
        if time.monotonic() > deadline:
            raise LeftoversAlive(f"of {whose} these do not end: {', '.join(str(process.pid) for process in left)}")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ended(left)
        count += len(left)
    return count


def _started_with(is_ours: Callable[[Mapping[str, str]], bool]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            continue  # somebody else's, or gone
        if is_ours(environ) and process.pid != os.getpid() and is_alive(process):
            yield process


def ended(processes: list[psutil.Process], timeout: float = 3.0) -> bool:
    """Waits until all have ended. A zombie has: it holds no memory and no file, and reaping an orphan is the business of pid 1."""
    deadline = time.monotonic() + timeout
    while any(is_alive(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
