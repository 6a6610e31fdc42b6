"""What makes the machine a node: kubelet, kube-proxy; and CoreDNS, not in a pod, so that a node without images has DNS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import binaries
from tests.cluster.certs import Authority
from tests.cluster.control_plane import answers
from tests.cluster.namespace import NODE_IP, POD_RANGE
from tests.cluster.processes import Processes

NODE = "node1"
KUBELET = "kubelet"
KUBE_PROXY = "kube-proxy"
COREDNS = "coredns"
READY_SECONDS = 60.0
EVICTION_SIGNALS = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree")
KUBELET_HEALTH = "http://127.0.0.1:10248/healthz"
COREDNS_READY = "127.0.0.1:8181"

# Names outside the cluster do not exist: a program that looks for one hears so at once.
COREFILE = """\
cluster.local:53 in-addr.arpa:53 {{
    bind {ip}
    errors
    ready {ready}
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        ttl 1
    }}
}}
.:53 {{
    bind {ip}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


class Node:
    """The parameters are those of :class:`~tests.cluster.control_plane.ControlPlane`."""

    def __init__(
        self,
        folder: Path,
        authority: Authority,
        server: str,
        processes: Processes,
        launch: Callable[[str, list[str]], object],
        call: Callable[[Callable[[], bool]], bool],
    ) -> None:
        self._folder = folder
        self._authority = authority
        self._server = server
        self._processes = processes
        self._launch = launch
        self._call = call

    def start(self, containerd_socket: Path, cgroup: str) -> None:
        self._start_kubelet(containerd_socket, cgroup)
        self._start_kube_proxy()
        self._start_coredns()

    def wait(self) -> None:
        """For what answers on its own; whether the node is Ready is the API server's to say."""
        self.wait_for_kubelet()
        self._processes.wait_for(COREDNS, lambda: self._call(lambda: answers(f"http://{COREDNS_READY}/ready")), READY_SECONDS)

    def wait_for_kubelet(self) -> None:
        self._processes.wait_for(KUBELET, lambda: self._call(lambda: answers(KUBELET_HEALTH)), READY_SECONDS)

    def _start_kubelet(self, containerd_socket: Path, cgroup: str) -> None:
        pki = self._authority
        kubeconfig = pki.kubeconfig(KUBELET, f"/O=system:nodes/CN=system:node:{NODE}", self._server)
        serving = pki.issue("kubelet-serving", f"/O=system:nodes/CN=system:node:{NODE}", addresses=f"DNS:{NODE},IP:{NODE_IP}")
        resolv = self._folder / "resolv.conf"
        resolv.write_text(f"nameserver {NODE_IP}\n")
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": str(pki.ca.cert)}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.cert),
            "tlsPrivateKeyFile": str(serving.key),
            "containerRuntimeEndpoint": f"unix://{containerd_socket}",
            "cgroupRoot": f"/{cgroup}",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            # The machine is not the node's alone: nothing is reserved, and no pod is evicted for what others use.
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "evictionHard": dict.fromkeys(EVICTION_SIGNALS, "0%"),
            # An image that was loaded is in no registry to be pulled from again.
            "imageGCHighThresholdPercent": 100,
            "maxPods": 500,
            "serializeImagePulls": False,
            "clusterDomain": "cluster.local",
            "clusterDNS": [NODE_IP],
            "resolvConf": str(resolv),
            "podLogsDir": str(self._folder / "pod-logs"),
            "volumePluginDir": str(self._folder / "volume-plugins"),
        }
        flags = [f"--root-dir={self._folder / 'kubelet'}", f"--hostname-override={NODE}", f"--node-ip={NODE_IP}"]
        self._start(binaries.KUBE, KUBELET, f"--config={self._write(KUBELET, config)}", f"--kubeconfig={kubeconfig}", *flags)

    def _start_kube_proxy(self) -> None:
        kubeconfig = self._authority.kubeconfig(KUBE_PROXY, "/CN=system:kube-proxy", self._server)
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "mode": "iptables",
            "clusterCIDR": POD_RANGE,
            "hostnameOverride": NODE,
            # 0 leaves the machine's own limits of connection tracking as they are.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        self._start(binaries.KUBE, KUBE_PROXY, f"--config={self._write(KUBE_PROXY, config)}")

    def _start_coredns(self) -> None:
        kubeconfig = self._authority.kubeconfig(COREDNS, "/O=system:masters/CN=coredns", self._server)
        corefile = self._folder / "Corefile"
        corefile.write_text(COREFILE.format(ip=NODE_IP, ready=COREDNS_READY, kubeconfig=kubeconfig))
        self._start(binaries.COREDNS, COREDNS, "-conf", str(corefile))

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        file = self._folder / f"{name}.json"
        file.write_text(json.dumps(config, indent=1))
        return file

    def _start(self, group: binaries.Group, name: str, *args: str) -> None:
        self._launch(name, [str(group.folder / name), *args])
