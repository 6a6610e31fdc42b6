"""Whether this process can be forked: it must have one thread, counted by the kernel, not by Python.

Threads of C libraries count too, and Python does not know them. When there are more, a fresh process imports the same modules one after
the other and looks after which of them there is a thread more: that names the import to blame.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

_FINDER = """
import importlib, os, sys
count = len(os.listdir("/proc/self/task"))
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException:
        continue
    now = len(os.listdir("/proc/self/task"))
    if now > count:
        print(name, now - count)
    count = now
os._exit(0 if sys.stdout.flush() is None else 1)
"""
_TIMEOUT_SECONDS = 60


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def explain() -> str:
    """One sentence that names who started threads in this process. Takes as long as its imports."""
    names = [name for name in list(sys.modules) if _is_foreign(name)]
    try:
        found = subprocess.run(
            [sys.executable, "-c", _FINDER, *names],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        found = []
    culprits = [line.split(" ")[0] for line in found if line.strip()]
    known = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if culprits:
        return f"threads are started by importing {', '.join(culprits)}; import it inside the agent instead"
    return f"threads are started by the program's own code at import time (Python knows of: {', '.join(known) or 'none'})"


def _is_foreign(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("__main__", "perdure") and not name.startswith("_")
