"""The state folder of ``perdure dev`` (``.perdure``): what makes a restart go on, and how the commands find the session.

``dev.json``    urls, token and process ids of the running session (mode 0600); gone when it has ended in order
``pods.jsonl``  a line when a pod starts and one when it ends: names, logs, process ids
``pools.json``  the folder of each pool's manifest, in which its agents run
``postgres/``   the data · ``logs/`` one file a pod and a gateway · ``secret`` signs the local tokens · ``lock`` one session a folder
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO
from uuid import UUID

import msgspec

from perdure_operator.domain.errors import PerdureError

NAME = ".perdure"
KEPT_PODS = 2000
MARK = "# The state of `perdure dev`. It can be deleted while that does not run.\n*\n"
OURS = ("dev.json", "pods.jsonl", "pools.json", "secret", "postgres", "logs", "spool")


class AlreadyRunning(PerdureError):
    """Another `perdure dev` uses this state folder."""

    code, status = "already-running", 409
    action = "To start more on it: perdure submit FILE. Otherwise stop it, or give this one a folder of its own with --state-dir."


class Gateway(msgspec.Struct, frozen=True):
    name: str
    url: str
    pid: int


class Session(msgspec.Struct, frozen=True, rename="camel"):
    """The contents of dev.json."""

    pid: int
    started_at: str
    urls: list[str]
    token: str
    dsn: str
    runtime_dir: str
    gateways: list[Gateway] = []
    postgres_pid: int = 0


class PodRecord(msgspec.Struct, rename="camel", omit_defaults=True):
    """A pod that was started here. ``ended`` is set when it is gone."""

    pod: UUID
    name: str = ""
    pool: str = ""
    log: str = ""
    agent_pid: int = 0
    sidecar_pid: int = 0
    started: float = 0
    ended: float = 0
    reason: str = ""


class StateDir:
    """Paths below one state folder, and the small files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: TextIO | None = None
        self._names: dict[UUID, str] = {}

    @classmethod
    def find(cls, start: Path, environ: Mapping[str, str]) -> StateDir | None:
        """The folder in PERDURE_STATE, else the nearest ``.perdure`` of a `perdure dev`, running or not, upwards from ``start``."""
        if named := environ.get("PERDURE_STATE"):
            return cls(Path(named))
        for folder in (start.absolute(), *start.absolute().parents):
            if (found := cls(folder / NAME)).made:
                return found
        return None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def secret(self) -> Path:
        return self.path / "secret"

    @property
    def postgres(self) -> Path:
        return self.path / "postgres"

    def create(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        if not self.made:  # on a full disk, writing it again would leave it empty, and then nothing here might be deleted any more
            self._mark.write_text(MARK)

    @property
    def made(self) -> bool:
        """Whether ``create`` made it."""
        return self._mark.is_file() and self._mark.read_text() == MARK

    @property
    def _mark(self) -> Path:
        return self.path / ".gitignore"

    def acquire(self) -> None:
        """Held until this process ends. Raises AlreadyRunning."""
        lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise AlreadyRunning(f"`perdure dev` (process {owner}) is running on {self.path}") from None
        self._lock = lock
        with contextlib.suppress(OSError):  # on a full disk nobody is told who we are, but --fresh can make room
            os.truncate(lock.fileno(), 0)
            os.write(lock.fileno(), str(os.getpid()).encode())

    def clear(self) -> None:
        """Forget everything: runs, logs, secret. Only in a folder that ``create`` made, and only what this module's docstring lists."""
        if not self.made:
            return
        for name in OURS:
            for found in (self.path / name, *self.path.glob(f"{name}.*")):
                if found.is_dir() and not found.is_symlink():
                    shutil.rmtree(found)
                else:
                    found.unlink(missing_ok=True)

    def session(self) -> Session | None:
        try:
            return msgspec.json.decode((self.path / "dev.json").read_bytes(), type=Session)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_session(self, session: Session) -> None:
        self._replace("dev.json", msgspec.json.format(msgspec.json.encode(session), indent=2))

    def end_session(self) -> None:
        (self.path / "dev.json").unlink(missing_ok=True)

    def folders(self) -> dict[str, Path]:
        """Folder of the manifest of each pool, by ``namespace/name``."""
        try:
            known: dict[str, str] = msgspec.json.decode((self.path / "pools.json").read_bytes(), type=dict[str, str])
        except (FileNotFoundError, msgspec.DecodeError):
            known = {}
        return {pool: Path(folder) for pool, folder in known.items()}

    def add_folders(self, folders: Mapping[str, Path]) -> None:
        known = {**self.folders(), **folders}
        self._replace("pools.json", msgspec.json.encode({pool: str(folder) for pool, folder in known.items()}))

    def record(self, pod: PodRecord) -> None:
        with (self.path / "pods.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(pod) + b"\n")

    def pods(self) -> dict[UUID, PodRecord]:
        """Every pod that this folder remembers, oldest first."""
        pods: dict[UUID, PodRecord] = {}
        for line in self._pod_lines():
            if (known := pods.get(line.pod)) is None:
                pods[line.pod] = line
            else:
                known.ended, known.reason = line.ended, line.reason
        return pods

    def pod_name(self, pod: UUID) -> str | None:
        """The name of a pod that was started here."""
        if pod not in self._names:
            self._names = {record.pod: record.name for record in self.pods().values()}
        return self._names.get(pod)

    def compact(self) -> None:
        """Keep what is needed of old pods."""
        kept = list(self.pods().values())[-KEPT_PODS:]
        self._replace("pods.jsonl", b"".join(msgspec.json.encode(pod) + b"\n" for pod in kept))

    def _pod_lines(self) -> Iterator[PodRecord]:
        try:
            lines = (self.path / "pods.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=PodRecord)
            except msgspec.DecodeError:  # the line that a crash cut off
                continue

    def _replace(self, name: str, data: bytes) -> None:
        part = self.path / f".{name}.{os.getpid()}.{time.monotonic_ns()}"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        part.replace(self.path / name)
