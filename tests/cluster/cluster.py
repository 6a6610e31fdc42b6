"""A real cluster on this machine: control plane, one node, nothing in between.

    start    namespaces and cgroup → etcd, API server, containerd → controllers, scheduler, kubelet, kube-proxy, CoreDNS → node Ready
    stop     kill everything in the cgroup; namespaces, with their mounts and rules, go with the last process

All state is in the work folder, so any process of this checkout can take part: ``up`` starts a cluster and ends, a test run finds it
there. A start first removes what an earlier one, killed or not, has left.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.cluster import binaries
from tests.cluster.cgroup import Cgroup
from tests.cluster.clients import Clients
from tests.cluster.containerd import CONTAINERD, Containerd
from tests.cluster.containerd import READY_SECONDS as CONTAINERD_SECONDS
from tests.cluster.control_plane import APISERVER, IN_NAMESPACE, ControlPlane
from tests.cluster.errors import ClusterError
from tests.cluster.images import Builder, project_dockerfile
from tests.cluster.machine import cni_folder, install_packages, obstacle_to_node
from tests.cluster.namespace import HOLDER, Namespace
from tests.cluster.node import KUBELET, NODE, Node
from tests.cluster.oci import pause_archive
from tests.cluster.paths import NAME, ROOT, locked, work
from tests.cluster.processes import Processes
from tests.cluster.progress import doing, say

T = TypeVar("T")
# After the end, for whoever wants to know why.
KEPT = ("logs", "audit.log")


def obstacle() -> str | None:
    """Why this machine cannot run a cluster, in one line; None if it can. Installs packages where that is all that is missing."""
    install_packages()
    return obstacle_to_node() or binaries.obstacle()


class Cluster(Clients):
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or work()
        self._processes = Processes(self.folder)
        self._cgroup = Cgroup(NAME)
        self._namespace = Namespace(self._processes, self._cgroup, self.folder)
        self._control_plane = ControlPlane(self.folder, IN_NAMESPACE, self._processes, self._launch, self._namespace.call)
        node = (self.folder, self._control_plane.authority, self._control_plane.server, self._processes, self._launch, self._namespace.call)
        self._node = Node(*node)
        self._containerd = Containerd(self.folder)
        self._builder = Builder(self.folder, self._processes, self._launch_on_machines_network, NAME)
        super().__init__(self._control_plane.admin)

    # Life

    def start(self) -> None:
        """Returns when pods can run. :class:`ClusterError` says which part did not start, with the end of its log."""
        if reason := obstacle():
            raise ClusterError(reason)
        binaries.build()
        with locked(self.folder.with_suffix(".lock")):
            self._remove()
            try:
                with doing("starting the cluster"):
                    self._start()
            except BaseException:
                self._remove(keep=KEPT)
                raise

    def stop(self) -> None:
        """Leaves nothing but the logs. A cluster that does not run is fine."""
        with locked(self.folder.with_suffix(".lock")), doing("stopping the cluster"):
            self._remove(keep=KEPT)
            say(f"  logs stay in {self.log(KUBELET).parent}")

    def is_running(self) -> bool:
        return self._processes.is_running(HOLDER) and self._processes.is_running(APISERVER)

    def status(self) -> dict[str, bool]:
        """Which of its programs run."""
        return {name: self._processes.is_running(name) for name in self._processes.names()}

    # Use

    def argv(self, command: Sequence[str | Path]) -> list[str]:
        if not self._processes.is_running(HOLDER):
            raise ClusterError("no cluster runs: start one with `python -m tests.cluster up`")
        return [*self.nsenter, *super().argv(command)]

    def environment(self) -> dict[str, str]:
        helm = {f"HELM_{kind}_HOME": str(self.folder / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        path = f"{binaries.search_path()}:{os.environ.get('PATH', os.defpath)}"
        return {**super().environment(), **helm, **self._containerd.environment(), "PATH": path}

    @property
    def nsenter(self) -> list[str]:
        """Prefix of a command line that runs in the cluster's network."""
        return self._namespace.inside(mounts=False)

    def call(self, function: Callable[[], T]) -> T:
        """Calls it in a thread that is in the cluster's network: a socket that it opens belongs there, whoever uses it then."""
        return self._namespace.call(function)

    # Images

    def build_image(self, target: str, tag: str, *, context: Path = ROOT, dockerfile: Path | None = None) -> str:
        """Builds a target ("" for the last) of a Dockerfile, the project's unless told, and loads it. Returns the ``image`` for a pod."""
        archive = self._builder.build(tag, target=target, context=context, dockerfile=dockerfile or project_dockerfile())
        self.load_image(archive)
        archive.unlink()
        return tag

    def load_image(self, archive: Path) -> None:
        """What ``docker save`` writes, or an OCI layout as one file. The pod says ``imagePullPolicy: Never`` or ``IfNotPresent``."""
        self.exec(["ctr", "images", "import", "--local", archive], seconds=180)

    # Faults

    @property
    def audit_log(self) -> Path:
        """One JSON object a line, one line a finished request: who, what, which answer, no bodies."""
        return self._control_plane.audit_log

    def log(self, name: str) -> Path:
        """Of a program, by the name that :meth:`status` lists it under."""
        return self._processes.log(name)

    def stop_apiserver(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Returns when its process is gone. One that is asked to end (SIGTERM) waits for its watchers, up to a minute."""
        self._processes.stop(APISERVER, sig)

    def start_apiserver(self) -> None:
        """Returns when it is ready."""
        self._processes.start_again(APISERVER)
        self._control_plane.wait()

    def restart_apiserver(self) -> None:
        self.stop_apiserver()
        self.start_apiserver()

    def stop_kubelet(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Returns when its process is gone; the containers stay."""
        self._processes.stop(KUBELET, sig)

    def start_kubelet(self) -> None:
        """Returns when it is healthy."""
        self._processes.start_again(KUBELET)
        self._node.wait_for_kubelet()

    def restart_kubelet(self) -> None:
        self.stop_kubelet()
        self.start_kubelet()

    def kill_container_process(self, pod: str, container: str, sig: signal.Signals = signal.SIGKILL, *, namespace: str = "default") -> int:
        """Signals a container's first process, from outside, past Kubernetes. Returns its pid on this machine."""
        pid = self._container_pid(pod, container, namespace)
        os.kill(pid, sig)
        return pid

    def cut_connections(self, pod: str, container: str, port: int, *, silently: bool, namespace: str = "default") -> int:
        """Ends the TCP connections that a pod has to this port: by a reset, or silently, as when a load balancer forgets them: what is sent
        on them is lost from now on, and nobody is told. New ones pass. Returns how many they were."""
        inside = self._network_of(pod, container, namespace)
        ours = [line.split()[3].rpartition(":")[2] for line in self.exec([*inside, "ss", "-Htn", f"dport = :{port}"]).splitlines()]
        for own in ours:
            if silently:
                for chain, direction in (("INPUT", "--dport"), ("OUTPUT", "--sport")):
                    self.exec([*inside, "iptables", "-w", "-A", chain, "-p", "tcp", direction, own, "-j", "DROP"])
            elif not self.exec([*inside, "ss", "-KHtn", f"dport = :{port} and sport = :{own}"]).strip():
                raise ClusterError("this kernel resets no connection for ss (CONFIG_INET_DIAG_DESTROY)")
        return len(ours)

    def lost_packets(self, pod: str, container: str, *, namespace: str = "default") -> int:
        """What came for connections that were cut silently, until now."""
        rules = self.exec([*self._network_of(pod, container, namespace), "iptables", "-w", "-nvxL", "INPUT"])
        return sum(int(line.split()[0]) for line in rules.splitlines() if " DROP " in line)

    def _network_of(self, pod: str, container: str, namespace: str) -> list[str]:
        """The beginning of a command line that runs in it."""
        return ["nsenter", f"--net=/proc/{self._container_pid(pod, container, namespace)}/ns/net"]

    def _container_pid(self, pod: str, container: str, namespace: str) -> int:
        statuses = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
        path = "".join(f'{{.status.{kind}[?(@.name=="{container}")].containerID}}' for kind in statuses)
        container_id = self.kubectl("get", "pod", pod, "-n", namespace, "-o", f"jsonpath={path}").strip().removeprefix("containerd://")
        tasks = {line.split()[0]: line.split() for line in self.exec(["ctr", "tasks", "list"]).splitlines()[1:]}
        if container_id not in tasks:
            raise ClusterError(f"container {container} of pod {namespace}/{pod} does not run")
        return int(tasks[container_id][1])

    # How it starts and stops

    def _start(self) -> None:
        cni_programs = cni_folder()
        assert cni_programs is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self._cgroup.create()
        self._namespace.create()
        self._control_plane.create_identities()
        self._launch(CONTAINERD, self._containerd.configure(cni_programs))
        self._control_plane.start()
        self._processes.wait_for(CONTAINERD, self._containerd.answers, CONTAINERD_SECONDS)
        self.load_image(pause_archive(binaries.PAUSE.folder / "pause", self.folder))
        self._control_plane.wait()
        self._control_plane.start_controllers()
        self._node.start(self._containerd.socket, NAME)
        self._node.wait()
        self._wait_for_pods()

    def _wait_for_pods(self) -> None:
        """Until a pod can be made: a Ready node, and the account that every pod of the default namespace has."""
        try:
            # One at a time: kubectl waits for the first missing thing only if it is the only one.
            for needed in (f"node/{NODE}", "serviceaccount/default", "configmap/kube-root-ca.crt"):
                self.kubectl("wait", "--for=create", needed, "--timeout=60s", seconds=70)
            self.kubectl("wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=60s", seconds=70)
        except ClusterError as error:
            states = ", ".join(f"{name} {'runs' if runs else 'has ended'}" for name, runs in self.status().items())
            raise ClusterError(f"the node did not become Ready ({states}): {error}\nlogs: {self.log(KUBELET).parent}") from None

    def _launch(self, name: str, argv: list[str]) -> None:
        # kubelet and kube-proxy run iptables, containerd runs runc.
        self._processes.start(name, self._namespace.program(argv), env=self.environment())

    def _launch_on_machines_network(self, name: str, argv: list[str]) -> None:
        self._processes.start(name, self._namespace.program(argv, network=False), env=self.environment())

    def _remove(self, keep: Sequence[str] = ()) -> None:
        if self._cgroup.exists():
            self._cgroup.kill()
            self._processes.stop_all()
            self._cgroup.remove()
        if not self.folder.exists():
            return
        for entry in self.folder.iterdir():
            if entry.name in keep:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
