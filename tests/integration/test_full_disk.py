"""`perdure dev` on a disk without room, a small one of its own: it says which, what of ours is on it, and what may go."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure_operator.local.disk import DiskFull, explained
from perdure_operator.local.embedded_postgres import PostgresFailed
from perdure_operator.local.state import StateDir

ROOT = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux can mount a small disk")


@pytest.fixture
def disk(server_folder: Path) -> Iterator[Path]:
    """A file system of 24 MB: too small for a database."""
    place = server_folder / "small"
    place.mkdir(mode=0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=755", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
        place.rmdir()


def dev(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")} | {"COLUMNS": "1000"}
    command = [str(Path(sys.executable).parent / "perdure"), "dev", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@ROOT
def test_a_database_without_room(disk: Path) -> None:
    logs = disk / ".perdure" / "logs"
    logs.mkdir(parents=True)
    StateDir(disk / ".perdure").create()
    (logs / "old-1.log").write_bytes(b"x" * 3_000_000)
    found = dev(disk)
    assert found.returncode == 1
    assert f"error: the disk of {disk} is full: " in found.stderr
    assert "No space left on device" in found.stderr
    assert f"Make room on {disk}, 100 MB at least" in found.stderr
    assert f"{logs}, 3 MB: logs of pods and gateways" in found.stderr
    assert "`perdure dev --fresh` deletes all of that" in found.stderr
    assert "Traceback" not in found.stderr
    assert "no value" not in found.stderr


@ROOT
def test_fresh_makes_room_where_there_is_none_at_all(disk: Path) -> None:
    state = StateDir(disk / ".perdure")
    state.create()
    with (state.logs / "old-1.log").open("wb", buffering=0) as log, contextlib.suppress(OSError):
        while log.write(b"x" * 65536):
            pass
    found = dev(disk)
    assert found.returncode == 1
    assert f"error: the disk of {disk} is full: 0 MB of 25 MB are free" in found.stderr
    assert state.made, "what may be deleted still can be told"
    found = dev(disk, "--fresh")
    assert "is full" in found.stderr, "it is too small all the same"
    assert not (state.logs / "old-1.log").exists()
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "x"), PostgresFailed("FATAL: No space left on device")],
)
def test_what_a_full_disk_raises(tmp_path: Path, error: Exception) -> None:
    state = StateDir(tmp_path / "mine")
    state.create()
    (state.postgres / "base").mkdir(parents=True)
    (state.postgres / "base" / "1").write_bytes(b"x" * 2_000_000)
    with pytest.raises(DiskFull) as raised, explained(state):
        raise error
    assert f"{state.postgres}, 2 MB: the database, all runs and their results" in raised.value.advice
    assert f"`perdure dev --fresh --state-dir {state.path}`" in raised.value.advice


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "x"), PostgresFailed("FATAL: lock file exists")])
def test_other_faults_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explained(StateDir(tmp_path)):
        raise error
    assert raised.value is error
