"""Who is calling: the port that the gateway asks, and the adapter for a machine without Kubernetes.

On a cluster a pod shows a projected service-account token and a person a Kubernetes token (TokenReview, SubjectAccessReview). Locally
both show a token that ``perdure dev`` signed with the secret of its state folder. A token says who, never what run: the fence is the
pod's row and the epoch.

A local token is ``perdure1.<claims>.<signature>``: base64url of JSON, and of its HMAC-SHA256. The claims are read only after the
signature was compared, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import O_CREAT, O_EXCL, O_WRONLY, fdopen
from os import open as os_open
from pathlib import Path
from typing import Protocol
from uuid import UUID

import msgspec

from perdure_operator.domain.errors import Forbidden, Unauthenticated

__all__ = ["ALL", "Authenticator", "Forbidden", "LocalTokens", "Person", "PodIdentity", "Unauthenticated", "load_secret", "make_secret"]

ALL = "*"
MIN_SECRET_BYTES = 32
MAX_TOKEN_CHARS = 4096
DAY = 86_400.0
_PREFIX = "perdure1"


@dataclass(frozen=True)
class PodIdentity:
    """A worker pod. ``pool`` is ``namespace/name``."""

    pod_id: UUID
    pool: str


@dataclass(frozen=True)
class Person:
    """Somebody who uses the public API. ``name`` goes into the log of what they do."""

    name: str


class Authenticator(Protocol):
    """Raises Unauthenticated (401) for a token that is not valid now, Forbidden (403) for one that does not allow this."""

    async def pod(self, token: str) -> PodIdentity: ...

    async def person(self, token: str, *, verb: str, namespace: str, run: str | None) -> Person:
        """``namespace`` ``-`` means all of them."""
        ...


class _Pod(msgspec.Struct, tag="pod", tag_field="k", forbid_unknown_fields=True, frozen=True):
    sub: UUID
    pool: str
    exp: float


class _Person(msgspec.Struct, tag="person", tag_field="k", forbid_unknown_fields=True, frozen=True):
    sub: str
    verbs: frozenset[str]
    ns: frozenset[str]
    exp: float


_claims: msgspec.json.Decoder[_Pod | _Person] = msgspec.json.Decoder(_Pod | _Person)


class LocalTokens:
    """Issues and checks tokens under one secret. ``now`` is seconds since 1970."""

    def __init__(self, secret: bytes, *, now: Callable[[], float] = time.time) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the token secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
        self._secret = secret
        self._now = now

    def issue_pod(self, pod_id: UUID, pool: str, *, ttl_seconds: float = 30 * DAY) -> str:
        return self._sign(_Pod(sub=pod_id, pool=pool, exp=self._now() + ttl_seconds))

    def issue_person(self, name: str, *, verbs: Iterable[str], namespaces: Iterable[str], ttl_seconds: float = 30 * DAY) -> str:
        """``*`` among the verbs or namespaces allows all of them."""
        return self._sign(_Person(sub=name, verbs=frozenset(verbs), ns=frozenset(namespaces), exp=self._now() + ttl_seconds))

    async def pod(self, token: str) -> PodIdentity:
        claims = self._verify(token)
        if not isinstance(claims, _Pod):
            raise Forbidden("this is a person's token; only a worker pod may connect here", action="Use the token of the pod.")
        return PodIdentity(claims.sub, claims.pool)

    async def person(self, token: str, *, verb: str, namespace: str, run: str | None) -> Person:
        claims = self._verify(token)
        if not isinstance(claims, _Person):
            raise Forbidden("this is a pod's token; it does not open the public API", action="Use a person's token.")
        if not {verb, ALL} & claims.verbs:
            raise Forbidden(f"{claims.sub} may not {verb}")
        if not {namespace, ALL} & claims.ns:
            place = "all namespaces" if namespace == "-" else f"the namespace {namespace}"
            raise Forbidden(f"{claims.sub} may not {verb} in {place}")
        return Person(claims.sub)

    def _sign(self, claims: _Pod | _Person) -> str:
        body = _encode(msgspec.json.encode(claims))
        return f"{_PREFIX}.{body}.{self._signature(body)}"

    def _verify(self, token: str) -> _Pod | _Person:
        prefix, _, rest = token.partition(".")
        body, _, signature = rest.partition(".")
        if len(token) > MAX_TOKEN_CHARS or prefix != _PREFIX or not token.isascii():
            raise Unauthenticated("this is not a token of this Perdure")
        if not hmac.compare_digest(signature, self._signature(body)):
            raise Unauthenticated("the token was not signed with this Perdure's secret")
        claims = _claims.decode(urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        if self._now() >= claims.exp:
            raise Unauthenticated("the token has expired")
        return claims

    def _signature(self, body: str) -> str:
        return _encode(hmac.new(self._secret, f"{_PREFIX}.{body}".encode(), hashlib.sha256).digest())


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def load_secret(path: Path) -> bytes:
    """The secret in ``path``. Raises OSError, or ValueError when others may read it."""
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} can be read by others: chmod 600 {path}")
    return path.read_bytes()


def make_secret(path: Path) -> bytes:
    """The secret in ``path``, made with mode 0600 if it is not there yet."""
    try:
        with fdopen(os_open(path, O_CREAT | O_EXCL | O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_hex(32).encode())
    except FileExistsError:
        pass
    return load_secret(path)
