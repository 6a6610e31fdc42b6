"""The same tests on the fake and on a real apiserver.

It alone has no garbage collector: that of the fake is tried in ``test_garbage.py``, whose cases fit any cluster with controllers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from tests.cluster import apiserver, binaries
from tests.cluster.clients import ExistingCluster
from tests.cluster.unavailable import unavailable
from tests.harness.fake_kube import FakeKube

from perdure_operator.kube.client import NAMESPACES, KubeApi, KubeClient, Object, Resource, TokenStatus
from perdure_operator.kube.errors import KubeConflict, KubeUnavailable

WIDGETS = Resource("test.perdure.dev", "v1", "widgets", "Widget")
"""A kind of our own, with a status subresource and any content."""
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False)
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
_CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_CRD: Object = {
    "metadata": {"name": f"{WIDGETS.plural}.{WIDGETS.group}"},
    "spec": {
        "group": WIDGETS.group,
        "scope": "Namespaced",
        "names": {"plural": WIDGETS.plural, "singular": "widget", "kind": WIDGETS.kind},
        "versions": [
            {
                "name": WIDGETS.version, "served": True, "storage": True, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": _ANYTHING, "status": _ANYTHING}}},
            }
        ],
    },
}  # fmt: skip


@dataclass
class Bench:
    """``kube`` under test, and a namespace of the test's own."""

    kube: KubeApi
    namespace: str = ""
    made: list[str] = field(default_factory=list)

    async def new_namespace(self, labels: dict[str, str] | None = None) -> str:
        name = f"conformance-{uuid4().hex[:8]}"
        await self.kube.create(NAMESPACES, None, {"metadata": {"name": name, "labels": labels or {}}})
        self.made.append(name)
        return name

    async def clean(self) -> None:
        for name in self.made:
            if (namespace := await self.kube.get(NAMESPACES, None, name)) is not None:
                await self.kube.delete(NAMESPACES, None, name, uid=namespace["metadata"]["uid"])

    async def widget(self, name: str = "a", **parts: Any) -> Object:
        metadata = {"name": name, **parts.pop("metadata", {})}
        return await self.kube.create(WIDGETS, self.namespace, {"metadata": metadata, "spec": {"x": 1}, **parts})

    async def read(self, name: str = "a") -> Object:
        found = await self.kube.get(WIDGETS, self.namespace, name)
        assert found is not None
        return found

    async def grant(self, user: str, verb: str, resource: str) -> None:
        """In the test's namespace."""
        raise NotImplementedError

    async def token(self, *, audience: str, pod: Object | None = None) -> str:
        """Of the namespace's service account ``default``, bound to a pod."""
        raise NotImplementedError


class FakeBench(Bench):
    kube: FakeKube

    async def grant(self, user: str, verb: str, resource: str) -> None:
        self.kube.grants.add((user, verb, resource, self.namespace))

    async def token(self, *, audience: str, pod: Object | None = None) -> str:
        token = uuid4().hex
        extra = {"authentication.kubernetes.io/pod-uid": (pod["metadata"]["uid"],)} if pod else {}
        user = f"system:serviceaccount:{self.namespace}:default"
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{self.namespace}", "system:authenticated")
        self.kube.tokens[token] = TokenStatus(True, user, "u", groups, extra, (audience,))
        return token


class RealBench(Bench):
    kube: KubeClient

    async def grant(self, user: str, verb: str, resource: str) -> None:
        name = f"conformance-{uuid4().hex[:8]}"
        rule = {"apiGroups": ["perdure.dev"], "resources": [resource], "verbs": [verb]}
        await self.kube.create(ROLES, None, {"metadata": {"name": name}, "rules": [rule]})
        reference = {"apiGroup": ROLES.group, "kind": ROLES.kind, "name": name}
        subject = {"apiGroup": ROLES.group, "kind": "User", "name": user}
        await self.kube.create(BINDINGS, self.namespace, {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})
        # The authorizer reads roles from a watch of its own, which may be a moment behind.
        main, _, sub = resource.partition("/")
        async with asyncio.timeout(10):
            while True:
                asked = {"verb": verb, "group": "perdure.dev", "resource": main, "subresource": sub, "namespace": self.namespace}
                if (await self.kube.review_access(user, ["system:authenticated"], {}, **asked)).allowed:
                    return
                await asyncio.sleep(0.02)

    async def token(self, *, audience: str, pod: Object | None = None) -> str:
        spec: Object = {"audiences": [audience], "expirationSeconds": 600}
        if pod:
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        # The port has no subresources to create: nothing but this test needs one.
        path = ACCOUNTS.path(self.namespace, "default", "token")
        made = await self.kube._request("create", ACCOUNTS, "POST", path, body=body, subresource="token")
        return str(made["status"]["token"])


@pytest.fixture(params=["fake", "real"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "fake":
        fake = FakeKube(garbage_collector=False)
        fake.statuses.add(WIDGETS)
        made: Bench = FakeBench(fake)
        made.namespace = await made.new_namespace()
        yield made
        return
    async with await KubeClient.connect(request.getfixturevalue("kubeconfig")) as client:
        made = await real_bench(client)
        yield made
        await made.clean()


async def real_bench(client: KubeClient, labels: dict[str, str] | None = None) -> RealBench:
    await _ensure(client, _CRDS, None, _CRD)
    async with asyncio.timeout(30):
        while not await _serves(client):  # noqa: ASYNC110 (what an apiserver serves has no event)
            await asyncio.sleep(0.05)
    bench = RealBench(client)
    bench.namespace = await bench.new_namespace(labels)
    # An apiserver alone has nobody who makes it, and takes no pod without.
    await _ensure(client, ACCOUNTS, bench.namespace, {"metadata": {"name": "default"}})
    return bench


async def _ensure(client: KubeClient, resource: Resource, namespace: str | None, body: Object) -> None:
    with contextlib.suppress(KubeConflict):
        await client.create(resource, namespace, body)


async def _serves(client: KubeClient) -> bool:
    try:
        await client.list(WIDGETS, None)
    except KubeUnavailable:
        return False
    return True


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[str]:
    """Of an administrator: of the cluster that PERDURE_TEST_KUBECONFIG names, else of an apiserver of our own, without controllers."""
    if existing := ExistingCluster.from_environment():
        yield str(existing.kubeconfig)
        return
    if reason := apiserver.obstacle():
        unavailable(reason)
    if not binaries.are_built(binaries.CONTROL_PLANE):
        unavailable("no API server has been built yet: run `make cluster-build`")
    with apiserver.running() as server:
        yield str(server.kubeconfig)
