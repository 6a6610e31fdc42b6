"""A cluster: resources and pods by its apiserver, runs by its gateway, both with the person's own credential.

The gateway asks the apiserver who holds the bearer token that it is shown, and what they may do (TokenReview, SubjectAccessReview). A
client certificate cannot be shown that way: TLS ends at whom one connects to, and the apiserver's service proxy, which would take it,
takes the Authorization header off and forwards as nobody. TokenRequest makes tokens of service accounts, never of people. So a person
with a certificate has to be a service account here, and to say so.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from perdure_operator.cli.background import Background
from perdure_operator.cli.client import Client, Forbidden, NotFound
from perdure_operator.cli.connection import Applied, Connection, Lease, LogGone
from perdure_operator.cli.discovery import Published, find_gateway
from perdure_operator.cli.routes import Route
from perdure_operator.cli.story import PodName
from perdure_operator.cli.target import Choice
from perdure_operator.cli.views import RunView
from perdure_operator.domain.errors import InvalidInput, PerdureError
from perdure_operator.kube.client import AGENTPOOLS, AGENTRUNS, PODS, TRIGGERS, KubeClient, KubeSettings, Object
from perdure_operator.kube.errors import KubeConflict, KubeInvalid, KubeNotFound, KubeUnavailable
from perdure_operator.kube.kubeconfig import Kubeconfig
from perdure_operator.kube.names import AGENT_CONTAINER, POD_ID_LABEL, SIDECAR_CONTAINER, pod_name
from perdure_operator.kube.podlogs import log_lines
from perdure_operator.kube.portforward import PortForward
from perdure_operator.kube.streams import Streams

if TYPE_CHECKING:
    from perdure_operator.local.manifests import Loaded

USER_AGENT = "kubectl-agentrun"
POLL_SECONDS = 1.0
QUIET_SECONDS = 2.0
"""A reused pod goes on after a run; what the run has said last comes within so long."""
DIRECT_SECONDS = 4.0
"""A published address that does not answer so long is not reachable from here."""
TOKEN_SECONDS = 3600
RESOURCES = {"AgentPool": AGENTPOOLS, "AgentRun": AGENTRUNS, "Trigger": TRIGGERS}


class ClusterConnection(Connection):
    poll_seconds = POLL_SECONDS

    def __init__(self, choice: Choice) -> None:
        """Raises NoCluster."""
        self._choice = choice
        self._kubeconfig = Kubeconfig(choice.kubeconfig, choice.context)
        self.context = self._kubeconfig.context.name
        self.default_namespace = self._kubeconfig.context.namespace
        self._background = Background()
        self._token = ""

    @cached_property
    def _kube(self) -> KubeClient:
        async def start() -> KubeClient:
            await self._kubeconfig.authorization()
            return KubeClient(self._kubeconfig, KubeSettings(user_agent=USER_AGENT))

        return self._background.run(start())

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()
        for opened in ("_forward", "_streams", "_kube"):
            if opened in self.__dict__:
                self._background.run(getattr(self, opened).close())
        self._background.close()

    @cached_property
    def _streams(self) -> Streams:
        async def start() -> Streams:
            await self._kubeconfig.authorization()
            return Streams(self._kubeconfig, USER_AGENT)

        return self._background.run(start())

    # ------------------------------------------------------------------------------------------------------------ gateway

    @cached_property
    def client(self) -> Client:
        self._credential(fresh=False)
        found = self._background.run(find_gateway(self._kube, self._choice.system_namespace, self.default_namespace))
        self._forward = PortForward(self._kube, self._streams, found.namespace, found.service, found.port)
        direct = [Route(found.url, ca=found.ca, connect_seconds=DIRECT_SECONDS)] if found.url else []
        routes = [*direct, self._forwarded(found, self._forward)]
        return Client(routes, lambda fresh: self._credential(fresh=fresh), hint=_HINT, elsewhere=self._unrecorded)

    def _forwarded(self, found: Published, forward: PortForward) -> Route:
        def dial() -> socket.socket:
            try:
                return self._background.run(forward.dial())
            except KubeUnavailable as error:
                raise ConnectionError(str(error)) from error

        name = f"the Service {found.namespace}/{found.service} (port-forward)"
        return Route(
            f"https://{found.server_name}:{found.port}", dial=dial, why=lambda: forward.failure, ca=found.ca, system_ca=False, name=name
        )

    def _credential(self, *, fresh: bool) -> str:
        if self._choice.as_serviceaccount is not None:
            return self._service_account_token(self._choice.as_serviceaccount, fresh=fresh)
        authorization = self._background.run(self._kubeconfig.authorization(fresh=fresh)) or ""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Forbidden(
                f"the user of the context {self.context} has no bearer token, and the gateway knows people by that alone: a client "
                "certificate ends at the apiserver",
                action="Give --as-serviceaccount NAMESPACE/NAME (you need the right to create serviceaccounts/token there), or a --context "
                "whose user has a token or a credential plugin.",
            )
        return token

    def _service_account_token(self, account: str, *, fresh: bool) -> str:
        if fresh or not self._token:
            namespace, slash, name = account.rpartition("/")
            if not name or "/" in namespace:
                raise InvalidInput(f"{account} is not NAMESPACE/NAME of a service account", action="Correct --as-serviceaccount.")
            place = namespace if slash else self._choice.namespace or self.default_namespace
            self._token = self._background.run(self._kube.request_token(place, name, seconds=TOKEN_SECONDS))
        return self._token

    # ------------------------------------------------------------------------------------------------------------ resources

    def apply(self, loaded: list[Loaded], *, store_only: bool, say: Callable[[str], None]) -> Iterator[Applied]:
        """Pools (and triggers) that are there already are left as they are: to change them is `kubectl apply`."""
        from perdure_operator.local.manifests import runs

        for item in loaded:
            if item.manifest.kind != "AgentRun":
                self._create(item.manifest.kind, item.namespace, item.manifest.to_json())
        for item, run in runs(loaded):
            if store_only:
                yield self._submit_store_only(item, run.to_json())
            else:
                yield self._submit(item.namespace, run.to_json())

    def submit(self, namespace: str, name: str, spec: dict[str, Any], *, store_only: bool) -> Applied:
        if not store_only:
            return self._submit(namespace, {"metadata": {"name": name}, "spec": spec})
        from perdure_operator.cli.apply import submit

        return submit(self.client, namespace, name, {"spec": spec}, f"submit:{name}")

    def _submit(self, namespace: str, body: Object) -> Applied:
        body.pop("status", None)
        made, created = self._create("AgentRun", namespace, body)
        return Applied(_view(made), created, made)

    def _submit_store_only(self, item: Loaded, manifest: Object) -> Applied:
        from perdure_operator.cli.apply import submit_manifest

        if "template" in manifest["spec"]["agent"]:
            raise InvalidInput(
                f"{item.file}: a run with a template of its own needs a resource, since its pool is made from that",
                action="Submit it without --store-only, or give it a poolRef.",
            )
        return submit_manifest(self.client, item)

    def _create(self, kind: str, namespace: str, body: Object) -> tuple[Object, bool]:
        """The object as it is now, and whether it is new."""
        resource = RESOURCES[kind]
        body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
        try:
            return self._background.run(self._kube.create(resource, namespace, body)), True
        except KubeConflict as conflict:
            if not conflict.exists:
                raise
            found = self._background.run(self._kube.get(resource, namespace, body["metadata"]["name"]))
            if found is None:
                raise KubeNotFound(f"{kind} {namespace}/{body['metadata']['name']} was deleted just now") from conflict
            return found, False

    def trigger_names(self, namespace: str) -> list[str]:
        found, _ = self._background.run(self._kube.list(TRIGGERS, namespace))
        return [item["metadata"]["name"] for item in found]

    def refresh(self, run: RunView) -> RunView:
        if not run.run_id:
            found = self._background.run(self._kube.get(AGENTRUNS, run.namespace, run.name))
            if found is None:
                raise KubeNotFound(f"the AgentRun {run.full_name} was deleted before it became a run")
            run = _view(found)
        return self.client.run(run.namespace, run.run_id) if run.run_id else run

    def _unrecorded(self, namespace: str, name: str) -> NotFound | None:
        """What the resource says that has become no run, or whose run the database has lost."""
        try:
            resource = self._background.run(self._kube.get(AGENTRUNS, namespace, name))
        except PerdureError:
            return None  # who may not look at it is told what the gateway says
        if resource is None:
            return None
        status, view = resource.get("status") or {}, _view(resource)
        where = ", ".join(part for part in (view.state, status.get("waitReason")) if part)
        said = ": ".join(part for part in (where, view.message) if part) if status else "no operator has looked at it yet"
        return NotFound(
            f"there is no record of a run {name} in namespace {namespace}, but the AgentRun is there: {said}",
            code="no-record",
            action=f"`kubectl describe agentrun {name} -n {namespace}` shows all of it; "
            f"`{self._choice.program} get` lists the runs that there are.",
        )

    # ------------------------------------------------------------------------------------------------------------ pods

    def pod_names(self, pool: str) -> PodName:
        name = pool.partition("/")[2]
        return lambda pod_id: pod_name(name, UUID(pod_id)) if name else UUID(pod_id).hex[:10]

    def log(self, lease: Lease, namespace: str, *, sidecar: bool, follow: bool) -> Iterable[str]:
        pods, _ = self._background.run(self._kube.list(PODS, namespace, labels=f"{POD_ID_LABEL}={lease.pod_id}"))
        name = self.pod_names(lease.pool)(lease.pod_id)
        gone = LogGone(f"the pod {name} is gone, and its log with it")
        if not pods:
            raise gone
        container = SIDECAR_CONTAINER if sidecar else AGENT_CONTAINER
        lines = log_lines(self._streams, namespace, pods[0]["metadata"]["name"], container, follow=follow)
        return self._until_over(lines, lease, gone)

    def _until_over(self, lines: Any, lease: Lease, gone: LogGone) -> Iterator[str]:
        quiet_since = time.monotonic()
        try:
            for line in self._background.iterate(lines, QUIET_SECONDS / 4):
                if line is not None:
                    quiet_since = time.monotonic()
                    yield line
                elif lease.over.is_set() and time.monotonic() - quiet_since > QUIET_SECONDS:
                    return
        except KubeNotFound:
            raise gone from None
        except KubeInvalid as error:
            raise LogGone(str(error)) from None


_HINT = (
    "Look whether its pods are ready (kubectl get pods -n the namespace named above), and whether you may get services, list pods, and get "
    "and create pods/portforward there."
)


def _view(resource: Object) -> RunView:
    """As much of a run as its resource says. No id: the operator has not taken it yet, and has perhaps said why."""
    metadata, status = resource["metadata"], resource.get("status") or {}
    conditions = [condition["message"] for condition in status.get("conditions") or () if condition.get("message")]
    return RunView(
        run_id=status.get("runID", ""),
        namespace=metadata["namespace"],
        name=metadata["name"],
        state=status.get("phase", "Pending"),
        message=conditions[0] if conditions else "",
        created_at=metadata.get("creationTimestamp"),
    )
