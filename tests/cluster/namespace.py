"""The network and the mounts of a cluster, apart from the machine's.

Ports cannot clash, nothing leaves the machine, and neither iptables rules nor mounts have to be taken back: both namespaces go with
their last process. Not ``ip netns exec``, which would hide the cgroups behind a new /sys.

A holder process keeps them open; others enter through its pid. A second one stays in the network that the cluster was
started from, as the way back for those who are inside.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.cluster.cgroup import Cgroup
from tests.cluster.errors import ClusterError, CommandError
from tests.cluster.processes import Processes

T = TypeVar("T")
HOLDER = "namespace"
OUTSIDE = "machine-network"
NODE_IP = "10.88.0.1"
POD_RANGE = "10.88.0.0/16"
SERVICE_RANGE = "10.96.0.0/16"
BRIDGE = "cni0"
CLONE_NEWNET = 0x40000000
# Where programs write whatever they are told: the cluster gets folders of its own in their place.
FIXED_FOLDERS = ("/run/containerd", "/var/lib/cni", "/var/log/containers")
CREATE_SECONDS = 10.0


class Namespace:
    def __init__(self, processes: Processes, cgroup: Cgroup, folder: Path) -> None:
        self._processes = processes
        self._cgroup = cgroup
        self._folder = folder

    def create(self) -> None:
        self._processes.start(OUTSIDE, [*self._cgroup.entering(), "sleep", "infinity"])
        unshare = ["unshare", "--net", "--mount", "--propagation", "private", "sleep", "infinity"]
        self._processes.start(HOLDER, [*self._cgroup.entering(), *unshare])
        self._processes.wait_for(HOLDER, lambda: _comm(self._pid) == "sleep", CREATE_SECONDS, "in its namespaces")
        # A container's view follows the node's, as on any node.
        self._run("mount", "--make-rshared", "/")
        for fixed in FIXED_FOLDERS:
            own = self._folder / "fixed" / fixed.strip("/").replace("/", "-")
            own.mkdir(parents=True)
            Path(fixed).mkdir(parents=True, exist_ok=True)
            self._run("mount", "--bind", own, fixed)
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "link", "add", BRIDGE, "type", "bridge")
        self._run("ip", "address", "add", f"{NODE_IP}/16", "dev", BRIDGE)
        self._run("ip", "link", "set", BRIDGE, "up")
        # Without a route the kernel refuses a Service's address before iptables can rewrite it.
        self._run("ip", "route", "add", SERVICE_RANGE, "dev", BRIDGE)
        self._run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def inside(self, *, network: bool = True, mounts: bool = True) -> list[str]:
        """Prefix of a command line. Without ``network``: on the machine's own, even if the caller is inside."""
        net = "--net" if network else f"--net=/proc/{self._processes.get(OUTSIDE).pid}/ns/net"
        return ["nsenter", "--target", str(self._pid), net, *["--mount"] * mounts, "--"]

    def program(self, argv: Sequence[str | Path], *, network: bool = True) -> list[str]:
        """Command line of a program of the cluster: in its cgroup and its namespaces."""
        return [*self._cgroup.entering(), *self.inside(network=network), *(str(part) for part in argv)]

    def call(self, function: Callable[[], T]) -> T:
        """Calls it in a thread that has entered the network; what it opens there stays there."""
        results: list[T] = []
        errors: list[BaseException] = []

        def enter_and_call() -> None:
            try:
                _enter(self._network)
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                errors.append(error)

        thread = threading.Thread(target=enter_and_call, name="in-cluster-network")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    @property
    def _pid(self) -> int:
        return self._processes.get(HOLDER).pid

    @property
    def _network(self) -> Path:
        return Path(f"/proc/{self._pid}/ns/net")

    def _run(self, *args: str | Path) -> None:
        argv = [*self.inside(), *(str(arg) for arg in args)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommandError(argv, f"code {done.returncode}", done.stdout, done.stderr)


def _enter(network: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with network.open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise ClusterError(f"cannot enter the cluster's network: {os.strerror(ctypes.get_errno())}")


def _comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
