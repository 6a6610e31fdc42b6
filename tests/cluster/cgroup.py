"""A cgroup of the cluster's own, with everything in it: programs, shims, containers.

So what belongs to a cluster is known to the kernel, whatever happened to those who started it; and no other kubelet's pods are near.
With cgroup v1 (or both versions at once) a program enters one hierarchy, while the kubelet wants the folder in all of them.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.cluster.errors import ClusterError

MOUNT = Path("/sys/fs/cgroup")
KILL_SECONDS = 20.0


class Cgroup:
    def __init__(self, name: str) -> None:
        self.name = name

    def create(self) -> None:
        for hierarchy in _hierarchies():
            (hierarchy / self.name).mkdir(exist_ok=True)
        self._programs.mkdir(exist_ok=True)

    def entering(self) -> list[str]:
        """Prefix of a command line: the process is inside before the program begins, so nothing it starts can be outside."""
        return ["sh", "-c", f'echo $$ > {self._programs}/cgroup.procs && exec "$@"', "sh"]

    def kill(self) -> None:
        """Until nobody is left: who is killed may have just started another."""
        deadline = time.monotonic() + KILL_SECONDS
        while handles := [fd for pid in self._pids() if (fd := _killed(pid)) is not None]:
            _all_end(handles, deadline)
            if time.monotonic() > deadline:
                raise ClusterError(f"processes in cgroup {self.name} do not end: {sorted(self._pids())}")

    def remove(self) -> None:
        for hierarchy in _hierarchies():
            for folder in _deepest_first(hierarchy / self.name):
                # The kernel may still be busy with it, although its processes are gone: the next start finds it and takes it over.
                with suppress(OSError):
                    folder.rmdir()

    def exists(self) -> bool:
        return any((hierarchy / self.name).exists() for hierarchy in _hierarchies())

    @property
    def _programs(self) -> Path:
        hierarchies = _hierarchies()
        # Beside the pods' folder, because with cgroup v2 a folder has either processes or folders.
        return next((folder for folder in hierarchies if folder.name == "pids"), hierarchies[0]) / self.name / "programs"

    def _pids(self) -> set[int]:
        pids: set[int] = set()
        for hierarchy in _hierarchies():
            for folder in _deepest_first(hierarchy / self.name):
                with suppress(OSError):
                    pids.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
        # 0: a process of another process namespace; nothing of ours.
        return pids - {0}


def _hierarchies() -> list[Path]:
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    # cpu,cpuacct and the like are links of one folder.
    return sorted({folder.resolve() for folder in MOUNT.iterdir() if (folder / "cgroup.procs").exists()})


def _deepest_first(top: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(top, topdown=False):
        yield Path(folder)


def _killed(pid: int) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    return fd


def _all_end(handles: list[int], deadline: float) -> None:
    for fd in handles:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        os.close(fd)
