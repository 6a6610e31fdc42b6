"""What the operator and the gateway ask of a cluster. Objects are raw dicts, as the apiserver writes them.

Two adapters: :mod:`client` for a real apiserver, and the fake of the tests; ``tests/conformance`` holds both to the same behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from perdure_operator.kube.resources import Resource

Object = dict[str, Any]
Propagation = Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True)
class TokenStatus:
    """What a TokenReview found. ``audiences``: those of the asked ones for which the token is valid; ``error``: why it is not."""

    authenticated: bool
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    audiences: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class AccessStatus:
    """What a SubjectAccessReview found. ``reason`` may be empty."""

    allowed: bool
    reason: str = ""


class KubeApi(Protocol):
    """Raises the errors of :mod:`errors`. A write that ended in KubeUnavailable may have been done."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """None: the apiserver says that there is no such object."""
        ...

    async def list(self, resource: Resource, namespace: str | None, *, labels: str = "") -> tuple[list[Object], str]:
        """All objects of one state of the cluster no older than this call, and its resourceVersion. No namespace: all of them."""
        ...

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object: ...

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, *,
        uid: str, grace_seconds: int | None = None, propagation: Propagation | None = None,
    ) -> bool:  # fmt: skip
        """False: it was not there, or has another uid."""
        ...

    async def merge_patch(self, resource: Resource, namespace: str | None, name: str, body: Object, *, subresource: str = "") -> Object:
        """``metadata.resourceVersion`` and ``metadata.uid`` in the body are preconditions: KubeConflict where they differ.

        On a subresource a uid without a resourceVersion costs a read; ``json_patch`` with a ``test`` of /metadata/uid does not.
        """
        ...

    async def json_patch(
        self, resource: Resource, namespace: str | None, name: str, operations: Sequence[Object], *, subresource: str = ""
    ) -> Object:
        """KubeConflict where an operation ``test`` fails (or, in a patch with a ``test``, a path is missing)."""
        ...

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenStatus:
        """No audiences: the token is meant for the apiserver itself."""
        ...

    async def review_access(
        self, user: str, groups: Sequence[str], extra: Mapping[str, Sequence[str]], *,
        verb: str, group: str, resource: str, subresource: str = "", namespace: str = "", name: str = "",
    ) -> AccessStatus:  # fmt: skip
        """An empty namespace: all of them."""
        ...
