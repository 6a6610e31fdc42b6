"""What a run leaves behind: every process below this one, however it was detached.

As *subreaper* this process becomes the parent of each orphan below it, so killing its children until there are none kills all
descendants. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def become_subreaper() -> None:
    """Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """This process is killed when its parent ends. Raises OSError."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_descendants(patience: float) -> bool:
    """Kills all descendants and reaps them. False if some are left after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    pause = 0.001
    while True:
        if not _reap():
            return True
        for pid in _children():
            _kill(pid)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def _reap() -> bool:
    """Reaps what has ended. False when there is no child at all."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _children() -> list[int]:
    own = os.getpid()
    listed = Path(f"/proc/self/task/{own}/children")
    if listed.exists():
        return [int(pid) for pid in listed.read_text().split()]
    if not Path("/proc").exists():
        return []
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and _parent(entry) == own]


def _parent(entry: Path) -> int:
    try:
        # "pid (command) state ppid …", and the command may hold anything
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
