"""Ends every process group that it was told of when whoever started it is gone. Run as a script: ``python -I -S guardian.py < pipe``.

The other end of its standard input is held by ``perdure dev``. However that process dies, SIGKILL included, the kernel closes the pipe,
and end-of-file is the signal to clean up. Lines: ``+PID [SIGNAL]`` a group to end, first with SIGNAL (default SIGTERM), then with SIGKILL;
``-PID`` it has ended. Standard library only, and nothing imported that is not needed: it lives as long as the session does.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_SECONDS = 3.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, int] = {}
    for line in sys.stdin:
        words = line[1:].split()
        if line.startswith("+"):
            groups[int(words[0])] = int(words[1]) if len(words) > 1 else signal.SIGTERM
        else:
            groups.pop(int(words[0]), None)
    deadline = time.monotonic() + GRACE_SECONDS
    left = [pid for pid, first in groups.items() if _send(pid, first)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if _send(pid, 0)]
    for pid in groups:
        _send(pid, signal.SIGKILL)


def _send(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group that holds only zombies
        return False
    return True


if __name__ == "__main__":
    main()
