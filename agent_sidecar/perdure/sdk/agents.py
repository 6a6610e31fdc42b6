"""``@agent``: the function that is a run, and how one attempt of it is executed from its context to its outcome."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import msgspec

from perdure import protocol
from perdure.sdk import declared
from perdure.sdk.calls import Durable
from perdure.sdk.codec import encode
from perdure.sdk.durations import Duration, in_seconds
from perdure.sdk.errors import InvalidDeclaration, InvalidInput, PerdureError, Refused, RunCancelled, describe
from perdure.sdk.execution import Execution, InputPolicy, Options
from perdure.sdk.exits import AGENT_FAILED, DONE, Exits
from perdure.sdk.run import Run
from perdure.sdk.signature import Signature, checked_name
from perdure.sdk.sync_run import SyncRun
from perdure.sdk.transport import Transport

P = ParamSpec("P")
C = TypeVar("C")
_log = logging.getLogger("perdure")


class Agent(Generic[P, C]):
    """A decorated agent function: ``(run)`` or ``(run, input)``. Called, it is that function; :meth:`serve` makes it a process."""

    def __init__(self, fn: Callable[P, C], name: str, options: Options, non_retryable: tuple[type[Exception], ...]) -> None:
        self.name = checked_name(name, "agent")
        if isinstance(fn, Agent | Durable):
            raise InvalidDeclaration(f"agent {name} is a decorated function already")
        self.signature = Signature(fn, f"agent {name}")
        self._check(options, non_retryable)
        self._options = options
        self._non_retryable = non_retryable
        functools.update_wrapper(cast("Any", self), fn)

    def _check(self, options: Options, non_retryable: tuple[type[Exception], ...]) -> None:
        """Raises InvalidDeclaration for what could not work in any run."""
        signature, what = self.signature, f"agent {self.name}"
        if not 1 <= len(signature.names) <= 2 or not all(map(signature.positional, signature.names)):
            raise InvalidDeclaration(f"{what} must take (run) or (run, input)")
        declared.exceptions(non_retryable, f"{what}: non_retryable")
        declared.one_of(options.on_input_change, get_args(InputPolicy), f"{what}: on_input_change")
        if options.hold_seconds < 0:
            raise InvalidDeclaration(f"{what}: hold cannot be negative")
        if not signature.resolved:
            return
        run, other = (Run, SyncRun) if signature.is_async else (SyncRun, Run)
        if signature.hint(signature.names[0]) is other:
            raise InvalidDeclaration(f"{what} is {'async' if signature.is_async else 'not async'}: its run is a {run.__name__}")
        if len(signature.names) == 2:
            signature.parameter(signature.names[1])

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        return cast("C", self.signature.fn(*args, **kwargs))

    def serve(self) -> None:
        """Serves runs until the pod's work is over, then exits the process: 0 done, 1 the agent failed, 75 the lease was lost."""
        from perdure.sdk.serve import serve

        serve(self)

    async def attempt(
        self, context: bytes, transport: Transport, exits: Exits, *, observe: Callable[[Execution], None] | None = None
    ) -> int:
        """Executes one attempt on the running loop and reports its outcome. Gives the exit code; does not return when the run suspends or
        the lease is lost. ``observe`` gets the execution before anything happens."""
        execution = Execution(context, transport, exits, self._options)
        if observe is not None:
            observe(execution)
        return await _Attempt(self, execution).run()

    async def body(self, execution: Execution) -> bytes:
        """The function's result as JSON. Raises what it raises, InvalidInput, NotEncodable."""
        run = (Run if self.signature.is_async else SyncRun)(execution)
        args: tuple[Any, ...] = (run,)
        if len(self.signature.names) == 2:
            try:
                args = (run, self.signature.parameter(self.signature.names[1]).decode(execution.context.input))
            except ValueError as error:
                raise InvalidInput(f"the input of agent {self.name}: {error}") from error
        call = functools.partial(self.signature.fn, *args)
        value = await call() if self.signature.is_async else await execution.threads.call(call)
        return encode(value, f"result of agent {self.name}")

    def final(self, error: BaseException) -> bool:
        """Whether another attempt could not end otherwise."""
        if isinstance(error, PerdureError):
            return not error.retryable
        return isinstance(error, self._non_retryable)


class _Attempt:
    def __init__(self, agent: Agent[..., Any], execution: Execution) -> None:
        self._agent = agent
        self._execution = execution

    async def run(self) -> int:
        execution = self._execution
        if execution.cancelled:
            return await self._finish("cancelled")
        strand = execution.strands.begin()
        try:
            with execution.here(execution.root, strand, None):
                await execution.fetched.all_that_must_be_there()
                output = await self._agent.body(execution)
        except GeneratorExit:  # nobody awaits it any more: a simulated death
            raise
        except BaseException as error:  # noqa: BLE001  # however the agent ends, its outcome is reported
            return await self._failed(error)
        finally:
            strand.end()
        # A cancel that was swallowed on the way makes the gateway refuse this, and _finish obey.
        return await self._finish("succeeded", output=output)

    async def _failed(self, error: BaseException) -> int:
        if self._execution.cancelled:
            return await self._finish("cancelled")
        _log.error("the agent failed: %s: %s", type(error).__name__, error, exc_info=error)
        outcome: Literal["failed", "retry"] = "failed" if self._agent.final(error) else "retry"
        return await self._finish(outcome, error=describe(error, retryable=outcome == "retry"))

    async def _finish(
        self,
        outcome: Literal["succeeded", "failed", "retry", "cancelled"],
        *,
        output: bytes = b"null",
        error: protocol.ErrorInfo | None = None,
    ) -> int:
        execution = self._execution
        if outcome != "succeeded":
            execution.forget_failures()
        try:
            # What a failed attempt did between its steps is done again by the next one.
            slices = [] if outcome == "retry" else execution.session.take()
        except PerdureError as broken:
            slices, error = [], error or describe(broken)
            outcome = "retry" if outcome == "succeeded" else outcome
            _log.error("the session cannot be saved: %s", broken)
        body = protocol.Finish(outcome=outcome, output=msgspec.Raw(output), error=error, slices=slices)
        try:
            await execution.call(body, protocol.Finished)
        except RunCancelled:
            return await self._finish("cancelled")
        except Refused as refusal:
            _log.error("the outcome %s was refused: %s", outcome, refusal)
            return AGENT_FAILED
        execution.over = True
        return DONE if outcome in ("succeeded", "cancelled") else AGENT_FAILED


class AgentDecorator(Protocol):
    def __call__(self, fn: Callable[P, C], /) -> Agent[P, C]: ...


@overload
def agent(fn: Callable[P, C], /) -> Agent[P, C]: ...
@overload
def agent(
    *,
    name: str | None = None,
    hold: Duration = 0.0,
    on_input_change: InputPolicy = "reuse",
    non_retryable: tuple[type[Exception], ...] = (),
) -> AgentDecorator: ...
def agent(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    hold: Duration = 0.0,
    on_input_change: InputPolicy = "reuse",
    non_retryable: tuple[type[Exception], ...] = (),
) -> Any:
    """Makes a function an agent. ``hold``: how long any wait keeps the pod before giving it back. ``on_input_change``: see ``step``.
    ``non_retryable``: exceptions after which another attempt is useless; every other one is retried as the run's spec says."""

    def decorate(fn: Callable[..., Any]) -> Agent[..., Any]:
        own = name or str(getattr(fn, "__name__", "agent"))
        return Agent(fn, own, Options(hold_seconds=in_seconds(hold), on_input_change=on_input_change), non_retryable)

    return decorate if fn is None else decorate(fn)
