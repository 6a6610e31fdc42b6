"""Starts worker pods on this machine: names, tokens, sockets, logs, and the record of it in the state folder.

A pod is called after its pool (``worker-3``); its agent writes to ``logs/worker-3.log``, its sidecar to ``logs/worker-3.sidecar.log``.
The token and the socket are in a short folder of their own, because the path of a socket has a hundred bytes.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from pydantic import ValidationError

from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.local.containers import AgentCommand, Unlaunchable, agent_command, inherited
from perdure_operator.local.fleet import Pod
from perdure_operator.local.processes import Launch, Leash, PodExit, WorkerPod
from perdure_operator.local.state import PodRecord, StateDir

LAST_WORDS = 12
"""Lines of a broken pod's log that are shown."""


class PodTokens(Protocol):
    """Issues the token that a pod shows to a gateway."""

    def issue_pod(self, pod_id: UUID, pool: str) -> str: ...


class LocalPods:
    """The fleet's starter of pods. A pool's manifest is where the state folder says, looked up at each start: `submit` may add to it."""

    def __init__(
        self, state: StateDir, *, leash: Leash, tokens: PodTokens, gateways: Sequence[str], runtime_dir: Path,
        environ: Mapping[str, str], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._state, self._leash, self._tokens = state, leash, tokens
        self._gateways, self._runtime = gateways, runtime_dir
        self._environ, self._say = environ, say
        self._noted: set[str] = set()
        self._last: dict[str, int] = {}
        for pod in state.pods().values():
            base, _, number = pod.name.rpartition("-")
            if number.isdigit():
                self._last[base] = max(self._last.get(base, 0), int(number))

    async def start(self, pod_id: UUID, pool: str, spec: dict[str, Any]) -> WorkerPod:
        """Raises Unlaunchable, OSError."""
        try:
            typed = AgentPoolSpec.model_validate(spec)
        except ValidationError as error:
            raise Unlaunchable(f"the stored spec is not valid: {error}") from None
        namespace, _, base = pool.partition("/")
        base = base if namespace == "default" else f"{namespace}-{base}"
        name = f"{base}-{self._last.get(base, 0) + 1}"
        command = agent_command(
            typed, pod_name=name, namespace=namespace, folder=self._state.folders().get(pool, Path.cwd()), environ=self._environ
        )
        self._note(pool, command)
        self._last[base] = self._last.get(base, 0) + 1

        folder = self._runtime / name
        folder.mkdir(mode=0o700)
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(self._tokens.issue_pod(pod_id, pool))
        shared = {
            "PERDURE_SOCKET": str(folder / "agent.sock"),
            "PERDURE_PORT": str(free_port()),
            "PERDURE_POD_REUSE": typed.pod_reuse.mode if typed.pod_reuse else "Never",
        }
        private = {"PERDURE_GATEWAY_URLS": ",".join(self._gateways), "PERDURE_TOKEN_FILE": str(folder / "token")}
        if typed.spool == "Disk":
            spool = self._state.path / "spool" / name
            spool.mkdir(parents=True, exist_ok=True)
            private["PERDURE_SPOOL_DIR"] = str(spool)
        log = self._state.logs / f"{name}.log"
        pod = await WorkerPod.start(
            pod_id, name, pool, leash=self._leash,
            sidecar=Launch(
                (sys.executable, "-m", "perdure.sidecar"), {**inherited(self._environ), **shared, **private},
                folder, log.with_suffix(".sidecar.log"),
            ),
            agent=Launch(command.argv, {**command.env, **shared}, command.cwd, log, command.grace_seconds),
        )  # fmt: skip
        self._state.record(PodRecord(pod_id, name, pool, str(log), pod.agent.pid, pod.sidecar.pid, started=time.time()))
        return pod

    def ended(self, pod: Pod, exit_: PodExit) -> list[str]:
        self._state.record(PodRecord(pod.pod_id, ended=time.time(), reason=exit_.words))
        shutil.rmtree(self._runtime / pod.name, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is none, or something in it that the store did not take
            (self._state.path / "spool" / pod.name).rmdir()
        log = self._state.logs / (f"{pod.name}.sidecar.log" if exit_.sidecar_first else f"{pod.name}.log")
        return last_lines(log, LAST_WORDS)

    def _note(self, pool: str, command: AgentCommand) -> None:
        if pool not in self._noted:
            self._noted.add(pool)
            for note in command.notes:
                self._say(f"pool {pool}: {note}")


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of a log, without terminal control sequences."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - 64 * 1024))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]", "", line)[:400] for line in lines[-count:]]


def free_port(preferred: int = 0) -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now, ``preferred`` if that is one."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no free port on 127.0.0.1")
