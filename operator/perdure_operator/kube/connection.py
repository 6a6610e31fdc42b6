"""Where the apiserver is, and how to prove who we are.

In a pod that is a file of the kubelet's and two environment variables, read here: ``import kubernetes.aio`` loads the models of the whole
API twice (110 MiB and 6 s of CPU time, in every gateway and operator), to read that same file. Kubeconfigs are read by
:mod:`kubeconfig`, for the same reason.
"""

from __future__ import annotations

import os
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure_operator.kube.errors import KubeError, KubeUnavailable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""The kubelet replaces a projected token at 80 % of its life, so a minute late is early."""
KUBECONFIG_SECONDS = 300.0
"""Read anew so often, exec plugin included."""


class NoCluster(KubeError):
    """There is no cluster to talk to."""

    code = "no-cluster"
    action = "Run in a pod with a service account, or set KUBECONFIG to a readable kubeconfig with a current context."


@dataclass(frozen=True)
class Endpoint:
    """``ca_file`` None: the certificates that this machine trusts. ``server_name``: what the certificate must say, if not the host."""

    server: str
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    server_name: str | None = None
    proxy: str | None = None

    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        # Many clusters' own CA lacks extensions that newer Pythons insist on by default.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Connection(ABC):
    """An endpoint, and the value of the Authorization header, which changes with time."""

    endpoint: Endpoint

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._read_at = float("-inf")
        self._value: str | None = None

    async def authorization(self, *, fresh: bool = False) -> str | None:
        """``fresh``: what we had was refused. Raises KubeUnavailable."""
        if fresh or time.monotonic() - self._read_at > self._max_age:
            self._value = await self._read()
            self._read_at = time.monotonic()
        return self._value

    @abstractmethod
    async def _read(self) -> str | None: ...


class ServiceAccount(Connection):
    """That of the pod we run in."""

    def __init__(self, folder: Path = SERVICE_ACCOUNT, env: Mapping[str, str] = os.environ) -> None:
        super().__init__(TOKEN_SECONDS)
        self._token = folder / "token"
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not self._token.is_file():
            raise NoCluster("KUBERNETES_SERVICE_HOST or the service account's token is missing")
        host = f"[{host}]" if ":" in host else host
        self.endpoint = Endpoint(f"https://{host}:{port}", ca_file=str(folder / "ca.crt"))

    async def _read(self) -> str | None:
        try:
            # A few hundred bytes of a memory file system.
            return f"Bearer {self._token.read_text(encoding='ascii').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise KubeUnavailable(f"the service account's token cannot be read: {error}") from error


async def connect(kubeconfig: str | None = None, context: str | None = None, *, env: Mapping[str, str] = os.environ) -> Connection:
    """The kubeconfig that is named, else the service account of this pod, else ``KUBECONFIG`` or ``~/.kube/config``. Raises NoCluster."""
    if kubeconfig is None and context is None and env.get("KUBERNETES_SERVICE_HOST"):
        return ServiceAccount(env=env)
    from perdure_operator.kube.kubeconfig import Kubeconfig, default_paths

    connection = Kubeconfig(kubeconfig or default_paths(env), context)
    await connection.authorization()
    return connection
