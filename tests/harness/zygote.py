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

import psutil

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
    # Not by number alone: it is used again, also for a thread of a stranger, and a signal to a thread is one to its process.
    children: list[psutil.Process] = []
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve(order["env"], order["log"])
        children = [child for child in children if child.is_running()]
        with contextlib.suppress(psutil.NoSuchProcess):
            children.append(psutil.Process(pid))
        print(pid, flush=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


if __name__ == "__main__":
    loop()
