"""Tests whose cluster cannot be had are skipped, with one line that says why; on continuous integration they fail."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
from tests.cluster.progress import say


def must_run() -> bool:
    return os.environ.get("CI", "").lower() in {"true", "1"}


def unavailable(reason: str) -> NoReturn:
    """For fixtures."""
    if must_run():
        pytest.fail(f"{reason} (with CI=true this is a failure)", pytrace=False)
    pytest.skip(reason)


def explain(reason: str) -> int:
    """For the command line: the exit code."""
    say(f"end-to-end tests {'cannot run' if must_run() else 'skipped'}: {reason}")
    return 1 if must_run() else 0
