"""Where the harness keeps what it makes: nothing of it is in the source tree.

cache()      programs, the base image, BuildKit's layers: dear to make, kept for good, shared by all checkouts
work()       one running cluster of this checkout: its data, logs, sockets and the list of its processes; wiped by the next start
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.progress import say

ROOT = Path(__file__).resolve().parents[2]
# Two checkouts run side by side: folder, cgroup and namespaces of a cluster carry this key.
KEY = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
NAME = f"perdure-test-{KEY}"


def cache() -> Path:
    """``PERDURE_TEST_BIN``, else the user's cache folder."""
    if chosen := os.environ.get("PERDURE_TEST_BIN"):
        return Path(chosen).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perdure-test"


def work() -> Path:
    # A short path: a socket's name has room for 107 bytes.
    return Path("/var/lib/perdure-test") / KEY


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Only one process at a time is inside, on this machine; the lock goes with its process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process to finish with {file.with_suffix('')}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A place to make ``target`` in, which becomes ``target`` when all went well: it is complete or absent. For who holds a lock on it."""
    new = target.with_name(f".new-{target.name}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    new.replace(target)


def fingerprint(*parts: str | bytes) -> str:
    """Names a cached thing after all that went into it."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:12]
