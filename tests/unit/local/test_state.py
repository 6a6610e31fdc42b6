"""The state folder: what it remembers, and what it deletes."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest

from perdure_operator.local.state import AlreadyRunning, Gateway, PodRecord, Session, StateDir

SESSION = Session(
    1, "2026-11-22T00:00:00+00:00", ["http://127.0.0.1:1"], "token", "dsn", "/tmp/x", [Gateway("gateway-1", "http://127.0.0.1:1", 2)]
)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    found = StateDir(tmp_path / ".perdure")
    found.create()
    return found


def test_the_session_is_found_from_a_folder_below(state: StateDir) -> None:
    below = state.path.parent / "a" / "b"
    (below / ".perdure").mkdir(parents=True)  # of somebody else
    state.write_session(SESSION)
    assert (state.path / "dev.json").stat().st_mode & 0o777 == 0o600
    found = StateDir.find(below, {})
    assert found is not None
    assert found.session() == SESSION
    state.end_session()
    stopped = StateDir.find(below, {})
    assert stopped is not None, "who has stopped it means it all the same"
    assert stopped.session() is None


def test_the_variable_names_the_folder(state: StateDir, tmp_path: Path) -> None:
    found = StateDir.find(tmp_path, {"PERDURE_STATE": str(tmp_path / "other")})
    assert found is not None
    assert found.path == tmp_path / "other"


def test_one_session_a_folder(state: StateDir) -> None:
    state.acquire()
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"):
        StateDir(state.path).acquire()


def test_pods_are_remembered_across_a_cut_line(state: StateDir) -> None:
    first, second = uuid4(), uuid4()
    state.record(PodRecord(first, "worker-1", "default/worker", "/l", 10, 11, started=1.0))
    state.record(PodRecord(first, ended=2.0, reason="exited"))
    state.record(PodRecord(second, "worker-2", "default/worker", "/l", 12, 13, started=3.0))
    with (state.path / "pods.jsonl").open("a") as file:
        file.write('{"pod": "01')
    pods = state.pods()
    assert [(p.name, p.ended, p.reason) for p in pods.values()] == [("worker-1", 2.0, "exited"), ("worker-2", 0, "")]
    assert state.pod_name(second) == "worker-2"
    assert state.pod_name(uuid4()) is None
    state.compact()
    assert state.pods() == pods


def test_fresh_deletes_what_is_ours_and_nothing_else(state: StateDir, tmp_path: Path) -> None:
    state.write_session(SESSION)
    (state.path / "postgres").mkdir()
    (state.path / "postgres.log").write_text("x")
    (state.path / "notes.txt").write_text("mine")
    state.clear()
    assert {p.name for p in state.path.iterdir()} == {"notes.txt", ".gitignore"}


def test_fresh_leaves_a_folder_alone_that_is_not_a_state_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    StateDir(tmp_path).clear()
    assert (tmp_path / "logs").is_dir()
