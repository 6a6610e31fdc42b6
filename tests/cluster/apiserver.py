"""etcd and an API server alone, plain processes on loopback: what contracts of resources are tested against. Seconds to start, no root.

No namespace here, on purpose: any pytest process reaches it, and free ports keep several apart. The kernel ends both programs when the
process that started them ends, however it does; a folder that a killed one has left is removed by the next.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster import binaries
from tests.cluster.clients import Clients
from tests.cluster.control_plane import APISERVER, ControlPlane, Place
from tests.cluster.processes import Processes
from tests.cluster.progress import doing

PREFIX = "perdure-apiserver-"
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]


class ApiServer(Clients):
    """``audit_log``: as :attr:`tests.cluster.cluster.Cluster.audit_log`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes = Processes(folder)
        place = Place("127.0.0.1", "127.0.0.1", *_free_ports(3))
        self._control_plane = ControlPlane(folder, place, self._processes, self._launch, lambda function: function())
        self.audit_log = self._control_plane.audit_log
        self.server = self._control_plane.server
        super().__init__(self._control_plane.admin)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PATH": f"{binaries.search_path(binaries.CONTROL_PLANE)}:{os.environ.get('PATH', os.defpath)}"}

    def start(self) -> None:
        self._control_plane.create_identities()
        self._control_plane.start()
        self._control_plane.wait()

    def stop(self) -> None:
        """Their data is of no use to anybody: they need no time to end well."""
        self._processes.stop_all()

    def restart(self) -> None:
        """The API server alone; what it stored is in etcd."""
        self._processes.stop(APISERVER, signal.SIGKILL)
        self._processes.start_again(APISERVER)
        self._control_plane.wait()

    def _launch(self, name: str, argv: list[str]) -> None:
        self._processes.start(name, [*DIES_WITH_US, *argv])


def obstacle() -> str | None:
    """Why there can be no API server here, in one line; None if there can."""
    if shutil.which("openssl") is None:
        return "no openssl found, which makes the certificates of a test API server: install it"
    return binaries.obstacle(binaries.CONTROL_PLANE)


@contextmanager
def running() -> Iterator[ApiServer]:
    """Builds what is missing, then starts one; nothing is left of it afterwards."""
    binaries.build(binaries.CONTROL_PLANE)
    _sweep()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        server = ApiServer(Path(folder))
        try:
            with doing("starting an API server"):
                server.start()
            yield server
        finally:
            server.stop()


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (owner := re.match(rf"{PREFIX}(\d+)-", folder.name)) and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    """All different: each one is held until the last is found."""
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports
