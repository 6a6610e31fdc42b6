"""Reuse of a pod by a fork per run: the parent has done the imports, each run gets a fresh copy of its memory.

The parent has one thread, no event loop, and no socket but the one it asks the sidecar on, closed before each fork. It asks
``GET /v1/next`` on the unix socket (which needs no secret there: only processes of this pod can reach it), gets the secret of the next
lease, and hands it to the child by an inherited pipe; the child shows it with everything it asks. When the child has ended, the parent,
which is subreaper, kills whatever is left below it, removes the child's TMPDIR, and tells ``POST /v1/idle`` whether all is gone; if not,
the pod retires. The secret never is in the parent's environment, and no child sees that of another.

A process with more threads cannot be forked safely, and not every system can do the rest: then each run gets a newly started process,
which costs it the imports, and the log says why. None of this is a security boundary.

Without its sidecar the parent ends as its children do: a sidecar that has been there may be away for as long as a lease lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import importlib
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.sdk import descendants, onethread
from perdure.sdk.errors import InvalidDeclaration, SidecarUnavailable
from perdure.sdk.exits import AGENT_FAILED, DONE, LEASE_LOST, ProcessExits
from perdure.sdk.serve import serve_once
from perdure.sdk.sidecar import AWAY_SECONDS, GIVE_UP_SECONDS, Address

if TYPE_CHECKING:
    from perdure.sdk.agents import Agent

KILL_PATIENCE_SECONDS: Final = 5.0
_log = logging.getLogger("perdure")
Start = Callable[[int, str], int]
"""Starts the process of a run, given the descriptor that its secret is read from and its TMPDIR; gives its pid."""


class _Ended(Exception):
    """SIGTERM came while the parent waited for a run."""


class _Next(msgspec.Struct):
    secret: str


def serve_forking(agent: Agent[..., Any], address: Address, exits: ProcessExits) -> int:
    """Serves runs until the pod retires; gives the exit code, and tells ``exits`` of SIGTERM. Raises InvalidDeclaration."""
    if address.socket is None:
        raise InvalidDeclaration("PERDURE_POD_REUSE=ForkPerRun needs PERDURE_SOCKET, the unix socket of the sidecar")
    if threading.current_thread() is not threading.main_thread():
        raise InvalidDeclaration("PERDURE_POD_REUSE=ForkPerRun needs serve() in the main thread: it forks, and hears of SIGTERM, there")
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise InvalidDeclaration("serve() must be called without an event loop: a fork would inherit it")
    return _Parent(address, _how_to_start(agent, address), exits).run()


def _how_to_start(agent: Agent[..., Any], address: Address) -> Start:
    if sys.platform != "linux":
        _log.warning("ForkPerRun needs Linux; every run gets a newly started process")
        return _spawn
    descendants.become_subreaper()
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop")
    threads = onethread.thread_count()
    if threads != 1:
        _log.error(
            "this process has %d threads and cannot be forked: %s. Every run gets a newly started process", threads, onethread.explain()
        )
        return _spawn
    gc.collect()
    gc.freeze()
    return lambda secret, tmp: _fork(agent, address, secret, tmp)


class _Parent:
    def __init__(self, address: Address, start: Start, exits: ProcessExits) -> None:
        self._address = address
        self._start = start
        self._child = 0
        self._exits = exits
        self._patience = GIVE_UP_SECONDS

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._told_to_end)
        try:
            while (secret := self._next()) is not None:
                code, clean = self._serve(secret)
                if code == LEASE_LOST:
                    self._patience = 1.0  # it may have waited for the sidecar in vain
                # A pod that is being ended must not be given another run.
                self._ask("POST", "/v1/idle", {"clean": clean and not self._exits.terminated, "exitCode": code})
                if not clean or self._exits.terminated:
                    break
        except _Ended:
            return DONE
        except SidecarUnavailable as error:
            _log.error("%s", error)
            return LEASE_LOST
        finally:
            self._exits.heed()
        return DONE

    def _serve(self, secret: str) -> tuple[int, bool]:
        """One run: its exit code (negative: ended by that signal), and whether nothing is left of it."""
        read, write = os.pipe()
        os.write(write, secret.encode())
        os.close(write)
        tmp = tempfile.mkdtemp(prefix="perdure-run-")
        try:
            self._child = self._start(read, tmp)
            if self._exits.terminated:
                os.kill(self._child, signal.SIGTERM)
            _, status = os.waitpid(self._child, 0)
        finally:
            self._child = 0
            os.close(read)
        clean = descendants.end_descendants(KILL_PATIENCE_SECONDS)
        shutil.rmtree(tmp, ignore_errors=True)
        return os.waitstatus_to_exitcode(status), clean

    def _next(self) -> str | None:
        """The secret of the next lease; None when the pod retires. Raises SidecarUnavailable, _Ended."""
        while True:
            status, body = self._ask("GET", "/v1/next")
            if status == 200:
                return msgspec.json.decode(body, type=_Next).secret
            if status == 410:
                return None
            if status != 204:
                raise SidecarUnavailable(f"the sidecar answered {status}: {body.decode(errors='replace')[:500]}")

    def _ask(self, method: str, path: str, body: dict[str, object] | None = None) -> tuple[int, bytes]:
        since, delay = time.monotonic(), 0.02
        while True:
            connection = _UnixConnection(self._address.socket or "")
            try:
                connection.request(method, path, None if body is None else msgspec.json.encode(body))
                self._patience = AWAY_SECONDS
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() - since > self._patience:
                    raise SidecarUnavailable(f"no sidecar at {self._address.socket}: {error}") from error
                time.sleep(delay)
                delay = min(delay * 2, 1.0)
            finally:
                connection.close()

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        self._exits.terminated = True
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM)
        else:
            raise _Ended


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def _fork(agent: Agent[..., Any], address: Address, secret: int, tmp: str) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = AGENT_FAILED
    try:
        _become_child(tmp)
        with os.fdopen(secret, "rb") as source:
            code = serve_once(agent, address, source.read().decode(), ProcessExits())
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else AGENT_FAILED
    except BaseException:  # noqa: BLE001  # nothing may get back into the parent's code
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_child(tmp: str) -> None:
    os.setsid()
    descendants.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TMPDIR"] = tmp
    tempfile.tempdir = None
    random.seed()
    for name, reseed in (("numpy.random", "seed"), ("torch", "seed")):
        if (module := sys.modules.get(name)) is not None:
            getattr(module, reseed)()


def _spawn(secret: int, tmp: str) -> int:
    env = {**os.environ, "PERDURE_POD_REUSE": "Never", "PERDURE_SECRET_FD": str(secret), "TMPDIR": tmp}
    command = [sys.executable, *sys.orig_argv[1:]]
    return subprocess.Popen(command, env=env, pass_fds=[secret], start_new_session=True).pid
