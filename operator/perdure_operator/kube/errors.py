"""What an apiserver refuses or fails to do, typed by what the caller has to do about it.

Of HTTP status and reason only the difference matters: gone, raced, wrong, not allowed, or worth another try.
"""

from __future__ import annotations

from perdure_operator.domain.errors import PerdureError


class KubeError(PerdureError):
    """The apiserver did not do what it was asked for."""

    code, status = "kube-error", 500


class KubeNotFound(KubeError):
    """The object, or the namespace that it should be in, does not exist."""

    code, status = "kube-not-found", 404
    action = "Look again at the object that this was about; it may have been deleted meanwhile."


class KubeConflict(KubeError):
    """Another object has this name (``exists``), or the object is no longer what the precondition says."""

    code, status, retryable = "kube-conflict", 409, True
    action = "Read the object and decide again."

    def __init__(self, detail: str = "", *, exists: bool = False) -> None:
        super().__init__(detail)
        self.exists = exists


class KubeInvalid(KubeError):
    """The apiserver, or an admission policy, finds the object or the request wrong."""

    code, status = "kube-invalid", 422
    action = "Correct what the detail names."

    def __init__(self, detail: str = "", *, unspecific: bool = False) -> None:
        """``unspecific``: the server does not say what is wrong."""
        super().__init__(detail)
        self.unspecific = unspecific


class KubeForbidden(KubeError):
    """The service account lacks a right, or (``quota``) a ResourceQuota has no room."""

    code, status = "kube-forbidden", 403
    action = "Grant the verb that the detail names, or raise the quota."

    def __init__(self, detail: str = "", *, quota: bool = False) -> None:
        super().__init__(detail)
        self.quota = quota


class KubeUnavailable(KubeError):
    """The apiserver is overloaded, failing or out of reach. Whether a write was done is not known.

    ``retry_after``: seconds that the server asked to wait, None if it did not say.
    """

    code, status, retryable = "kube-unavailable", 503, True
    action = "Try again later; check that the apiserver is reachable and the service account's token is valid."

    def __init__(self, detail: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after = retry_after
