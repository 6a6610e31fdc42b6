"""Which kinds of objects Perdure touches, and where an apiserver serves them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from perdure_operator.kube.names import GROUP, VERSION


@dataclass(frozen=True)
class Resource:
    """``group`` is empty for the core API. ``plural`` is the name in paths and in RBAC."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Without ``namespace``: all namespaces, or a kind that has none."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, *filter(None, (name, subresource))]
        return "/" + "/".join(quote(part, safe="") for part in parts)


AGENTRUNS = Resource(GROUP, VERSION, "agentruns", "AgentRun")
AGENTPOOLS = Resource(GROUP, VERSION, "agentpools", "AgentPool")
TRIGGERS = Resource(GROUP, VERSION, "triggers", "Trigger")
PODS = Resource("", "v1", "pods", "Pod")
EVENTS = Resource("", "v1", "events", "Event")
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICES = Resource("", "v1", "services", "Service")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False)
