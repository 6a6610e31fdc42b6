"""Every error that Perdure reports, with a stable code, an HTTP status, whether a retry helps, and what to do about it.

The code is part of the API: clients branch on it, so it never changes. The gateway turns an error into RFC 9457 problem JSON with
the type ``urn:perdure:<code>``. SQL functions answer with the same codes (``BY_CODE`` finds the class).
"""

from __future__ import annotations

from typing import ClassVar


class PerdureError(Exception):
    """Base of all typed errors. ``str(error)`` is the detail: what is wrong with this request."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    action: ClassVar[str] = "Look into the gateway's log; the request id is there."

    def __init__(self, detail: str = "", *, action: str | None = None) -> None:
        super().__init__(detail or (type(self).__doc__ or self.code).splitlines()[0])
        if action is not None:
            self.action_override = action

    @property
    def advice(self) -> str:
        return getattr(self, "action_override", None) or self.action


class InvalidInput(PerdureError):
    """The request is not well-formed."""

    code, status = "invalid-input", 400
    action = "Correct the request; nothing was stored."


class PayloadTooLarge(PerdureError):
    """A JSON value is larger than allowed."""

    code, status = "payload-too-large", 413
    action = "Store the data elsewhere and pass a reference, or split it; nothing was stored."


class Unauthenticated(PerdureError):
    """The bearer token is missing, expired or not one of ours."""

    code, status = "unauthenticated", 401
    action = "Get a new token and try again."


class Forbidden(PerdureError):
    """The caller may not do this."""

    code, status = "forbidden", 403
    action = "Ask for the verb that the detail names."


class RunNotFound(PerdureError):
    """There is no such run."""

    code, status = "run-not-found", 404
    action = "Check namespace and name; `perdure get` lists the runs."


class PoolNotFound(PerdureError):
    """There is no such agent pool."""

    code, status = "pool-not-found", 404
    action = "Create the AgentPool, or correct spec.agent.poolRef."


class TriggerNotFound(PerdureError):
    """There is no such trigger."""

    code, status = "trigger-not-found", 404
    action = (
        "Check namespace and name. Triggers are of a cluster, `perdure dev` has none. "
        "A webhook is answered only by one whose source is webhook."
    )


class DeliveryNotFound(PerdureError):
    """There is no such delivery, or none that was given up."""

    code, status = "delivery-not-found", 404
    action = "List the trigger's deliveries; only dead ones can be redriven."


class NameTaken(PerdureError):
    """Another run has this name."""

    code, status = "name-taken", 409
    action = "Choose another name, or send the Idempotency-Key of the request that made it to get that run back."


class StaleFence(PerdureError):
    """The lease under which this was sent is over: another epoch or another holder."""

    code, status = "lease-lost", 409
    action = "Stop this attempt; the run goes on elsewhere."


class NotRunning(PerdureError):
    """The run does not run, so nothing can be written by a worker."""

    code, status = "not-running", 409
    action = "Stop this attempt."


class NotAsked(PerdureError):
    """A person answers a question that the run does not ask, or not any more."""

    code, status = "not-asked", 409
    action = "See what the run asks, with `why`; copy the whole command from there."


class RunFinished(PerdureError):
    """The run is terminal; it never changes again."""

    code, status = "run-finished", 409
    action = "Start a new run."


class CancelRequested(PerdureError):
    """The run has been asked to cancel; it cannot succeed any more."""

    code, status = "cancel-requested", 409
    action = "Finish with the outcome `cancelled`."


class DeadlineExceeded(PerdureError):
    """A deadline of the run has passed; the run has failed."""

    code, status = "deadline-exceeded", 409
    action = "Stop this attempt; raise deadlineSeconds or activeDeadlineSeconds for the next run."


class ConcurrentAppend(PerdureError):
    """The log has gone on since the sequence that the caller expected."""

    code, status, retryable = "concurrent-append", 409, True
    action = "Read the log from there and decide again."


class WaitConflict(PerdureError):
    """A wait with this key exists with other conditions, or the suspension names a wait that does not exist."""

    code, status = "wait-conflict", 409
    action = "Give each wait its own key; register a wait before suspending on it."


class EffectRunning(PerdureError):
    """The run cannot be suspended while one of its calls is under way."""

    code, status, retryable = "effect-running", 409, True
    action = "End the call first (POST /v1/activities/end), whatever came of it; then send the same request again."


class UnknownActivity(PerdureError):
    """No such ledger entry, or this token was never given out for it."""

    code, status = "unknown-activity", 409
    action = "Begin the activity first and send back the token that begin answered."


class Busy(PerdureError):
    """The run was locked by another operation for too long."""

    code, status, retryable = "busy", 503, True
    action = "Send the same request id again."


class Unavailable(PerdureError):
    """The store did not answer; whether the operation was committed is not known."""

    code, status, retryable = "unavailable", 503, True
    action = "Send the same request id again; it is applied at most once."


class StoreError(PerdureError):
    """The store refused an operation in a way that should not happen."""

    code, status = "internal", 500


class CorruptPayload(PerdureError):
    """A stored value cannot be read back."""

    code, status = "corrupt-payload", 500
    action = "Check the database; `perdure verify` finds more. A session falls back to the checkpoint before, a result is never redone."


class RunTooLarge(PerdureError):
    """The run would have written more than a run may."""

    code, status = "run-too-large", 413
    action = (
        "End the run, which it still can; receipts are taken as well. Keep large data in a store of its own and record references, "
        "or have the installation's limits raised (PERDURE_RUN_BYTES and PERDURE_RUN_STORED_BYTES, in the chart gateway.runLimits)."
    )


class LeaseTooLarge(PerdureError):
    """What a worker is to be told at once does not fit into a frame."""

    code, status = "lease-too-large", 413
    action = "Use an SDK, or an agent, that fetches large values (`GET /v1/run?fetch=true`), or let the run keep less."


class IllegalTransition(PerdureError):
    """The run's state does not allow this event."""

    code, status = "illegal-transition", 409
    action = "Read the run's state first."


def _all(cls: type[PerdureError]) -> list[type[PerdureError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _all(sub))]


BY_CODE: dict[str, type[PerdureError]] = {cls.code: cls for cls in _all(PerdureError) if cls is not PerdureError}


def from_code(code: str, detail: str = "") -> PerdureError:
    """The typed error for a code that a SQL function answered."""
    return BY_CODE.get(code, StoreError)(detail or "")
