"""TokenReview and SubjectAccessReview: who somebody is, and what they may do."""

from __future__ import annotations

from tests.conformance.conftest import Bench

from perdure_operator.kube.client import PODS
from perdure_operator.kube.names import TOKEN_AUDIENCE

POD_UID = "authentication.kubernetes.io/pod-uid"


async def test_the_token_of_a_pod_names_the_pod(bench: Bench) -> None:
    pod = await bench.kube.create(PODS, bench.namespace, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "a"}]}})
    status = await bench.kube.review_token(await bench.token(audience=TOKEN_AUDIENCE, pod=pod), [TOKEN_AUDIENCE])
    assert status.authenticated
    assert status.audiences == (TOKEN_AUDIENCE,)
    assert status.username == f"system:serviceaccount:{bench.namespace}:default"
    assert status.extra[POD_UID] == (pod["metadata"]["uid"],)


async def test_the_token_of_an_account_names_no_pod(bench: Bench) -> None:
    status = await bench.kube.review_token(await bench.token(audience=TOKEN_AUDIENCE), [TOKEN_AUDIENCE])
    assert status.authenticated
    assert POD_UID not in status.extra


async def test_a_token_for_somebody_else_is_none(bench: Bench) -> None:
    token = await bench.token(audience="somebody-else")
    for audiences in ([TOKEN_AUDIENCE], []):
        status = await bench.kube.review_token(token, audiences)
        assert not status.authenticated
        assert "audience" in status.error
    assert not (await bench.kube.review_token("garbage", [TOKEN_AUDIENCE])).authenticated


async def test_access_is_what_was_granted_and_no_more(bench: Bench) -> None:
    await bench.grant("jane", "create", "agentruns/signal")

    async def may(
        user: str = "jane", verb: str = "create", resource: str = "agentruns", subresource: str = "signal", namespace: str = ""
    ) -> bool:
        status = await bench.kube.review_access(
            user, ["system:authenticated"], {},
            verb=verb, group="perdure.dev", resource=resource, subresource=subresource, namespace=namespace or bench.namespace,
        )  # fmt: skip
        return status.allowed

    assert await may()
    assert not await may(user="joe")
    assert not await may(verb="get")
    assert not await may(subresource="")
    assert not await may(subresource="cancel")
    assert not await may(namespace="default")


async def test_an_administrator_may_everything(bench: Bench) -> None:
    status = await bench.kube.review_access(
        "root", ["system:masters"], {"scopes": ["a"]}, verb="list", group="perdure.dev", resource="agentruns"
    )  # fmt: skip
    assert status.allowed
