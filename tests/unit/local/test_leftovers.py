"""Only what an earlier session has started is ended, known by what it was started with."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from perdure_operator.local.dev import _runtime_of
from perdure_operator.local.leftovers import end_leftovers
from perdure_operator.local.state import Session


class Sleepers:
    def __init__(self) -> None:
        self._ends = ExitStack()

    def start(self, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "60"], env=env)
        self._ends.callback(process.wait)
        self._ends.callback(process.kill)
        return process

    def close(self) -> None:
        self._ends.close()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    found = Sleepers()
    yield found
    found.close()


def test_pods_and_gateways_of_the_session_are_ended_and_nobody_else(sleepers: Sleepers, tmp_path: Path) -> None:
    runtime, secret = tmp_path / "perdure-1", tmp_path / "secret"
    ours = [sleepers.start(PERDURE_SOCKET=f"{runtime}/worker-1/agent.sock"), sleepers.start(PERDURE_TOKEN_SECRET_FILE=str(secret))]
    others = [
        sleepers.start(), sleepers.start(PERDURE_SOCKET=""), sleepers.start(PERDURE_SOCKET=f"{runtime}2/worker-1/agent.sock"),
        sleepers.start(PERDURE_TOKEN_SECRET_FILE=f"{secret}2"), sleepers.start(PERDURE_STATE=str(runtime)),
    ]  # fmt: skip
    assert end_leftovers(secret, runtime) == 2
    assert [process.wait(1) for process in ours] == [-9, -9]
    assert end_leftovers(secret, None) == 0
    assert [process.poll() for process in others] == [None] * len(others)


@pytest.mark.parametrize("folder", ["", "/", "/home", tempfile.gettempdir(), f"{tempfile.gettempdir()}/perdure-1/.."])
def test_a_folder_that_we_have_not_made_is_nobodys(folder: str) -> None:
    assert _runtime_of(Session(1, "", [], "", "", folder)) is None
    assert _runtime_of(Session(1, "", [], "", "", f"{tempfile.gettempdir()}/perdure-1")) == Path(tempfile.gettempdir()) / "perdure-1"
    assert _runtime_of(None) is None
