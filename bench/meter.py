"""Who used the CPU during a measurement: the gateway, Postgres, the agents, this driver, and everybody else.

Times are those of whole process trees, read at both ends. Children that ended in between are counted through their parent. On Linux the
clock of these figures ticks at 100 Hz: fine for seconds, useless for milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from bench.samples import Usage

DRIVER = "driver"


def _processes() -> dict[int, tuple[int, float]]:
    """Parent and CPU seconds of every process, with those of the children that it has reaped. One pass: it must not take long itself."""
    found = {}
    for process in psutil.process_iter(["ppid", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            found[process.pid] = (process.info["ppid"], times.user + times.system + reaped)
    return found


def _trees(parts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """CPU seconds of each part: its processes and all their living descendants."""
    processes = _processes()
    part_of = {pid: name for name, pids in parts.items() for pid in pids}
    seconds = dict.fromkeys(parts, 0.0)
    for pid, (_, used) in processes.items():
        above = pid
        while above not in part_of and above in processes and processes[above][0] != above:
            above = processes[above][0]
        if above in part_of:
            seconds[part_of[above]] += used
    return seconds


def _own_seconds() -> float:
    t = psutil.Process().cpu_times()
    return float(t.user + t.system)


class Meter:
    """``parts`` gives the process ids of each part, asked at both ends of a measurement."""

    def __init__(self, parts: Callable[[], dict[str, list[int]]]) -> None:
        self._parts = parts
        self._cores = psutil.cpu_count() or 1

    @contextmanager
    def measure(self) -> Iterator[Callable[[], Usage]]:
        """The yielded function gives the usage up to now; after the block it gives that of the block."""
        begin, t0, busy0 = self._read(), time.monotonic(), self._busy()
        done: list[Usage] = []

        def usage() -> Usage:
            if done:
                return done[0]
            seconds = time.monotonic() - t0
            parts = {name: max(0.0, value - begin.get(name, 0.0)) for name, value in self._read().items()}
            others = (self._busy() - busy0 - sum(parts.values())) / (seconds * self._cores)
            return Usage(seconds, self._cores, parts, max(0.0, others))

        try:
            yield usage
        finally:
            done.append(usage())

    def _read(self) -> dict[str, float]:
        return {DRIVER: _own_seconds(), **_trees(self._parts())}

    def _busy(self) -> float:
        """Seconds that all cores together were not free, including what the host took away."""
        t = psutil.cpu_times()
        return float(t.user + t.system + t.nice + getattr(t, "irq", 0.0) + getattr(t, "softirq", 0.0) + getattr(t, "steal", 0.0))
