"""Every error that an agent can meet, with a stable ``code`` and whether another attempt could help (``retryable``).

Agent code may catch any of them; none is a control-flow trick. The exception to that is :class:`RunCancelled`, which is a
``BaseException`` so that a framework that turns exceptions of tools into text for a model does not swallow a cancel.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from perdure.protocol import ErrorInfo, Problem

_MAX_MESSAGE = 20_000
_MAX_TYPE = 200


class PerdureError(Exception):
    """Base of all typed errors of the SDK."""

    code: ClassVar[str] = "internal"
    retryable: bool = False

    def __init__(self, message: str = "", *, retryable: bool | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or self.code).splitlines()[0])
        if retryable is not None:
            self.retryable = retryable


class RunCancelled(BaseException):
    """The run was asked to cancel. Raised by operations and by ``run.check()``; let it pass."""

    code: ClassVar[str] = "run-cancelled"
    retryable: ClassVar[bool] = False


class NotExecuted(Exception):
    """Raised by a tool to say: it is certain that nothing happened outside. The one way to make a call FAILED rather than UNKNOWN."""

    code: ClassVar[str] = "not-executed"
    retryable: ClassVar[bool] = True


class InvalidDeclaration(PerdureError):
    """An agent, step, tool or slice is declared in a way that cannot work."""

    code = "invalid-declaration"


class InvalidInput(PerdureError):
    """The run's input is not what the agent's second parameter says."""

    code = "invalid-input"


class NotEncodable(PerdureError):
    """A value has no JSON form: only JSON values, dataclasses, pydantic models, msgspec structs and common scalars have one."""

    code = "not-encodable"


class ResultUndecodable(PerdureError):
    """A stored result no longer fits the declared type. Nothing was executed again."""

    code = "result-undecodable"
    retryable = True


class PayloadTooLarge(PerdureError):
    """A single JSON value is larger than the protocol allows."""

    code = "payload-too-large"


class ConcurrentUnnamed(PerdureError):
    """Operations of one kind and name are in flight at once without a key, so a restart could not tell them apart."""

    code = "concurrent-unnamed"


class InputChanged(PerdureError):
    """An operation was recorded with other inputs than it has now."""

    code = "input-changed"


class StepFailed(PerdureError):
    """A step failed after its retries. The same error is raised live and from the journal; live, ``__cause__`` is the original."""

    code = "step-failed"

    def __init__(self, step: str, error: ErrorInfo) -> None:
        super().__init__(f"{step}: {error.type}: {error.message}", retryable=error.retryable)
        self.step = step
        self.error = error


class StepTimedOut(PerdureError):
    """One attempt of a step took longer than its timeout."""

    code = "step-timed-out"
    retryable = True


class ToolTimedOut(PerdureError):
    """A tool took longer than its timeout; whether it had its effect is unknown."""

    code = "tool-timed-out"
    retryable = True


class WaitTimedOut(PerdureError):
    """Nothing that the wait waited for happened before its timeout."""

    code = "wait-timed-out"


class ChildFailed(PerdureError):
    """A child run did not succeed and its result was asked for."""

    code = "child-failed"

    def __init__(self, child: str, status: str, error: ErrorInfo | None) -> None:
        super().__init__(f"child {child} is {status}" + (f": {error.type}: {error.message}" if error else ""))
        self.child = child
        self.status = status
        self.error = error


class EffectError(PerdureError):
    """Base of what the ledger can say against a tool call. ``key`` is the effect's key in the ledger."""

    def __init__(self, tool: str, key: str, message: str) -> None:
        super().__init__(f"{tool}: {message}")
        self.tool = tool
        self.key = key


class EffectUnknown(EffectError):
    """Nobody knows whether the effect happened, and the tool's policy does not find out."""

    code = "effect-unknown"


class EffectConflict(EffectError):
    """The same effect was begun with other arguments, or an open effect stands in the way."""

    code = "effect-conflict"


class EffectDenied(EffectError):
    """Policy forbids this call."""

    code = "effect-denied"


class EffectFailed(EffectError):
    """The call was proven not executed and its retries are used up."""

    code = "effect-failed"


class EffectBusy(EffectError):
    """Another execution of the same effect stayed open for the whole timeout of the tool."""

    code = "effect-busy"
    retryable = True


class SidecarUnavailable(PerdureError):
    """The sidecar could not be reached for too long."""

    code = "sidecar-unavailable"
    retryable = True


class Refused(PerdureError):
    """The gateway or the sidecar refused an operation; ``problem`` says why and what to do."""

    code = "refused"

    def __init__(self, problem: Problem) -> None:
        said = ". ".join(part.rstrip(".") for part in (f"{problem.title.rstrip('.')}: {problem.detail}", problem.action) if part)
        super().__init__(f"{said}.", retryable=problem.retryable)
        self.problem = problem

    @property
    def problem_code(self) -> str:
        return self.problem.type.rpartition(":")[2]


class PodRetired(PerdureError):
    """This pod takes no more runs."""

    code = "retiring"


def describe(error: BaseException, *, retryable: bool | None = None) -> ErrorInfo:
    """The wire form of an exception: ``type`` is the code of a typed error, else the name of the class. A step's error is that of what it
    ran into, with the step's name."""
    if isinstance(error, StepFailed):
        return replace(error.error, message=f"step {error.step}: {error.error.message}"[:_MAX_MESSAGE])
    name = error.code if isinstance(error, PerdureError | RunCancelled | NotExecuted) else type(error).__qualname__
    if retryable is None:
        retryable = error.retryable if isinstance(error, PerdureError | RunCancelled | NotExecuted) else True
    return ErrorInfo(type=name[:_MAX_TYPE], message=_message(error)[:_MAX_MESSAGE], retryable=retryable)


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # an exception of agent code may be broken itself
        text = "(its message cannot be read)"
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
