"""When the disk is full: which one, what of ours takes its room, and what may go.

Neither Postgres nor the operating system says more than that no space was left; and what takes the room here is all runs, on the one hand,
and logs, on the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.state import NAME, StateDir

NEEDED = 100_000_000
"""A new database has forty megabytes, and writes its log in pieces of sixteen."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = tuple(os.strerror(number) for number in _FULL)


class DiskFull(PerdureError):
    """The disk that a part of `perdure dev` writes to is full."""

    code: ClassVar[str] = "disk-full"
    status: ClassVar[int] = 507
    retryable: ClassVar[bool] = True
    action: ClassVar[str] = "Make room, then start `perdure dev` again; it goes on where it was."


@contextlib.contextmanager
def explained(state: StateDir) -> Iterator[None]:
    """Raises DiskFull in place of what a full disk makes of the work inside."""
    try:
        yield
    except (OSError, PerdureError) as error:
        if not _is_full(error):
            raise
        raise _explain(state, error) from error


def _is_full(error: OSError | PerdureError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(words in str(error) for words in _WORDS)


def _explain(state: StateDir, error: OSError | PerdureError) -> DiskFull:
    parts = [(part, what) for part, what in _ours(state) if part.exists()]
    # The fullest of the disks that something of ours is on: of a folder that root keeps for itself the database is elsewhere.
    places = {_mount(place.resolve()) for place in (state.path, *(part for part, _ in parts))}
    if isinstance(error, OSError) and error.filename is not None:
        places = {_mount(Path(os.fsdecode(error.filename)).absolute().parent)}
    disk = min(places, key=lambda place: shutil.disk_usage(place).free)
    usage = shutil.disk_usage(disk)
    told = "; ".join(
        f"{part.resolve()}, {_megabytes(_size(part.resolve()))}: {what}" for part, what in parts if _mount(part.resolve()) == disk
    )
    make_room = f"Make room on {disk}, {_megabytes(NEEDED)} at least, then start it again: it goes on where it was."
    forget = "perdure dev --fresh" if state.path.name == NAME else f"perdure dev --fresh --state-dir {shlex.quote(str(state.path))}"
    ours = f" Of Perdure's there: {told}. `{forget}` deletes all of that." if told else ""
    return DiskFull(
        f"the disk of {disk} is full: {_megabytes(usage.free)} of {_megabytes(usage.total)} are free ({error})", action=make_room + ours
    )


def _ours(state: StateDir) -> Iterator[tuple[Path, str]]:
    yield state.postgres, "the database, all runs and their results"
    yield state.logs, "logs of pods and gateways, which can be deleted while it does not run"


def _mount(path: Path) -> Path:
    """The root of the file system that this is on, or will be."""
    while not path.exists() or not path.is_mount():
        path = path.parent
    return path


def _size(folder: Path) -> int:
    """On the disk, in bytes. What goes meanwhile is not counted."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += (Path(where) / name).lstat().st_blocks * 512
    return size


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
