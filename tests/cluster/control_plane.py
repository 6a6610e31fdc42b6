"""etcd and the API server; with controllers and a scheduler where there is a node.

The same two programs serve both kinds of cluster: in a namespace of their own on the usual ports, or on loopback on any free ones.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import binaries
from tests.cluster.certs import Authority, Pair
from tests.cluster.namespace import NODE_IP, POD_RANGE, SERVICE_RANGE
from tests.cluster.processes import Processes

APISERVER = "kube-apiserver"
ETCD = "etcd"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
READY_SECONDS = 60.0
ISSUER = "https://kubernetes.default.svc"
KUBERNETES_SERVICE = SERVICE_RANGE.replace(".0/16", ".1")
AUDIT_POLICY = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}]}


@dataclass(frozen=True)
class Place:
    """Where the programs run. ``address``: what others than this machine's loopback reach the API server by."""

    listen: str
    address: str
    port: int
    etcd_port: int
    etcd_peer_port: int


class ControlPlane:
    """``launch(name, argv)`` starts a program; ``call(function)`` calls a function where the programs' addresses are within reach."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        processes: Processes,
        launch: Callable[[str, list[str]], object],
        call: Callable[[Callable[[], bool]], bool],
    ) -> None:
        self.authority = Authority(folder / "pki")
        self.audit_log = folder / "audit.log"
        self._folder = folder
        self._place = place
        self._processes = processes
        self._launch = launch
        self._call = call

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self._place.port}"

    @property
    def admin(self) -> Path:
        return self._folder / "pki" / "admin.kubeconfig"

    def create_identities(self) -> None:
        self.authority.create()
        self.authority.kubeconfig("admin", "/O=system:masters/CN=admin", self.server)

    def start(self) -> None:
        """Returns at once: :meth:`wait` waits."""
        self._start_etcd()
        self._start_apiserver()

    def wait(self) -> None:
        self._processes.wait_for(APISERVER, lambda: self._call(self._is_ready), READY_SECONDS)

    def start_controllers(self) -> None:
        pki = self.authority
        controllers = pki.kubeconfig(CONTROLLER_MANAGER, "/CN=system:kube-controller-manager", self.server)
        scheduler = pki.kubeconfig(SCHEDULER, "/CN=system:kube-scheduler", self.server)
        self._start(
            binaries.KUBE,
            CONTROLLER_MANAGER,
            f"--kubeconfig={controllers}",
            "--leader-elect=false",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self._signing_key}",
            f"--root-ca-file={pki.ca.cert}",
            f"--cluster-signing-cert-file={pki.ca.cert}",
            f"--cluster-signing-key-file={pki.ca.key}",
            f"--cluster-cidr={POD_RANGE}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--allocate-node-cidrs=false",
        )
        self._start(binaries.KUBE, SCHEDULER, f"--kubeconfig={scheduler}", "--leader-elect=false")

    @property
    def _signing_key(self) -> Path:
        return self._folder / "pki" / "service-accounts.key"

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._place.etcd_port, self._place.etcd_peer_port))
        self._start(
            binaries.ETCD,
            ETCD,
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # A crash of the machine may lose it all: it is a test's.
            "--unsafe-no-fsync",
        )

    def _start_apiserver(self) -> None:
        pki, place = self.authority, self._place
        names = f"DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:{KUBERNETES_SERVICE},IP:{place.address}"
        serving = pki.issue("apiserver", "/CN=kube-apiserver", addresses=names)
        to_kubelet = pki.issue("apiserver-to-kubelet", "/O=system:masters/CN=apiserver-to-kubelet")
        front_proxy = pki.issue("front-proxy", "/CN=front-proxy")
        pki.signing_key("service-accounts")
        policy = self._folder / "audit-policy.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        self._start(
            binaries.KUBE,
            APISERVER,
            f"--etcd-servers=http://127.0.0.1:{place.etcd_port}",
            f"--bind-address={place.listen}",
            f"--advertise-address={place.address}",
            f"--secure-port={place.port}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            *_tls("--tls-cert-file", "--tls-private-key-file", serving),
            f"--client-ca-file={pki.ca.cert}",
            *_tls("--kubelet-client-certificate", "--kubelet-client-key", to_kubelet),
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-signing-key-file={self._signing_key}",
            f"--service-account-key-file={self._signing_key}",
            *_tls("--proxy-client-cert-file", "--proxy-client-key-file", front_proxy),
            f"--requestheader-client-ca-file={pki.ca.cert}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
        )

    def _start(self, group: binaries.Group, name: str, *flags: str) -> None:
        self._launch(name, [str(group.folder / name), *flags])

    def _is_ready(self) -> bool:
        trust = ssl.create_default_context(cafile=str(self.authority.ca.cert))
        return answers(f"{self.server}/readyz", trust)


def answers(url: str, trust: ssl.SSLContext | None = None) -> bool:
    # Not through a proxy that the environment may name.
    handlers = [urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=trust)] if trust else [])]
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _tls(cert_flag: str, key_flag: str, pair: Pair) -> list[str]:
    return [f"{cert_flag}={pair.cert}", f"{key_flag}={pair.key}"]


IN_NAMESPACE = Place(listen="0.0.0.0", address=NODE_IP, port=6443, etcd_port=2379, etcd_peer_port=2380)
