"""Reads the ``Status`` in which an apiserver says why it did not do something.

HTTP codes alone are not enough: a 404 may mean that the object is gone, or that the server does not know the kind (a CRD that is not
served yet after a restart); a 409 may be a name that is taken, a precondition, or two pods that met at a quota.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from perdure_operator.kube.errors import KubeConflict, KubeError, KubeForbidden, KubeInvalid, KubeNotFound, KubeUnavailable

_QUOTA = re.compile(r"(exceeded|failed|status unknown for) quota")


class Expired(KubeUnavailable):
    """The state of the cluster that was asked for is no longer kept."""


class Unserved(KubeUnavailable):
    """The apiserver does not serve this kind."""

    action = "Install the CRDs; if they are installed, the apiserver has just started and will serve them soon."


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""
    field: str = ""


class _Details(msgspec.Struct, rename="camel"):
    kind: str = ""
    causes: list[_Cause] = []
    retry_after_seconds: int = 0


class _Status(msgspec.Struct):
    reason: str = ""
    message: str = ""
    details: _Details | None = None


def refusal(status: int, headers: Mapping[str, str], content: bytes, request: str) -> KubeError:
    """The typed error for an answer other than 2xx to ``request`` (for the message)."""
    try:
        told = msgspec.json.decode(content, type=_Status)
    except msgspec.MsgspecError:
        told = _Status(message=content[:200].decode(errors="replace").strip())
    details = told.details or _Details()
    detail = f"{request}: {status} {told.reason}: {told.message}"
    if status == 404:
        return KubeNotFound(detail) if told.reason == "NotFound" and told.details else Unserved(detail)
    if status == 409:
        if told.reason == "AlreadyExists":
            return KubeConflict(detail, exists=True)
        return KubeUnavailable(detail) if details.kind == "resourcequotas" else KubeConflict(detail)
    if status == 403:
        return KubeForbidden(detail, quota=bool(_QUOTA.search(told.message)))
    if status == 410:
        return Expired(detail)
    if status in (401, 408, 429) or status >= 500:
        return KubeUnavailable(detail, retry_after=_retry_after(headers, details))
    if status == 422 and any(cause.field == "metadata.uid" for cause in details.causes):
        return KubeConflict(detail)
    return KubeInvalid(detail, unspecific=status == 422 and not details.causes)


def _retry_after(headers: Mapping[str, str], details: _Details) -> float | None:
    """Seconds; the date form is not used by apiservers."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else details.retry_after_seconds or None
