"""Completion for `kubectl agentrun`: kubectl runs `kubectl_complete-agentrun` with the words so far, the last one being typed.

It wants what its own commands print: a candidate a line, its description behind a tab, and at the end a colon and a bit mask. typer's
answer to the fish shell is just that, but for the last line.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys

from perdure_operator.cli.main import kubectl_app
from perdure_operator.cli.target import KUBECTL

VARIABLE = "_PERDURE_KUBECTL_COMPLETE"
FILES, NO_FILES = 0, 4
TAKES_FILES = ("submit",)


def main() -> None:
    *before, incomplete = sys.argv[1:] or [""]
    os.environ[VARIABLE] = "complete_fish"
    os.environ["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    # The word that is typed is not quoted: a quote would look like the beginning of another.
    os.environ["_TYPER_COMPLETE_ARGS"] = f"{shlex.join(['agentrun', *before])} {incomplete}"
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as answer:
        kubectl_app(prog_name=KUBECTL, complete_var=VARIABLE)
    for line in filter(None, answer.getvalue().splitlines()):
        print(line)
    print(f":{FILES if before[:1] and before[0] in TAKES_FILES else NO_FILES}")
