"""Where the gateway of a cluster is: the ConfigMap `perdure-cli` that the chart writes, for everybody who may read it."""

from __future__ import annotations

from dataclasses import dataclass

from perdure_operator.kube.client import CONFIGMAPS, KubeApi, Object
from perdure_operator.kube.errors import KubeError, KubeForbidden, KubeNotFound

NAME, LABELS = "perdure-cli", "app.kubernetes.io/name=perdure"
USUAL_NAMESPACES = ("perdure", "perdure-system")


class NotInstalled(KubeNotFound):
    """No Perdure is found in this cluster."""

    code = "not-installed"
    action = (
        f"Install the chart, or say where it is with --system-namespace NAMESPACE (it holds the ConfigMap {NAME}, which you must be "
        "allowed to get)."
    )


class Several(KubeError):
    """More than one Perdure is installed."""

    code, status = "several-installed", 400
    action = "Say which one with --system-namespace NAMESPACE."


@dataclass(frozen=True)
class Published:
    """``url`` may be empty: then only by port-forward. ``ca``: PEM text, may be empty."""

    url: str
    namespace: str
    service: str
    port: int
    ca: str

    @property
    def server_name(self) -> str:
        """What the certificate says."""
        return f"{self.service}.{self.namespace}.svc"


async def find_gateway(kube: KubeApi, system_namespace: str | None, namespace: str) -> Published:
    """``namespace``: of the context, where a Perdure of that namespace alone may be. Raises NotInstalled, Several, KubeError."""
    if system_namespace is not None:
        found = await kube.get(CONFIGMAPS, system_namespace, NAME)
        if found is None:
            raise NotInstalled(f"there is no ConfigMap {NAME} in the namespace {system_namespace}")
        return _published(found)
    try:
        everywhere, _ = await kube.list(CONFIGMAPS, None, labels=LABELS)
        candidates = [item for item in everywhere if item["metadata"]["name"] == NAME]
    except KubeForbidden:
        candidates = [item for place in dict.fromkeys((*USUAL_NAMESPACES, namespace)) if (item := await _get(kube, place)) is not None]
    if not candidates:
        raise NotInstalled("no Perdure is found in this cluster, or you may not look for it")
    own = [item for item in candidates if item["metadata"]["namespace"] == namespace]
    if len(chosen := own or candidates) > 1:
        places = ", ".join(sorted(item["metadata"]["namespace"] for item in chosen))
        raise Several(f"Perdure is installed more than once, in the namespaces {places}")
    return _published(chosen[0])


async def _get(kube: KubeApi, namespace: str) -> Object | None:
    try:
        return await kube.get(CONFIGMAPS, namespace, NAME)
    except KubeForbidden:
        return None


def _published(config_map: Object) -> Published:
    data = config_map.get("data") or {}
    try:
        return Published(data.get("url", ""), data["namespace"], data["service"], int(data["port"]), data.get("ca.crt", ""))
    except (KeyError, ValueError) as error:
        place = config_map["metadata"]["namespace"]
        raise NotInstalled(f"the ConfigMap {NAME} in the namespace {place} does not say where the gateway is: {error!r}") from None
