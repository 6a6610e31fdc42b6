"""Who is let in, as the real apiserver says it: worker pods by their own token and their lease, people by their verbs.

What the definitions refuse is in tests/contract; here is only what takes a kubelet, an issuer of tokens, or a run at work.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import aiohttp
import pytest
from tests.cluster.errors import ClusterError
from tests.e2e.installation import NAMESPACE, PODS, RELEASE, Installation, agent_run, pool
from tests.harness.api import Refused
from tests.harness.pods import FakePod

Json = dict[str, Any]

AUDIENCE = "--audience=perdure-gateway"
FORGED, HONEST = "step:forged#0", "step:honest#0"


@pytest.fixture(scope="module", autouse=True)
def pools(perdure: Installation, place: str) -> None:
    keeping = pool("fork", ["python", "agents.py", "waiter"], idle=1, reuse=True)
    keeping["spec"]["capacity"]["maxIdle"] = 5  # the pod that has let a run go is kept beside the next one
    perdure.apply(
        place,
        *(pool(name, ["python", "agents.py", name]) for name in ("waiter", "worker")),
        keeping,
    )


def bound(perdure: Installation, place: str, pod: str) -> str:
    """A token as the kubelet gives it to the sidecar of this pod."""
    uid = perdure.cluster.kubectl("get", "pod", pod, "-n", place, "-o", "jsonpath={.metadata.uid}").strip()
    return perdure.token(place, "default", AUDIENCE, "--bound-object-kind=Pod", f"--bound-object-name={pod}", f"--bound-object-uid={uid}")


# --------------------------------------------------------------------------------------------------------- the door of pods


def test_a_token_for_another_audience(perdure: Installation, place: str) -> None:
    status, answer = perdure.request("GET", "/v1/pod", token=perdure.token(place, "default"))
    assert (status, answer["detail"]) == (401, "the token is not for the audience perdure-gateway")


def test_a_token_that_names_no_pod(perdure: Installation, place: str) -> None:
    status, answer = perdure.request("GET", "/v1/pod", token=perdure.token(place, "default", AUDIENCE))
    assert (status, answer["detail"]) == (
        403, f"the token of system:serviceaccount:{place}:default names no pod; only a worker pod may connect here",
    )  # fmt: skip


def test_a_pod_that_the_operator_did_not_make(perdure: Installation, place: str) -> None:
    perdure.cluster.kubectl(
        "run", "stranger", "-n", place, "--image=perdure-e2e-agents", "--image-pull-policy=Never", "--command", "--", "sleep", "300"
    )
    status, answer = perdure.request("GET", "/v1/pod", token=bound(perdure, place, "stranger"))
    uid = perdure.cluster.kubectl("get", "pod", "stranger", "-n", place, "-o", "jsonpath={.metadata.uid}")
    assert (status, answer["detail"]) == (403, f"the pod with uid {uid} is not one that the operator has registered")
    perdure.delete("pod", "stranger", place, "--grace-period=0", "--force")


def test_a_worker_is_no_person(perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("private", "worker", {"seconds": 10}))
    pod, _, _ = at_work(perdure, place, "private")
    token = bound(perdure, place, pod)
    status, answer = perdure.request("GET", f"/v1/namespaces/{place}/runs", token=token)
    assert (status, "a pod's token does not open the public API" in answer["detail"]) == (401, True), answer
    # The token itself is a good one: at its own door it gets in, and only the handshake is missing.
    assert perdure.request("GET", "/v1/pod", token=token)[0] not in (401, 403)


# -------------------------------------------------------------------------------------------------------------- the fence


@dataclass(frozen=True)
class Door:
    """Where a pod connects: what :class:`FakePod` needs of a gateway."""

    url: str
    http: aiohttp.ClientSession


@pytest.fixture
async def door(perdure: Installation) -> AsyncIterator[Door]:
    address = perdure.cluster.kubectl("get", "service", f"{RELEASE}-gateway", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}").strip()
    trusting = ssl.create_default_context(cafile=str(perdure.authority()))
    trusting.check_hostname = False  # asked by its address

    def inside(address: tuple[Any, ...]) -> socket.socket:
        made = perdure.cluster.call(lambda: socket.socket(*address[:3]))
        made.setblocking(False)
        return made

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting, socket_factory=inside)) as http:
        yield Door(f"https://{address}", http)


def at_work(perdure: Installation, place: str, name: str) -> tuple[str, str, int]:
    """Pod, run id and epoch of a run that has journaled its first step."""
    where = f"from perdure.runs where namespace = '{place}' and name = '{name}'"
    perdure.until(f"{name} is at work", lambda: perdure.sql(f"select steps {where} and state = 'Running'") == "1")
    run, epoch = perdure.sql(f"select run_id || ' ' || epoch {where}").split()
    pod = perdure.until(f"{name} says its pod", lambda: (perdure.run(name, place).get("status") or {}).get("podName"))
    return str(pod), run, int(epoch)


def pod_id(perdure: Installation, place: str, pod: str) -> UUID:
    return UUID(perdure.cluster.kubectl("get", PODS, pod, "-n", place, "-o", r"jsonpath={.metadata.labels.perdure\.dev/pod-id}").strip())


def journal(perdure: Installation, run: str) -> list[str]:
    return sorted(perdure.sql(f"select key from perdure.journal where run_id = '{run}'").split())


async def refusal(
    door: Door, perdure: Installation, place: str, pod: str, run: str, epoch: int, *, holds: tuple[str, int] | None = None
) -> Refused:
    """What the gateway says to a worker that connects as ``pod`` and writes into ``run`` under ``epoch``, after it has done the same with
    what it ``holds``."""
    token, own = await asyncio.to_thread(bound, perdure, place, pod), await asyncio.to_thread(pod_id, perdure, place, pod)
    worker = FakePod(token, own)
    # Sidecars number their connections by the clock: for some seconds this one is the pod, whatever the real one tries.
    await worker.connect(door, worker.hello(connection=int(time.time() * 1000) + 3000, run=run, epoch=epoch))
    try:
        if holds is not None:
            await worker.step(HONEST, run=holds[0], epoch=holds[1])
        with pytest.raises(Refused) as caught:
            await worker.step(FORGED, run=run, epoch=epoch)
    finally:
        await worker.cut()
    return caught.value


async def test_a_worker_cannot_write_into_the_run_of_another(door: Door, perdure: Installation, place: str) -> None:
    perdure.apply(place, agent_run("victim", "worker", {"seconds": 12}), agent_run("intruder", "worker", {"seconds": 12}))
    _, run, epoch = await asyncio.to_thread(at_work, perdure, place, "victim")
    pod, own, own_epoch = await asyncio.to_thread(at_work, perdure, place, "intruder")
    refused = await refusal(door, perdure, place, pod, run, epoch, holds=(own, own_epoch))
    assert refused.code == "lease-lost"
    assert HONEST in journal(perdure, own)
    done = await asyncio.to_thread(perdure.until_phase, "victim", place, "Succeeded", 120)
    assert done["status"]["result"]["attempt"] == 1
    assert FORGED not in journal(perdure, run)
    assert len(journal(perdure, run)) == 2


async def test_a_worker_that_has_lost_its_lease_writes_nothing(door: Door, perdure: Installation, place: str) -> None:
    """Its pod is alive and known, the run is its own of a moment ago, and only the epoch is over."""
    perdure.apply(place, agent_run("moved-on", "fork", {}))
    await asyncio.to_thread(perdure.until_phase, "moved-on", place, "Suspended")
    where = f"from perdure.runs where namespace = '{place}' and name = 'moved-on'"
    run, epoch = perdure.sql(f"select run_id || ' ' || epoch {where}").split()
    held = perdure.sql(f"select data ->> 'pod' from perdure.events where run_id = '{run}' and kind = 'run.leased'")
    [pod] = [
        found["metadata"]["name"]
        for found in perdure.all(PODS, place, labels=f"perdure.dev/pod-id={held}")
        if found["status"]["phase"] == "Running"
    ]
    before = journal(perdure, run)
    refused = await refusal(door, perdure, place, pod, run, int(epoch))
    assert refused.code == "lease-lost"
    assert journal(perdure, run) == before
    await asyncio.to_thread(perdure.signal, "moved-on", place, "go")
    done = await asyncio.to_thread(perdure.until_phase, "moved-on", place, "Succeeded")
    assert FORGED not in journal(perdure, run)
    assert done["status"]["result"]["second"] == "noted after"


# ------------------------------------------------------------------------------------------------------------------ people


@pytest.fixture(scope="module")
def waiting(perdure: Installation, place: str) -> str:
    perdure.apply(place, agent_run("wanted", "waiter", {}))
    perdure.until_phase("wanted", place, "Suspended")
    return "wanted"


@pytest.mark.parametrize(
    ("request_path", "resource", "body"),
    [
        ("runs/wanted/signals/other", "agentruns/signal", {}),
        ("runs/wanted/pause", "agentruns/pause", {}),
        ("runs/wanted/resume", "agentruns/pause", {}),
        ("runs/wanted/cancel", "agentruns/cancel", {}),
        ("runs", "agentruns", {"name": "unwanted", "spec": {"agent": {"poolRef": {"name": "waiter"}}}}),
    ],
    ids=["signal", "pause", "resume", "cancel", "create"],
)
def test_a_person_is_told_which_verb_is_missing(
    perdure: Installation, place: str, waiting: str, request_path: str, resource: str, body: Json, request: pytest.FixtureRequest
) -> None:
    """All verbs but one are granted; what the message asks for is granted then, and is enough."""
    name = request.node.callspec.id
    perdure.cluster.kubectl("create", "serviceaccount", name, "-n", place)
    others = {"agentruns/signal", "agentruns/pause", "agentruns/cancel", "agentruns/answer", "agentruns"} - {resource}
    reading = rule(["agentruns", "agentpools", "triggers"], ["get", "list", "watch"])
    grant(perdure, place, name, f"{name}-others", reading, rule(sorted(others), ["create"]))
    path, token = f"/v1/namespaces/{place}/{request_path}", perdure.token(place, name)
    before = perdure.sql(f"select last_seq from perdure.runs where namespace = '{place}' and name = 'wanted'")

    def ask() -> tuple[int, Json]:
        return perdure.request("POST", path, json.dumps(body), token=token, **{"Idempotency-Key": f"by-{name}"})

    status, answer = ask()
    assert status == 403
    assert answer["detail"] == f"system:serviceaccount:{place}:{name} may not create {resource}.perdure.dev in namespace {place}"
    assert f"Grant the verb create on {resource} of the API group perdure.dev" in answer["action"]
    assert perdure.sql(f"select last_seq from perdure.runs where namespace = '{place}' and name = 'wanted'") == before
    assert perdure.sql(f"select count(*) from perdure.runs where namespace = '{place}' and name = 'unwanted'") == "0"

    grant(perdure, place, name, f"{name}-own", rule([resource], ["create"]))
    allowed = perdure.until("the gateway has asked anew", lambda: None if (found := ask())[0] == 403 else found, 30)
    assert allowed[0] < 300, allowed


def rule(resources: list[str], verbs: list[str]) -> Json:
    return {"apiGroups": ["perdure.dev"], "resources": resources, "verbs": verbs}


def grant(perdure: Installation, place: str, account: str, name: str, *rules: Json) -> None:
    rbac = "rbac.authorization.k8s.io"
    perdure.apply(
        place,
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": name}, "rules": list(rules)},
        {
            "apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": place}],
        },
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- kubectl apply


def test_kubectl_apply_cannot_change_what_a_run_at_work_is(perdure: Installation, place: str) -> None:
    run = agent_run("fixed", "worker", {"seconds": 5})
    perdure.apply(place, run)
    perdure.until_phase("fixed", place, "Running")
    with pytest.raises(ClusterError, match=r"spec\.input cannot change after the run was created; create another run"):
        perdure.apply(place, agent_run("fixed", "worker", {"seconds": 0}))
    perdure.apply(place, agent_run("fixed", "worker", {"seconds": 5}, priority=7))
    assert perdure.until_phase("fixed", place, "Succeeded")["status"]["result"]["second"] == "worked 5 s"


def test_kubectl_apply_says_what_is_too_large(perdure: Installation, place: str) -> None:
    with pytest.raises(ClusterError, match=r"spec\.input is larger than 16384 bytes of JSON: pass a reference to larger data"):
        perdure.apply(place, agent_run("large", "worker", {"text": "x" * 17_000}))


def test_kubectl_apply_says_which_field_of_a_pod_is_refused(perdure: Installation, place: str) -> None:
    wrong = pool("privileged", ["sh"], securityContext={"privileged": True})
    wrong["spec"]["template"]["spec"]["hostNetwork"] = True
    with pytest.raises(ClusterError) as caught:
        perdure.apply(place, wrong)
    assert 'unknown field "spec.template.spec.hostNetwork"' in str(caught.value)
    assert "privileged" in str(caught.value)
