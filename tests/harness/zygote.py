"""Starts gateway processes in milliseconds: imports the program once, then forks for each gateway that it is asked for.

One JSON object a line comes in, ``{"env": {...}, "log": path}``, and one line goes out, the process id. A gateway is a process of its own
in every respect: killing one harms nothing else. When standard input ends, so do all gateways.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

import perdure_operator.wiring  # noqa: F401 - what a gateway imports when it starts
from perdure_operator.main import main


def serve(env: dict[str, str], log: str) -> None:
    """The child: a gateway as ``perdure-operator gateway`` is one."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(env)
    sys.argv = ["perdure-operator", "gateway"]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        print(end, file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def loop() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: a killed gateway is gone at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve(order["env"], order["log"])
        children.append(pid)
        print(pid, flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    loop()
