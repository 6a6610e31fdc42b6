"""A Postgres server of our own, for ``perdure dev`` and for tests: nothing to install, no root needed, no container.

``start`` makes the cluster in its folder the first time, ends what an unclean earlier life left there, and starts the server as a child
process; it is ready when ``start`` returns. The data stays between starts. A lock file next to the folder keeps two owners apart, so
whatever runs there without the lock is an orphan and may be ended. A lifeline ends the server when its owner is killed.

Next to ``<data_dir>/`` are ``<data_dir>.lock``, ``<data_dir>.log`` (the server's log) and ``<data_dir>.password`` (for TCP; the Unix socket
is in a folder that only this user can enter, and asks for none).

The object is not bound to an event loop: the blocking work is done in a thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self, TypedDict

import psutil

from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.leftovers import ended
from perdure_operator.local.postgres_account import Account, place, programs, server_account

START_TIMEOUT = 60.0
"""Seconds; a start after a crash replays the write-ahead log first."""

PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, so that no outgoing connection takes the port while the server restarts."""

SOCKET_PATH_MAX = 100
"""Bytes; the system's limit is 103 on macOS and 107 on Linux."""

NOT_DURABLE: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}
"""Commits still reach the operating system, so that killing the server loses none."""

Setting = str | int | float | bool


class PostgresFailed(PerdureError):
    """The embedded Postgres does not start."""

    code: ClassVar[str] = "postgres-failed"
    action: ClassVar[str] = (
        "The detail ends with the server's own words. The data folder that it names is all that there is of the runs: mend what the server "
        "complains about, or, to forget every run, start `perdure dev --fresh`."
    )


class DataDirInUse(PerdureError):
    """Another process has this data folder open."""

    code: ClassVar[str] = "data-dir-in-use"
    retryable: ClassVar[bool] = True
    action: ClassVar[str] = "Stop the other `perdure dev`, or give this one a state folder of its own."


class _Identity(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


class EmbeddedPostgres:
    """One server and its data folder.

    ``settings`` are server settings as in postgresql.conf. ``port`` 0 takes a free one; it stays the same for the life of the object, so
    DSNs survive a restart. ``durable=False`` trades safety for speed: for tests only, a machine crash loses the data (a killed server
    does not).
    """

    def __init__(self, data_dir: Path, *, settings: Mapping[str, Setting] | None = None, port: int = 0, durable: bool = True) -> None:
        self.data_dir = data_dir.absolute()
        self.port = port
        self._durable = durable
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._real = self.data_dir
        self._account: Account | None = None

    # ------------------------------------------------------------------------------------------------ use

    async def start(self) -> str:
        """Start the server, if it does not run; answers its Unix socket DSN. Raises PostgresFailed, DataDirInUse, PostgresUnplaceable."""
        return await asyncio.to_thread(self._start)

    async def stop(self, timeout: float = 30.0) -> None:
        """Disconnect everybody and shut down; after ``timeout`` seconds kill. No-op if it does not run."""
        await asyncio.to_thread(self._stop, timeout)

    async def kill(self) -> None:
        """End every process of the server at once, as a power cut would. The next start recovers."""
        await asyncio.to_thread(self._kill)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def dsn(self) -> str:
        """Unix socket DSN of the database ``postgres``."""
        return self.dsn_of("postgres")

    @property
    def tcp_dsn(self) -> str:
        """127.0.0.1 DSN of the database ``postgres``, password included."""
        password = self._beside("password").read_text().strip()
        return f"postgresql://postgres:{password}@127.0.0.1:{self.port}/postgres?sslmode=disable"

    def dsn_of(self, database: str) -> str:
        """Unix socket DSN of a database of this server."""
        return f"postgresql://postgres@/{database}?host={self._socket_dir()}&port={self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the postmaster while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def log_file(self) -> Path:
        return self._beside("log")

    # ------------------------------------------------------------------------------------------------ start

    def _start(self) -> str:
        if self.pid is not None:
            return self.dsn
        self._cut_lifeline()  # of one that died by itself: its number may be somebody else's by now
        self._account = server_account(self.data_dir)
        self._real = place(self.data_dir, self._account)
        self._acquire()
        try:
            binaries = programs(self._account)
            self._end_leftovers()
            if not (self._real / "PG_VERSION").exists():
                self._initialise(binaries)
            self._launch(binaries)
        except BaseException:
            self._kill()
            raise
        return self.dsn

    def _acquire(self) -> None:
        if self._lock is not None:  # our server died by itself
            return
        lock = os.open(self.data_dir.with_name(f"{self.data_dir.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DataDirInUse(f"{self.data_dir} is in use by another process.") from None
        self._lock = lock

    def _end_leftovers(self) -> None:
        """A server whose owner died, or the backends of a killed postmaster: Postgres would refuse to start beside them."""
        left = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "postgres" and self._is_ours(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGQUIT)
        if not ended(left):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            ended(left)
        # Nothing runs here any more, yet the pid in a lock file may by now belong to any other program: that would stop Postgres too.
        (self._real / "postmaster.pid").unlink(missing_ok=True)
        for stale in self._socket_dir().glob(".s.PGSQL.*"):
            stale.unlink(missing_ok=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(self._real)
        except psutil.Error:
            return False

    def _initialise(self, binaries: Path) -> None:
        password = self._beside("password")
        password.unlink(missing_ok=True)
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(24) + "\n")
        # Made beside and renamed, so that an interrupted first start leaves nothing half made.
        part = self._beside("new")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        if self._account is not None:
            self._account.give(password)
            self._account.give(part)
        command = [
            *(str(binaries / "initdb"), "-D", str(part), "-U", "postgres", f"--pwfile={password}"),
            *("--auth-local=trust", "--auth-host=scram-sha-256"),
            *("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *(() if self._durable else ("--no-sync",)),
        ]
        made = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, env=self._environment(), cwd="/", **self._identity()
        )
        if made.returncode != 0:
            raise PostgresFailed(f"initdb in {self._real} failed: {made.stderr.decode(errors='replace').strip()}")
        if self._real.is_dir():
            self._real.rmdir()
        part.rename(self._real)

    def _launch(self, binaries: Path) -> None:
        self.port = self.port or _free_port()
        socket_dir = self._socket_dir()
        if socket_dir != self._real:
            socket_dir.mkdir(mode=0o700, exist_ok=True)
            owner = os.geteuid()
            if self._account is not None:
                owner = self._account.uid
                self._account.give(socket_dir)
            if socket_dir.lstat().st_uid != owner or socket_dir.is_symlink():
                raise PostgresFailed(f"{socket_dir} belongs to somebody else.")
        settings: dict[str, Setting] = {
            "timezone": "UTC",
            "log_timezone": "UTC",
            "max_connections": 200,
            **({} if self._durable else NOT_DURABLE),
            **self._settings,
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(socket_dir),
            "unix_socket_permissions": "0700",
        }
        command = [str(binaries / "postgres"), "-D", str(self._real)]
        for name, value in settings.items():
            command += ["-c", f"{name}={_setting(value)}"]
        with self.log_file.open("ab") as log:
            start_of_log = log.tell()
            # A session of its own: Ctrl-C in a terminal must reach us, and not stop the database under running requests.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(), start_new_session=True, cwd="/",
                **self._identity(),
            )  # fmt: skip
        # Its standard input ends when we do, however we do; then it stops the server, which would go on for ever otherwise.
        self._lifeline = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -QUIT "$0"', str(self._process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )
        atexit.register(self._kill)
        self._await_ready(self._process, start_of_log)

    def _await_ready(self, process: subprocess.Popen[bytes], start_of_log: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self._ready(process.pid):
            if process.poll() is not None or time.monotonic() > deadline:
                why = "ended" if process.poll() is not None else f"was not ready after {START_TIMEOUT:.0f} s"
                with self.log_file.open("rb") as log:
                    log.seek(start_of_log)
                    words = log.read()[-2000:].decode(errors="replace").strip()
                raise PostgresFailed(f"Postgres in {self._real} {why}: {words}")
            time.sleep(0.01)

    def _ready(self, pid: int) -> bool:
        try:
            lines = (self._real / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    # ------------------------------------------------------------------------------------------------ end

    def _stop(self, timeout: float) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self._kill()

    def _kill(self) -> None:
        self._cut_lifeline()
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                postmaster = psutil.Process(process.pid)
                # Stopped first: a running postmaster would start new children while these are counted.
                postmaster.suspend()
                family = postmaster.children(recursive=True)
            process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
            ended(family)
        atexit.unregister(self._kill)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _cut_lifeline(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            lifeline.kill()
            lifeline.communicate()

    # ------------------------------------------------------------------------------------------------ places

    def _beside(self, suffix: str) -> Path:
        return self._real.with_name(f"{self._real.name}.{suffix}")

    def _socket_dir(self) -> Path:
        if len(os.fsencode(self._real / ".s.PGSQL.65535")) <= SOCKET_PATH_MAX:
            return self._real
        return Path(tempfile.gettempdir()) / f"perdure-{hashlib.sha256(os.fsencode(self._real)).hexdigest()[:16]}"

    def _identity(self) -> _Identity:
        if self._account is None:
            return {}
        return {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}

    @staticmethod
    def _environment() -> dict[str, str]:
        """Nothing of ours: a PGDATA or an LC_ALL of the caller must not change the server."""
        return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _setting(value: Setting) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise PostgresFailed("no free port on 127.0.0.1.")
