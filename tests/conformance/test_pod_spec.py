"""The worker pod that we write is one that an apiserver takes, in a namespace that enforces Pod Security "restricted"."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from tests.conformance.conftest import RealBench, real_bench

from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.kube.client import PODS, KubeClient
from perdure_operator.kube.errors import KubeForbidden
from perdure_operator.kube.specs.pod import PodSettings, worker_pod

AGENT = {"name": "agent", "image": "agent:1"}
POOLS: dict[str, dict[str, Any]] = {
    "plain": {"template": {"spec": {"containers": [AGENT]}}},
    "reused, with a spool": {
        "template": {"spec": {"containers": [AGENT]}}, "podReuse": {"mode": "ForkPerRun"}, "spool": "Disk",
    },
    "with everything": {
        "template": {
            "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
            "spec": {
                "containers": [
                    AGENT | {"securityContext": {"runAsUser": 1000, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["NET_RAW"]}}},
                    {"name": "helper", "image": "h", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
                ],
                "initContainers": [{"name": "fetch", "image": "f"}],
                "volumes": [{"name": "data", "emptyDir": {"sizeLimit": "1Mi"}}],
                "securityContext": {"fsGroup": 2000, "seccompProfile": {"type": "RuntimeDefault"}},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "terminationGracePeriodSeconds": 5,
            },
        },
    },
}  # fmt: skip


@pytest.fixture
async def restricted(kubeconfig: str) -> AsyncIterator[RealBench]:
    async with await KubeClient.connect(kubeconfig) as client:
        bench = await real_bench(client, {"pod-security.kubernetes.io/enforce": "restricted"})
        yield bench
        await bench.clean()


@pytest.mark.parametrize("pool", POOLS)
async def test_a_restricted_namespace_takes_the_pod(restricted: RealBench, pool: str) -> None:
    settings = PodSettings("sidecar:1", ["https://perdure-gateway.perdure.svc"], "perdure-system.perdure")
    pod = worker_pod("researcher", restricted.namespace, AgentPoolSpec.model_validate(POOLS[pool]), uuid4(), settings)
    made = await restricted.kube.create(PODS, restricted.namespace, pod)
    assert made["spec"]["initContainers"][0]["restartPolicy"] == "Always"
    token = next(volume for volume in made["spec"]["volumes"] if volume["name"] == "perdure-token")
    assert token["projected"]["sources"][0]["serviceAccountToken"] == {
        "audience": "perdure-gateway", "expirationSeconds": 600, "path": "token",
    }  # fmt: skip
    containers = (*made["spec"]["initContainers"], *made["spec"]["containers"])
    mounts = [container["name"] for container in containers for mount in container.get("volumeMounts", ()) if "token" in mount["name"]]
    assert mounts == ["perdure-sidecar"], "nothing else was mounted by admission either"


async def test_that_namespace_does_refuse(restricted: RealBench) -> None:
    with pytest.raises(KubeForbidden, match="violates PodSecurity"):
        await restricted.kube.create(PODS, restricted.namespace, {"metadata": {"name": "p"}, "spec": {"containers": [AGENT]}})
