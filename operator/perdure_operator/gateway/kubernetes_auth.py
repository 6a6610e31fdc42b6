"""Who is calling, on a cluster: the apiserver says whose token it is (TokenReview), and what a person may do (SubjectAccessReview).

A pod shows the token of its sidecar, which is for our audience only and names the pod's uid; that the uid is one that the operator has
registered is asked of the store each time. The apiserver accepts the token of a deleted pod for about another minute: identity is no fence.

Answers are kept for a short while, under the hash of the token. An apiserver out of reach is a reason to come back, never a refusal.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from base64 import urlsafe_b64decode
from binascii import Error as Base64Error
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar
from uuid import UUID

import msgspec

from perdure_operator.domain.errors import Forbidden, PerdureError, Unauthenticated
from perdure_operator.gateway.auth import Person, PodIdentity
from perdure_operator.kube.client import AccessStatus, KubeApi, TokenStatus
from perdure_operator.kube.errors import KubeError
from perdure_operator.kube.names import TOKEN_AUDIENCE
from perdure_operator.kube.resources import AGENTRUNS, TRIGGERS
from perdure_operator.observability.metrics import REVIEWS

KEEP_SECONDS = 60.0
KEEP_REFUSED_SECONDS = 5.0
KEEP_ACCESS_SECONDS = 10.0
MAX_KEPT = 10_000
MAX_TOKEN_CHARS = 16_384

POD_UID = "authentication.kubernetes.io/pod-uid"
_ACCOUNT = "system:serviceaccount:"

_RUNS, _TRIGGERS = AGENTRUNS.plural, TRIGGERS.plural
RULES: dict[str, tuple[str, str, str]] = {
    "create": ("create", _RUNS, ""),
    "get": ("get", _RUNS, ""),
    "list": ("list", _RUNS, ""),
    "signal": ("create", _RUNS, "signal"),
    "cancel": ("create", _RUNS, "cancel"),
    "pause": ("create", _RUNS, "pause"),
    "resume": ("create", _RUNS, "pause"),
    "answer": ("create", _RUNS, "answer"),
    "emit": ("create", _TRIGGERS, "emit"),
    "deliveries": ("get", _TRIGGERS, ""),
}
"""The gateway's verbs → the verb, resource and subresource that RBAC must grant."""


class NotRegistered(Forbidden):
    """The operator has not registered this pod, or has given it up."""

    code, retryable = "pod-not-registered", True
    action = "Try again in a second; a pod that the operator did not make is never let in."


class ReviewFailed(PerdureError):
    """The apiserver could not say who this is or what they may do."""

    code, status, retryable = "review-failed", 503, True
    action = (
        "Try again later; if it lasts, look at the apiserver, and at the gateway's right to create tokenreviews and subjectaccessreviews."
    )


class Registry(Protocol):
    """The store, as far as pods are concerned."""

    async def worker_pod(self, kube_uid: str) -> tuple[UUID, str] | None:
        """Our id and the pool (``namespace/name``) of the pod with this uid, None if there is no such pod that may connect."""
        ...


class _Claims(msgspec.Struct):
    exp: float | None = None


class KubernetesAuthenticator:
    """The :class:`Authenticator` of a cluster. ``now``: seconds since 1970, for what a token says of itself; ``ticks``: monotonic."""

    def __init__(
        self, kube: KubeApi, registry: Registry, *, audience: str = TOKEN_AUDIENCE,
        now: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._kube, self._registry, self._audience, self._now = kube, registry, audience, now
        self._identities: _Kept[TokenStatus] = _Kept("token", ticks)
        self._accesses: _Kept[AccessStatus] = _Kept("access", ticks)

    async def pod(self, token: str) -> PodIdentity:
        """Raises Unauthenticated, Forbidden, NotRegistered or ReviewFailed."""
        status = await self._identity(token, self._audience)
        if self._audience not in status.audiences:
            # Of an authenticator that does not know audiences: the token may be anybody's.
            raise Unauthenticated(f"the token is not for the audience {self._audience}")
        uid = next(iter(status.extra.get(POD_UID, ())), None)
        if uid is None:
            raise Forbidden(
                f"the token of {status.username} names no pod; only a worker pod may connect here", action="Use the pod's token."
            )
        registered = await self._registry.worker_pod(uid)
        if registered is None:
            raise NotRegistered(f"the pod with uid {uid} is not one that the operator has registered")
        pod_id, pool = registered
        if not status.username.startswith(f"{_ACCOUNT}{pool.partition('/')[0]}:"):
            raise Forbidden(f"{status.username} is not in the namespace of the pool {pool}", action="Use the pod's own token.")
        return PodIdentity(pod_id, pool)

    async def person(self, token: str, *, verb: str, namespace: str, run: str | None) -> Person:
        """Raises Unauthenticated, Forbidden or ReviewFailed."""
        status = await self._identity(token, None)
        rule = RULES.get(verb)
        if rule is None:
            detail = f"{verb} is not a request for a gateway on Kubernetes"
            raise Forbidden(detail, action="Pools are AgentPool resources here: kubectl apply them.")
        where = "" if namespace == "-" else namespace
        # First without the run: who may do it with all runs, as most may, is asked about once for all of them.
        if not await self._may(status, rule, where, "") and not (run and await self._may(status, rule, where, run)):
            what = "/".join(filter(None, rule[1:]))
            place = f"in namespace {where}" if where else "in all namespaces"
            raise Forbidden(
                f"{status.username} may not {rule[0]} {what}.{AGENTRUNS.group} {place}",
                action=f"Grant the verb {rule[0]} on {what} of the API group {AGENTRUNS.group} by a Role or ClusterRole.",
            )
        return Person(status.username)

    async def _identity(self, token: str, audience: str | None) -> TokenStatus:
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            raise Unauthenticated("this is not a token of this cluster")
        left = self._seconds_left(token)
        if left <= 0:
            raise Unauthenticated("the token has expired")

        async def ask() -> tuple[TokenStatus, float]:
            status = await self._kube.review_token(token, [audience] if audience else [])
            return status, min(KEEP_SECONDS, left) if status.authenticated else KEEP_REFUSED_SECONDS

        status = await self._identities.get((hashlib.sha256(token.encode()).digest(), audience), ask, lambda status: status.authenticated)
        if not status.authenticated:
            raise Unauthenticated(_why(status.error, audience))
        return status

    async def _may(self, who: TokenStatus, rule: tuple[str, str, str], namespace: str, run: str) -> bool:
        verb, resource, subresource = rule

        async def ask() -> tuple[AccessStatus, float]:
            access = await self._kube.review_access(
                who.username, who.groups, who.extra,
                verb=verb, group=AGENTRUNS.group, resource=resource, subresource=subresource, namespace=namespace, name=run,
            )  # fmt: skip
            return access, KEEP_ACCESS_SECONDS

        key = who.username, who.groups, tuple(sorted(who.extra.items())), rule, namespace, run
        return (await self._accesses.get(key, ask, lambda access: access.allowed)).allowed

    def _seconds_left(self, token: str) -> float:
        """What the token says of itself; the apiserver checks the signature. Tokens of other shapes do not say."""
        try:
            body = token.split(".")[1]
            claims = msgspec.json.decode(urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=_Claims)
        except (IndexError, Base64Error, ValueError, msgspec.MsgspecError):
            return KEEP_SECONDS
        return KEEP_SECONDS if claims.exp is None else claims.exp - self._now()


def _why(error: str, audience: str | None) -> str:
    if "audience" in error:
        wanted = f"the audience {audience}" if audience else "the API of this cluster; a pod's token does not open the public API"
        return f"the token is not for {wanted}"
    if "expired" in error:
        return "the token has expired"
    return "this cluster does not know the token"


T = TypeVar("T")


class _Kept(Generic[T]):
    """Answers of the apiserver for a while, the least used one goes first. The same question at the same time is asked once."""

    def __init__(self, kind: str, ticks: Callable[[], float]) -> None:
        self._kind, self._ticks = kind, ticks
        self._kept: OrderedDict[Hashable, tuple[float, T]] = OrderedDict()
        self._asked: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[tuple[T, float]]], yes: Callable[[T], bool]) -> T:
        """``ask`` answers, and for how many seconds that holds. Raises ReviewFailed, which is not kept."""
        kept = self._kept.get(key)
        if kept is not None and self._ticks() < kept[0]:
            self._kept.move_to_end(key)
            REVIEWS.labels(self._kind, "kept").inc()
            return kept[1]
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._ask(key, ask, yes))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left who waits for it
        # One of those who wait may go away; the others still want the answer.
        return await asyncio.shield(task)

    async def _ask(self, key: Hashable, ask: Callable[[], Awaitable[tuple[T, float]]], yes: Callable[[T], bool]) -> T:
        try:
            answer, seconds = await ask()
        except KubeError as error:
            REVIEWS.labels(self._kind, "failed").inc()
            raise ReviewFailed(f"the {self._kind} review failed: {error}") from error
        finally:
            del self._asked[key]
        REVIEWS.labels(self._kind, "yes" if yes(answer) else "no").inc()
        self._kept[key] = self._ticks() + seconds, answer
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return answer
