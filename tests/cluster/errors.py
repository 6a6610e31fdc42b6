"""The errors of the harness: each one's text says what failed, and shows what the failing program said last."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

LAST_LINES = 15


class ClusterError(Exception):
    """The cluster, or something it is made of, does not work."""


class CommandError(ClusterError):
    """A command ended with a code other than 0, or not in time."""

    def __init__(self, argv: Sequence[str], how: str, stdout: str, stderr: str) -> None:
        super().__init__(f"{shlex.join(argv)}: {how}\n{(stderr.strip() or stdout.strip())[-4000:]}")
        self.stdout = stdout
        self.stderr = stderr


def last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except FileNotFoundError:
        return f"(no log: {log})"
    return "\n".join([f"last lines of {log}:", *(f"    {line}" for line in lines)])
