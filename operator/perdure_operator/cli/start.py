"""How the commands begin. The base of the distribution is for agents; what people look after runs with is an extra, and may be missing."""

from __future__ import annotations

import sys


def perdure() -> None:
    _begin("perdure")


def kubectl() -> None:
    _begin("kubectl")


def _begin(program: str) -> None:
    try:
        from perdure_operator.cli import main
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed\nThe commands are an extra: pip install 'perdure[operator]'")
    getattr(main, program)()
