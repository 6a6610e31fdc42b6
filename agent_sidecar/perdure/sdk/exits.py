"""How this process ends: a port, so that tests can end an attempt without ending the process.

A run that has let its pod go must not run another line of agent code: no ``finally``, no exception for a framework to swallow. That is
``os._exit``, after the standard streams are flushed.

On Kubernetes the pod is deleted in that very moment, and a kubelet that is to stop a container that is just ending by itself can fail at it
and try again only when the grace period is over. So there (PERDURE_AWAIT_SIGTERM) the container's first process becomes one that does
nothing but wait for the kubelet: the same pid, by ``exec``, which leaves no thread of the agent.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn, Protocol

DONE: Final = 0
AGENT_FAILED: Final = 1
LEASE_LOST: Final = 75
TERMINATED: Final = 143

AWAIT_SECONDS: Final = 5
"""If nobody deletes the pod (an operator that is away), it ends by itself."""

ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_AWAIT: Final = """\
import signal, sys
signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


class Exits(Protocol):
    def leave(self, code: int) -> None:
        """Ends the process with this exit code. In production it does not return."""


class ProcessExits:
    """``terminated``: SIGTERM has come, there is nothing to wait for."""

    def __init__(self) -> None:
        self.terminated = False
        self._exiting = False

    def heed(self) -> None:
        """Notices SIGTERM even if the event loop, which has a handler already, does not come to it any more."""

        def notice(*_: object) -> None:
            self.terminated = True

        for number in ENDING:
            signal.signal(number, notice)
            signal.siginterrupt(number, False)

    def leave(self, code: int) -> None:
        for handler in logging.root.handlers:
            with contextlib.suppress(Exception):
                handler.flush()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self._is_to_await():
            # A signal that comes from now on is kept for the other program. One that came before has told us by now.
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            if not self.terminated:
                _await_sigterm(code)
        os._exit(code)

    def end(self, code: int) -> NoReturn:
        """As an interpreter ends that has nothing more to do: with what waits for that in the agent's code, and is registered for it."""
        if self._is_to_await() and threading.current_thread() is threading.main_thread():
            atexit.register(self._at_exit, code)
        sys.exit(code)

    def _at_exit(self, code: int) -> None:
        """Registered last, it is the first of the exit handlers: it runs the others, itself among them, and does not return."""
        if not self._exiting:
            self._exiting = True
            atexit._run_exitfuncs()
            self.leave(code)

    def _is_to_await(self) -> bool:
        return not self.terminated and _first_of_container()


def _first_of_container() -> bool:
    """Whether it is this process that a kubelet signals, and Python what it runs (a frozen program would only begin again)."""
    is_python = Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)
    return os.environ.get("PERDURE_AWAIT_SIGTERM") == "true" and os.getpid() == 1 and is_python


def _await_sigterm(code: int) -> None:
    """Returns only where it cannot be."""
    with contextlib.suppress(OSError):
        # Everything in the container but this process: its end would have ended them too.
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(OSError):
        # Nobody's words are among its arguments.
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _AWAIT, str(AWAIT_SECONDS), str(code)])  # noqa: S606
