"""The adapter of the port to a real apiserver: raw JSON over a few kept connections, typed errors, counted and limited requests.

No request is repeated here, except one that was refused for a token that the kubelet has replaced meanwhile: whether a second try makes
sense is the caller's to know (the work queue's, mostly). ``Retry-After`` holds all requests of this client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from perdure_operator.kube.connection import Connection, connect
from perdure_operator.kube.errors import KubeConflict, KubeInvalid, KubeNotFound, KubeUnavailable
from perdure_operator.kube.limits import TokenBucket
from perdure_operator.kube.metrics import REQUESTS
from perdure_operator.kube.names import FIELD_MANAGER
from perdure_operator.kube.port import AccessStatus, KubeApi, Object, Propagation, TokenStatus
from perdure_operator.kube.refusals import Expired, Unserved, refusal
from perdure_operator.kube.resources import (
    ACCESS_REVIEWS,
    AGENTPOOLS,
    AGENTRUNS,
    CONFIGMAPS,
    EVENTS,
    NAMESPACES,
    PODS,
    SECRETS,
    TOKEN_REVIEWS,
    TRIGGERS,
    Resource,
)

__all__ = [
    "AGENTPOOLS", "AGENTRUNS", "CONFIGMAPS", "EVENTS", "NAMESPACES", "PODS", "SECRETS", "TRIGGERS",
    "AccessStatus", "KubeApi", "KubeClient", "KubeSettings", "Object", "Propagation", "Resource", "TokenStatus",
]  # fmt: skip

PAGE = 500
FENCED_TRIES = 5
"""Each is lost to another writer of the same object."""
_JSON, _MERGE, _OPERATIONS = "application/json", "application/merge-patch+json", "application/json-patch+json"
_FIELD_MANAGER = {"fieldManager": FIELD_MANAGER}


@dataclass(frozen=True)
class KubeSettings:
    """``rate`` requests a second, ``burst`` at once. ``timeout``: seconds for a request, waiting for its turn included."""

    rate: float = 50.0
    burst: int = 100
    connections: int = 32
    connect_timeout: float = 5.0
    timeout: float = 30.0
    user_agent: str = FIELD_MANAGER


class KubeClient:
    """A :class:`KubeApi`. Close it, or use it as a context manager."""

    def __init__(self, connection: Connection, settings: KubeSettings = KubeSettings()) -> None:
        self._connection = connection
        self._settings = settings
        self._bucket = TokenBucket(settings.rate, settings.burst)
        endpoint = connection.endpoint
        self._proxy, self._server_name = endpoint.proxy, endpoint.server_name
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.connections, ssl=endpoint.tls()),
            timeout=aiohttp.ClientTimeout(total=settings.timeout, sock_connect=settings.connect_timeout),
            # Inside a cluster the network is cheaper than inflating.
            headers={"User-Agent": settings.user_agent, "Accept": _JSON, "Accept-Encoding": "identity"},
            trust_env=True,
        )

    @classmethod
    async def connect(
        cls,
        kubeconfig: str | None = None,
        context: str | None = None,
        settings: KubeSettings = KubeSettings(),
    ) -> KubeClient:
        """Raises NoCluster. Asks the apiserver nothing yet."""
        return cls(await connect(kubeconfig, context), settings)

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------------------ objects

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        try:
            return await self._request("get", resource, "GET", resource.path(namespace, name))
        except KubeNotFound:
            return None

    async def list(self, resource: Resource, namespace: str | None, *, labels: str = "") -> tuple[list[Object], str]:
        query = {"limit": str(PAGE)} | ({"labelSelector": labels} if labels else {})
        items: list[Object] = []
        while True:
            try:
                page = await self._request("list", resource, "GET", resource.path(namespace), query=query)
            except Expired:
                if "continue" not in query:
                    raise
                # The state that the first page was of is compacted away: all at once then, which cannot expire.
                items = []
                query.pop("continue")
                query["limit"] = "0"
                continue
            for item in page["items"] or ():
                # Items of built-in kinds come without the two.
                items.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            if not page["metadata"].get("continue"):
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = page["metadata"]["continue"]

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        whole = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return await self._request("create", resource, "POST", resource.path(namespace), query=_FIELD_MANAGER, body=whole)

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, *,
        uid: str, grace_seconds: int | None = None, propagation: Propagation | None = None,
    ) -> bool:  # fmt: skip
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation is not None:
            options["propagationPolicy"] = propagation
        try:
            await self._request("delete", resource, "DELETE", resource.path(namespace, name), body=options)
        except KubeNotFound:
            return False
        except KubeConflict:
            found = await self.get(resource, namespace, name)
            if found is None or found["metadata"]["uid"] != uid:
                return False
            raise
        return True

    async def merge_patch(self, resource: Resource, namespace: str | None, name: str, body: Object, *, subresource: str = "") -> Object:
        metadata = body.get("metadata", {})
        if not subresource or "uid" not in metadata or "resourceVersion" in metadata:
            return await self._patch(resource, namespace, name, body, _MERGE, subresource)
        # An apiserver compares the uid of a patch of the object itself, and silently ignores that of one of its status.
        for tries_left in reversed(range(FENCED_TRIES)):
            found = await self.get(resource, namespace, name)
            if found is None:
                raise KubeNotFound(f"{resource.plural} {namespace}/{name} is gone")
            if found["metadata"]["uid"] != metadata["uid"]:
                raise KubeConflict(f"{resource.plural} {namespace}/{name} is another object, with uid {found['metadata']['uid']}")
            fenced = {**body, "metadata": {**metadata, "resourceVersion": found["metadata"]["resourceVersion"]}}
            try:
                return await self._patch(resource, namespace, name, fenced, _MERGE, subresource)
            except KubeConflict:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def json_patch(
        self, resource: Resource, namespace: str | None, name: str, operations: Sequence[Object], *, subresource: str = ""
    ) -> Object:
        try:
            return await self._patch(resource, namespace, name, list(operations), _OPERATIONS, subresource)
        except KubeInvalid as error:
            # It does not say which operation it could not apply.
            if error.unspecific and any(operation["op"] == "test" for operation in operations):
                raise KubeConflict(f"{error}: a test failed, or a path is not there") from error
            raise

    async def _patch(
        self, resource: Resource, namespace: str | None, name: str, body: Object | Sequence[Object], content_type: str, subresource: str
    ) -> Object:
        path = resource.path(namespace, name, subresource)
        return await self._request(
            "patch", resource, "PATCH", path, query=_FIELD_MANAGER, body=body, content_type=content_type, subresource=subresource
        )

    # ------------------------------------------------------------------------------------------------------------ reviews

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenStatus:
        spec: Object = {"token": token} | ({"audiences": list(audiences)} if audiences else {})
        status = (await self._review(TOKEN_REVIEWS, spec)).get("status") or {}
        user = status.get("user") or {}
        return TokenStatus(
            authenticated=status.get("authenticated", False),
            username=user.get("username", ""),
            uid=user.get("uid", ""),
            groups=tuple(user.get("groups") or ()),
            extra={key: tuple(values) for key, values in (user.get("extra") or {}).items()},
            audiences=tuple(status.get("audiences") or ()),
            error=status.get("error", ""),
        )

    async def review_access(
        self, user: str, groups: Sequence[str], extra: Mapping[str, Sequence[str]], *,
        verb: str, group: str, resource: str, subresource: str = "", namespace: str = "", name: str = "",
    ) -> AccessStatus:  # fmt: skip
        attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": namespace, "name": name}
        spec: Object = {
            "user": user,
            "groups": list(groups),
            "extra": {key: list(values) for key, values in extra.items()},
            "resourceAttributes": {key: value for key, value in attributes.items() if value},
        }
        status = (await self._review(ACCESS_REVIEWS, spec)).get("status") or {}
        return AccessStatus(status.get("allowed", False), status.get("reason", ""))

    async def _review(self, resource: Resource, spec: Object) -> Object:
        body = {"apiVersion": resource.api_version, "kind": resource.kind, "spec": spec}
        return await self._request("create", resource, "POST", resource.path(), body=body)

    # ----------------------------------------------------------------------------------------------------------- requests

    async def _request(
        self, verb: str, resource: Resource, method: str, path: str, *,
        query: Mapping[str, str] | None = None, body: Any = None, content_type: str = _JSON, subresource: str = "",
    ) -> Object:  # fmt: skip
        label = f"{resource.plural}/{subresource}" if subresource else resource.plural
        send = partial(self._send, verb, label, method, path, query, body, content_type)
        status, headers, content = await send(fresh=False)
        if status == 401:
            status, headers, content = await send(fresh=True)
        if status < 300:
            answer: Object = msgspec.json.decode(content)
            return answer
        error = refusal(status, headers, content, f"{verb} {path}")
        if isinstance(error, KubeUnavailable) and error.retry_after is not None and not isinstance(error, Unserved):
            self._bucket.pause(error.retry_after)
        raise error

    async def _send(
        self, verb: str, label: str, method: str, path: str, query: Mapping[str, str] | None, body: Any, content_type: str, *, fresh: bool
    ) -> tuple[int, Mapping[str, str], bytes]:
        await self._bucket.take(patience=self._settings.timeout)
        headers = {} if body is None else {"Content-Type": content_type}
        authorization = await self._connection.authorization(fresh=fresh)
        if authorization is not None:
            headers["Authorization"] = authorization
        url = URL(self._connection.endpoint.server + path, encoded=True).with_query(query)
        code = "none"
        try:
            async with self._session.request(
                method, url, data=None if body is None else msgspec.json.encode(body), headers=headers,
                proxy=self._proxy, server_hostname=self._server_name, allow_redirects=False,
            ) as response:  # fmt: skip
                content = await response.read()
                code = str(response.status)
                return response.status, response.headers, content
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeUnavailable(f"{verb} {path}: the apiserver did not answer: {str(error) or type(error).__name__}") from error
        finally:
            REQUESTS.labels(verb, label, code).inc()
