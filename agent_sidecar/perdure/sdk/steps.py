"""``@step``: journaled code (E8, E10, L11). Done once; afterwards a restart gets the recorded result without a round trip.

A failure is recorded at once if the step declares it final, else only when the agent goes on after it: if it ends the attempt, the next
attempt tries the step again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import msgspec

from perdure import protocol
from perdure.sdk import declared
from perdure.sdk.calls import Durable, Work
from perdure.sdk.codec import encode, fingerprint
from perdure.sdk.durations import Duration, in_seconds
from perdure.sdk.errors import InputChanged, InvalidDeclaration, ResultUndecodable, StepFailed, StepTimedOut, describe
from perdure.sdk.execution import Execution, InputPolicy
from perdure.sdk.here import HERE, Here
from perdure.sdk.identity import Claim, Scope
from perdure.sdk.retry import RetryPolicy
from perdure.sdk.signature import Signature, checked_name

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
KeyOf = str | Callable[..., str]
NO_RETRIES = RetryPolicy()


@dataclass(frozen=True, slots=True)
class StepOptions:
    name: str
    key: KeyOf | None = None
    phase: str | None = None
    timeout: float | None = None
    retry: RetryPolicy = NO_RETRIES
    on_input_change: InputPolicy | None = None


class Step(Durable[P, C, R]):
    """A step. See :func:`step`."""

    def __init__(self, signature: Signature, options: StepOptions) -> None:
        super().__init__(signature)
        self._options = options

    def options(
        self,
        *,
        key: str | None = None,
        name: str | None = None,
        phase: str | None = None,
        timeout: Duration | None = None,
        retry: RetryPolicy | None = None,
    ) -> Step[P, C, R]:
        """The same step with other options, for instance a ``key=`` for calls that run at once."""
        given: dict[str, Any] = {"key": key, "phase": phase, "retry": retry}
        given["name"] = None if name is None else checked_name(name, "step")
        given["timeout"] = None if timeout is None else in_seconds(timeout)
        return Step(self._signature, replace(self._options, **{field: value for field, value in given.items() if value is not None}))

    def _prepared(self, here: Here, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work[R]:
        arguments = self._signature.arguments(args, kwargs)
        key = self._options.key
        if callable(key):
            key = str(key(*args, **kwargs))
        claim = here.scope.claim("step", self._options.name, key, here.strand.lane)
        body = functools.partial(self._signature.fn, *args, **kwargs)
        return functools.partial(self._run, here.execution, claim, fingerprint(arguments), body)

    async def _run(self, execution: Execution, claim: Claim, print_: str, body: Callable[[], Any]) -> R:
        strand = cast("Here", HERE.get()).strand
        await execution.gate(strand)
        key = claim.key
        entry = execution.journal.get(key)
        if entry is not None and entry.fingerprint not in (None, print_):
            key, entry = self._input_changed(execution, entry, print_)
        if entry is not None:
            return self._recorded(await execution.fetched.entry(entry))
        with claim.in_flight():
            return cast("R", await _StepRun(execution, self._signature, self._options, key, print_).run(body))

    def _input_changed(self, execution: Execution, entry: protocol.JournalEntry, print_: str) -> tuple[str, protocol.JournalEntry | None]:
        """L11. A redo is recorded under a key of its own, because the first outcome under a key stays."""
        policy = self._options.on_input_change or execution.options.on_input_change
        redone = f"{entry.key}@{print_}"
        if policy == "redo" and redone in execution.journal:
            return redone, execution.journal[redone]
        execution.notice("StepInputChanged", {"key": entry.key, "recorded": entry.fingerprint, "now": print_, "policy": policy})
        if policy == "fail":
            raise InputChanged(f"step {entry.key} was recorded with other arguments")
        return (redone, None) if policy == "redo" else (entry.key, entry)

    def _recorded(self, entry: protocol.JournalEntry) -> R:
        if entry.state == "failed":
            raise StepFailed(self._options.name, entry.error or protocol.ErrorInfo(type="unknown"))
        try:
            return cast("R", self._signature.result.decode(entry.output))
        except ValueError as error:
            raise ResultUndecodable(
                f"the recorded result of {entry.key} is no {self._signature.result.type}: {error}; "
                "deploy code that can read it, or give the step another name"
            ) from error


class _StepRun:
    """One execution of a step, with its tries."""

    def __init__(self, execution: Execution, signature: Signature, options: StepOptions, key: str, print_: str) -> None:
        self.execution = execution
        self.signature = signature
        self.options = options
        self.key = key
        self.print = print_

    async def run(self, body: Callable[[], Any]) -> Any:
        strand = cast("Here", HERE.get()).strand
        tries = 0
        while True:
            tries += 1
            try:
                value = await self._try(body, strand)
                output = encode(value, f"result of step {self.options.name}")
            except Exception as error:  # every failure of a step is an outcome
                retry = self.options.retry
                if tries <= retry.retries and retry.helps(error):
                    self.execution.forget_failures(f"{self.key}/")
                    with strand.busy():
                        await self.execution.pause(retry.pause(tries))
                    continue
                raise await self._failed(error, tries) from error
            with strand.busy():
                await self._record(self._end("succeeded", tries, msgspec.Raw(output), None))
            return self.signature.result.decode(output) if self.signature.result.untyped else value

    async def _try(self, body: Callable[[], Any], strand: Any) -> Any:
        own = self.execution.strands.begin(strand.lane, parent=strand)
        strand.enter()
        limit = asyncio.timeout(self.options.timeout)
        try:
            with self.execution.here(Scope(self.key), own, self.key):
                async with limit:
                    if self.signature.is_async:
                        return await body()
                    return await self.execution.threads.call(body, own_thread=self.options.timeout is not None)
        except TimeoutError as error:
            if limit.expired():
                raise StepTimedOut(f"step {self.options.name} took longer than {self.options.timeout} s") from error
            raise
        finally:
            own.end()
            strand.leave()

    async def _failed(self, error: Exception, tries: int) -> StepFailed:
        info = describe(error, retryable=self.options.retry.helps(error))
        body = self._end("failed", tries, protocol.NULL, info)
        if isinstance(error, self.options.retry.non_retryable):
            await self._record(body)
        else:
            self.execution.defer(body, failure_of=self.key)
        return StepFailed(self.options.name, info)

    def _end(
        self, state: Literal["succeeded", "failed"], tries: int, output: msgspec.Raw, error: protocol.ErrorInfo | None
    ) -> protocol.StepEnd:
        return protocol.StepEnd(
            key=self.key,
            name=self.options.name,
            state=state,
            fingerprint=self.print,
            phase=self.options.phase,
            attempts=tries,
            output=output,
            error=error,
        )

    async def _record(self, body: protocol.StepEnd) -> None:
        body.slices = self.execution.session.take()
        recorded = await self.execution.call(body, protocol.Recorded)
        self.execution.journal[self.key] = protocol.JournalEntry(
            key=body.key,
            kind="step",
            name=body.name,
            state=body.state,
            seq=recorded.seq,
            fingerprint=body.fingerprint,
            output=body.output,
            error=body.error,
        )


class StepDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Step[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Step[P, R, R]: ...


@overload
def step(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Step[P, Coroutine[Any, Any, R], R]: ...
@overload
def step(fn: Callable[P, R], /) -> Step[P, R, R]: ...
@overload
def step(
    *,
    name: str | None = None,
    key: KeyOf | None = None,
    phase: str | None = None,
    timeout: Duration | None = None,
    retries: int = 0,
    backoff: float = 0.5,
    max_backoff: float = 60.0,
    non_retryable: tuple[type[Exception], ...] = (),
    on_input_change: InputPolicy | None = None,
) -> StepDecorator: ...
def step(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    key: KeyOf | None = None,
    phase: str | None = None,
    timeout: Duration | None = None,
    retries: int = 0,
    backoff: float = 0.5,
    max_backoff: float = 60.0,
    non_retryable: tuple[type[Exception], ...] = (),
    on_input_change: InputPolicy | None = None,
) -> Any:
    """Makes a function a step. Outside a run it stays the function that it was.

    ``key``: a string, or a function of the arguments, for calls that run at once. ``timeout``: seconds of one try. ``retries``,
    ``backoff``, ``max_backoff`` (seconds), ``non_retryable``: see :class:`RetryPolicy`. ``on_input_change``: what a restart does that
    calls the step with other arguments than recorded: ``reuse`` the result, ``redo``, or ``fail``; it warns in any case.

    A call raises StepFailed, ResultUndecodable, InputChanged, ConcurrentUnnamed, RunCancelled.
    """

    def decorate(fn: Callable[..., Any]) -> Step[..., Any, Any]:
        own = checked_name(name or str(getattr(fn, "__name__", "step")), "step")
        if isinstance(fn, Step):
            raise InvalidDeclaration(f"step {own} is decorated twice")
        if key is not None and not isinstance(key, str) and not callable(key):
            raise InvalidDeclaration(f"step {own}: key is a string or a function of the arguments, not {key!r}")
        declared.one_of(on_input_change, get_args(InputPolicy), f"step {own}: on_input_change")
        retry = RetryPolicy(retries, backoff, max_backoff, non_retryable)
        limit = None if timeout is None else in_seconds(timeout)
        if limit is not None and limit <= 0:
            raise InvalidDeclaration(f"step {own}: its timeout must be positive")
        return Step(Signature(fn, f"step {own}"), StepOptions(own, key, phase, limit, retry, on_input_change))

    return decorate if fn is None else decorate(fn)
