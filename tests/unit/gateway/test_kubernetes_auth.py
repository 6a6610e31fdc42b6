"""Pods and people on a cluster: who is let in, who is told what, and how often the apiserver is asked."""

from __future__ import annotations

import asyncio
import base64
import json
from uuid import UUID, uuid4

import pytest
from tests.harness.fake_kube import FakeKube

from perdure_operator.domain.errors import Forbidden, PerdureError, Unauthenticated
from perdure_operator.gateway import kubernetes_auth
from perdure_operator.gateway.auth import Person, PodIdentity
from perdure_operator.gateway.kubernetes_auth import POD_UID, RULES, KubernetesAuthenticator, NotRegistered, ReviewFailed
from perdure_operator.kube.client import TokenStatus
from perdure_operator.kube.errors import KubeForbidden, KubeUnavailable
from perdure_operator.kube.resources import ACCESS_REVIEWS, TOKEN_REVIEWS

AUDIENCE = "perdure-gateway"
POD = UUID("01a2009f-af84-7c5c-9269-fc103ce0e172")
KUBE_UID = str(uuid4())
JANE = TokenStatus(True, "jane", "1", ("system:authenticated",))


class Bench:
    """``time`` is of both clocks."""

    def __init__(self) -> None:
        self.time = 1_000_000.0
        self.kube = FakeKube()
        self.registered = {KUBE_UID: (POD, "team-a/researcher")}
        self.gateway = KubernetesAuthenticator(self.kube, self, now=lambda: self.time, ticks=lambda: self.time)

    async def worker_pod(self, kube_uid: str) -> tuple[UUID, str] | None:
        return self.registered.get(kube_uid)

    def pod_token(
        self, *, exp: float = 600, audience: str = AUDIENCE, uid: str | None = KUBE_UID, user: str = "system:serviceaccount:team-a:default"
    ) -> str:  # fmt: skip
        token = jwt(self.time + exp)
        self.kube.tokens[token] = TokenStatus(True, user, "u", (), {POD_UID: (uid,)} if uid else {}, (audience,))
        return token

    def person_token(self, status: TokenStatus = JANE) -> str:
        token = uuid4().hex
        self.kube.tokens[token] = status
        return token

    def asked(self, plural: str) -> int:
        return sum(call.resource.plural == plural for call in self.kube.calls)


def jwt(exp: float) -> str:
    def part(value: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'RS256'})}.{part({'exp': exp, 'jti': uuid4().hex})}.c2ln"


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ------------------------------------------------------------------------------------------------------------------- pods


async def test_a_registered_pod_is_let_in(bench: Bench) -> None:
    assert await bench.gateway.pod(bench.pod_token()) == PodIdentity(POD, "team-a/researcher")


async def test_a_pod_that_nobody_registered_may_come_again(bench: Bench) -> None:
    other = str(uuid4())
    token = bench.pod_token(uid=other)
    with pytest.raises(NotRegistered, match=other) as caught:
        await bench.gateway.pod(token)
    assert (caught.value.status, caught.value.retryable) == (403, True)
    bench.registered[other] = (uuid4(), "team-a/researcher")
    assert (await bench.gateway.pod(token)).pool == "team-a/researcher"


async def test_a_pod_that_was_given_up_is_out_though_its_token_is_kept(bench: Bench) -> None:
    token = bench.pod_token()
    await bench.gateway.pod(token)
    bench.registered.clear()
    with pytest.raises(NotRegistered):
        await bench.gateway.pod(token)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"audience": "kubernetes"}, Unauthenticated, "not for the audience perdure-gateway"),
        ({"exp": -1}, Unauthenticated, "expired"),
        ({"uid": None}, Forbidden, "names no pod"),
        ({"user": "system:serviceaccount:team-b:default"}, Forbidden, "not in the namespace of the pool team-a/researcher"),
        ({"user": "jane"}, Forbidden, "jane"),
    ],
)
async def test_a_wrong_token_is_told_what_is_wrong(bench: Bench, change: dict[str, str], error: type[PerdureError], told: str) -> None:
    with pytest.raises(error, match=told) as caught:
        await bench.gateway.pod(bench.pod_token(**change))  # type: ignore[arg-type]
    assert not caught.value.retryable


@pytest.mark.parametrize("token", ["garbage", "a.b.c", "ü" * 20, "x" * 100_000, "a.!!!!.c", jwt(2e9)])
async def test_garbage_is_unauthenticated(bench: Bench, token: str) -> None:
    for call in (bench.gateway.pod(token), bench.gateway.person(token, verb="get", namespace="a", run=None)):
        with pytest.raises(Unauthenticated):
            await call


async def test_an_authenticator_that_knows_no_audiences_lets_nobody_in(bench: Bench) -> None:
    class Careless(FakeKube):
        async def review_token(self, token: str, audiences: object) -> TokenStatus:
            return TokenStatus(True, "system:serviceaccount:team-a:default", extra={POD_UID: (KUBE_UID,)})

    with pytest.raises(Unauthenticated, match="audience"):
        await KubernetesAuthenticator(Careless(), bench).pod("token")


# ----------------------------------------------------------------------------------------------------------------- people


@pytest.mark.parametrize("verb", RULES)
async def test_a_person_may_what_was_granted_and_nothing_else(bench: Bench, verb: str) -> None:
    kube_verb, *path = RULES[verb]
    what = "/".join(filter(None, path))
    token = bench.person_token()
    with pytest.raises(Forbidden, match=f"jane may not {kube_verb} {what}.perdure.dev in namespace team-a"):
        await bench.gateway.person(token, verb=verb, namespace="team-a", run="r")
    bench.kube.grants.add(("jane", kube_verb, what, "team-a"))
    bench.time += 11
    assert await bench.gateway.person(token, verb=verb, namespace="team-a", run="r") == Person("jane")
    for other in RULES:
        if RULES[other] != RULES[verb]:
            with pytest.raises(Forbidden):
                await bench.gateway.person(token, verb=other, namespace="team-a", run="r")
    with pytest.raises(Forbidden):
        await bench.gateway.person(token, verb=verb, namespace="team-b", run="r")


async def test_the_dash_is_all_namespaces(bench: Bench) -> None:
    token = bench.person_token()
    bench.kube.grants.add(("jane", "list", "agentruns", "team-a"))
    with pytest.raises(Forbidden, match="all namespaces"):
        await bench.gateway.person(token, verb="list", namespace="-", run=None)
    bench.kube.grants.add(("jane", "list", "agentruns", ""))
    bench.time += 11
    await bench.gateway.person(token, verb="list", namespace="-", run=None)


async def test_pools_are_resources(bench: Bench) -> None:
    token = bench.person_token(TokenStatus(True, "root", groups=("system:masters",)))
    with pytest.raises(Forbidden) as caught:
        await bench.gateway.person(token, verb="pools", namespace="team-a", run=None)
    assert "kubectl apply" in caught.value.advice


async def test_the_token_of_a_pod_does_not_open_the_public_api(bench: Bench) -> None:
    with pytest.raises(Unauthenticated, match="a pod's token does not open the public API"):
        await bench.gateway.person(bench.pod_token(), verb="get", namespace="team-a", run=None)


async def test_a_person_is_no_pod(bench: Bench) -> None:
    with pytest.raises(Unauthenticated, match="audience"):
        await bench.gateway.pod(bench.person_token())


async def test_one_run_may_be_granted(bench: Bench) -> None:
    class ByName(FakeKube):
        async def review_access(self, user, groups, extra, **attributes):  # type: ignore[no-untyped-def]
            answer = await super().review_access(user, groups, extra, **attributes)
            return answer if attributes["name"] == "mine" else type(answer)(False)

    bench.kube = ByName(tokens={"t": JANE}, grants={("jane", "create", "agentruns/signal", "team-a")})
    gateway = KubernetesAuthenticator(bench.kube, bench)
    await gateway.person("t", verb="signal", namespace="team-a", run="mine")
    with pytest.raises(Forbidden):
        await gateway.person("t", verb="signal", namespace="team-a", run="yours")


# ------------------------------------------------------------------------------------------------------- how often it asks


async def test_answers_are_kept_a_minute_and_never_longer_than_the_token_lives(bench: Bench) -> None:
    long, short = bench.pod_token(), bench.pod_token(exp=30)
    for _ in range(3):
        await bench.gateway.pod(long)
        await bench.gateway.pod(short)
    assert bench.asked("tokenreviews") == 2
    bench.time += 31
    await bench.gateway.pod(long)
    assert bench.asked("tokenreviews") == 2
    with pytest.raises(Unauthenticated, match="expired"):
        await bench.gateway.pod(short)
    bench.time += 30
    await bench.gateway.pod(long)
    assert bench.asked("tokenreviews") == 3


async def test_refusals_are_kept_five_seconds(bench: Bench) -> None:
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await bench.gateway.pod("garbage")
    assert bench.asked("tokenreviews") == 1
    bench.time += 6
    with pytest.raises(Unauthenticated):
        await bench.gateway.pod("garbage")
    assert bench.asked("tokenreviews") == 2


async def test_access_is_kept_ten_seconds_for_all_runs(bench: Bench) -> None:
    token = bench.person_token()
    bench.kube.grants.add(("jane", "get", "agentruns", "team-a"))
    for run in ("a", "b", "c"):
        await bench.gateway.person(token, verb="get", namespace="team-a", run=run)
    assert bench.asked("subjectaccessreviews") == 1
    bench.kube.grants.clear()
    bench.time += 11
    with pytest.raises(Forbidden):
        await bench.gateway.person(token, verb="get", namespace="team-a", run="a")


async def test_the_same_token_for_another_purpose_is_another_question(bench: Bench) -> None:
    token = bench.pod_token()
    await bench.gateway.pod(token)
    with pytest.raises(Unauthenticated):
        await bench.gateway.person(token, verb="get", namespace="team-a", run=None)


async def test_one_question_at_a_time_for_one_token(bench: Bench) -> None:
    class Slow(FakeKube):
        asked = 0

        async def review_token(self, token: str, audiences: object) -> TokenStatus:
            self.asked += 1
            await released.wait()
            return await super().review_token(token, audiences)  # type: ignore[arg-type]

    released = asyncio.Event()
    slow = Slow()
    gateway = KubernetesAuthenticator(slow, bench)
    token = bench.pod_token(exp=1e10)
    slow.tokens = bench.kube.tokens
    callers = [asyncio.create_task(gateway.pod(token)) for _ in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    released.set()
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == [PodIdentity(POD, "team-a/researcher")] * 4
    assert slow.asked == 1


async def test_memory_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_auth, "MAX_KEPT", 3)
    good = bench.pod_token()
    await bench.gateway.pod(good)
    for number in range(2):
        with pytest.raises(Unauthenticated):
            await bench.gateway.pod(f"garbage-{number}")
    await bench.gateway.pod(good)
    with pytest.raises(Unauthenticated):
        await bench.gateway.pod("garbage-2")
    assert bench.asked("tokenreviews") == 4
    await bench.gateway.pod(good)
    assert bench.asked("tokenreviews") == 4, "the least used answer goes first"
    with pytest.raises(Unauthenticated):
        await bench.gateway.pod("garbage-0")
    assert bench.asked("tokenreviews") == 5


@pytest.mark.parametrize("error", [KubeUnavailable("no route"), KubeForbidden("may not create tokenreviews")])
async def test_an_apiserver_that_does_not_answer_refuses_nobody(bench: Bench, error: PerdureError) -> None:
    token = bench.person_token()
    for resource in (TOKEN_REVIEWS, ACCESS_REVIEWS):
        bench.kube.fail(error, "create", resource)
        with pytest.raises(ReviewFailed) as caught:
            await bench.gateway.person(token, verb="get", namespace="team-a", run=None)
        assert (caught.value.status, caught.value.retryable) == (503, True)
    bench.kube.grants.add(("jane", "get", "agentruns", "team-a"))
    await bench.gateway.person(token, verb="get", namespace="team-a", run=None)
