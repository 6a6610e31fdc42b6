"""The `perdure dev` of a folder: its gateways by address, its pods' logs as files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from perdure_operator.cli.client import Client
from perdure_operator.cli.connection import Applied, Connection, Lease, LogGone
from perdure_operator.cli.story import PodName
from perdure_operator.cli.views import RunView
from perdure_operator.local.state import PodRecord, Session, StateDir

if TYPE_CHECKING:
    from perdure_operator.local.manifests import Loaded

POLL_SECONDS = 0.2
QUIET_SECONDS = 1.0
"""A reused pod goes on after a run; what the run has said last comes within so long."""
CLOCK_SECONDS = 2.0
"""How exact the start of a process is known."""


class LocalConnection(Connection):
    """``state`` is None for a gateway that is only known by its address."""

    default_namespace = "default"
    poll_seconds = POLL_SECONDS

    def __init__(self, client: Client, state: StateDir | None) -> None:
        self._client = client
        self.state = state

    @property
    def client(self) -> Client:
        return self._client

    def pod_names(self, pool: str) -> PodName:
        """``worker-3`` of a pod that was started here, else the beginning of its id."""
        state = self.state
        return lambda pod_id: (state.pod_name(UUID(pod_id)) if state is not None else None) or pod_id[:8]

    def apply(self, loaded: list[Loaded], *, store_only: bool, say: Callable[[str], None]) -> Iterator[Applied]:
        from perdure_operator.cli.apply import apply, pool_folders

        if self.state is not None:
            # Before the pools: their commands run in the folder of the file.
            self.state.add_folders(pool_folders(loaded))
        return apply(self._client, loaded, say)

    def submit(self, namespace: str, name: str, spec: dict[str, Any], *, store_only: bool) -> Applied:
        from perdure_operator.cli.apply import submit

        return submit(self._client, namespace, name, {"spec": spec}, f"submit:{name}")

    def refresh(self, run: RunView) -> RunView:
        return self._client.run(run.namespace, run.run_id)

    def log(self, lease: Lease, namespace: str, *, sidecar: bool, follow: bool) -> Iterable[str]:
        pod_id = UUID(lease.pod_id)
        if self.state is None or (pod := self.state.pods().get(pod_id)) is None:
            raise LogGone(f"no log of the pod {lease.pod_id}: it was not started here")
        file = Path(pod.log).with_suffix(".sidecar.log") if sidecar else Path(pod.log)
        return _lines(file, self.state, pod, lease, follow=follow)


def _lines(file: Path, state: StateDir, pod: PodRecord, lease: Lease, *, follow: bool) -> Iterator[str]:
    try:
        log = file.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise LogGone(f"the log {file} is gone") from None
    with log:
        quiet_since = time.monotonic()
        while True:
            over = lease.over.is_set() and time.monotonic() - quiet_since > QUIET_SECONDS
            ended = not follow or over or bool(state.pods()[pod.pod].ended)
            while line := log.readline():
                quiet_since = time.monotonic()
                yield line
            if ended:
                return
            time.sleep(POLL_SECONDS)


def starting(state: StateDir, session: Session | None) -> int | None:
    """The living process that has taken the state folder, if it is not that of ``session``."""
    pid = holder(state)
    return None if session is not None and session.pid == pid else pid


def holder(state: StateDir) -> int | None:
    """The living process that has taken the state folder.

    The lock itself is not tried: for a moment that would keep a `perdure dev` from getting it. A process that is younger than its entry
    in the lock is another one with the same id.
    """
    import psutil

    lock = state.path / "lock"
    try:
        pid, written = int(lock.read_text()), lock.stat().st_mtime
        return pid if psutil.Process(pid).create_time() <= written + CLOCK_SECONDS else None
    except (OSError, ValueError, psutil.Error):
        return None
