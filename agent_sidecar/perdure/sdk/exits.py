"""How this process ends: a port, so that tests can end an attempt without ending the process.

A run that has let its pod go must not run another line of agent code: no ``finally``, no exception for a framework to swallow. That is
``os._exit``, after the standard streams are flushed.

On Kubernetes the pod is deleted in that very moment, and a kubelet that is to stop a container that is just ending by itself can fail at it
and try again only when the grace period is over. So there (PERDURE_AWAIT_SIGTERM) the container's first process becomes one that does
nothing but wait for the kubelet: the same pid, by ``exec``, which leaves no thread of the agent.

An interpreter that ends waits for threads and children that the agent has left, and the first process of a container cannot be ended by a
SIGTERM that nobody handles. So one that comes then ends the process, as it would end any other; what the agent's own code still has to
do (a ``finally`` around ``serve``) is waited for.
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
from types import FrameType
from typing import Final, NoReturn, Protocol

DONE: Final = 0
AGENT_FAILED: Final = 1
LEASE_LOST: Final = 75
TERMINATED: Final = 143

AWAIT_SECONDS: Final = 5
"""If nobody deletes the pod (an operator that is away), it ends by itself."""

LINGER_SECONDS: Final = 1.0
"""For exit handlers, once the program is over and SIGTERM has come."""

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
        self._code: int | None = None
        self._program: FrameType | None = None

    def heed(self) -> None:
        """Notices SIGTERM even if the event loop, which has a handler already, does not come to it any more."""

        def notice(*_: object) -> None:
            self.terminated = True
            if self._code is not None:
                self._end_what_hangs()

        for number in ENDING:
            signal.signal(number, notice)
            signal.siginterrupt(number, False)

    def leave(self, code: int) -> None:
        _flush()
        if self._is_to_await():
            # A signal that comes from now on is kept for the other program. One that came before has told us by now.
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            if not self.terminated:
                _await_sigterm(code)
        os._exit(code)

    def end(self, code: int) -> NoReturn:
        """As an interpreter ends that has nothing more to do: with what waits for that in the agent's code, and is registered for it."""
        if threading.current_thread() is threading.main_thread():
            self._code, self._program = code, _outermost(sys._getframe())
            # What the interpreter waits for while it ends is interrupted, or a handler would come only after it.
            for number in ENDING:
                signal.siginterrupt(number, True)
            if self.terminated:
                self._end_what_hangs()
            if self._is_to_await():
                atexit.register(self._at_exit, code)
        sys.exit(code)

    def _end_what_hangs(self) -> None:
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, LINGER_SECONDS, LINGER_SECONDS)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if frame is None or _outermost(frame) is not self._program:
            _flush()
            os._exit(self._code or DONE)

    def _at_exit(self, code: int) -> None:
        """Registered last, it is the first of the exit handlers: it runs the others, itself among them, and does not return."""
        if not self._exiting:
            self._exiting = True
            atexit._run_exitfuncs()
            self.leave(code)

    def _is_to_await(self) -> bool:
        return not self.terminated and _first_of_container()


def _outermost(frame: FrameType) -> FrameType:
    """Of the program, while it runs; of something of the interpreter's, once it is over."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _flush() -> None:
    for handler in logging.root.handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


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
