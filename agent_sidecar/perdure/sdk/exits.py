"""How this process ends: a port, so that tests can end an attempt without ending the process.

A run that has let its pod go must not run another line of agent code: no ``finally``, no exception for a framework to swallow. That is
``os._exit``, after the standard streams are flushed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Final, Protocol

DONE: Final = 0
AGENT_FAILED: Final = 1
LEASE_LOST: Final = 75
TERMINATED: Final = 143


class Exits(Protocol):
    def leave(self, code: int) -> None:
        """Ends the process with this exit code. In production it does not return."""


class ProcessExits:
    def leave(self, code: int) -> None:
        for handler in logging.root.handlers:
            with contextlib.suppress(Exception):
                handler.flush()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
