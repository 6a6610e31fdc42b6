"""``@tool``: calls with an effect outside, kept in the ledger (E1-E5, E10).

The effect's key is computed by the gateway from the call's arguments, so the same call anywhere in a run is the same effect: it happens
once, and a second call gets the receipt. ``activities`` holds the conversation with the ledger.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, ParamSpec, Protocol, TypeVar, get_args, overload
from uuid import uuid4

import msgspec

from perdure.sdk import declared
from perdure.sdk.activities import ToolCall
from perdure.sdk.calls import Durable, Work, dispatch
from perdure.sdk.codec import encode, fingerprint
from perdure.sdk.durations import Duration, in_seconds
from perdure.sdk.errors import InvalidDeclaration, NotEncodable, PerdureError
from perdure.sdk.here import HERE, Here
from perdure.sdk.identity import Scope
from perdure.sdk.run import RunFacts
from perdure.sdk.signature import Signature, checked_name
from perdure.sdk.tool_options import EffectClass, Receipt, ToolOptions, UnknownPolicy

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")


class Tool(Durable[P, C, R]):
    """A tool. See :func:`tool`."""

    def __init__(self, signature: Signature, options: ToolOptions, reconcilers: list[Callable[[str], Any]] | None = None) -> None:
        super().__init__(signature)
        self._options = options
        self._reconcilers: list[Callable[[str], Any]] = [] if reconcilers is None else reconcilers

    @property
    def name(self) -> str:
        return self._options.name

    def reconcile(self, fn: Callable[[str], Awaitable[R | None] | R | None]) -> Callable[[str], Awaitable[R | None] | R | None]:
        """Registers how to ask the provider whether the effect under a key has happened: its result, or None."""
        self._reconcilers[:] = [fn]
        return fn

    def options(
        self, *, occurrence: int | None = None, namespace: str | None = None, timeout: Duration | None = None, name: str | None = None
    ) -> Tool[P, C, R]:
        """The same tool with other options. ``occurrence=1`` asks for a second, distinct effect with the same arguments."""
        given: dict[str, Any] = {"occurrence": occurrence, "namespace": namespace}
        given["timeout"] = None if timeout is None else in_seconds(timeout)
        given["name"] = None if name is None else checked_name(name, "tool")
        changed = replace(self._options, **{field: value for field, value in given.items() if value is not None})
        return Tool(self._signature, changed, self._reconcilers)

    def receipt(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Receipt[R]]:
        """The call, giving its :class:`Receipt`. Only inside a run."""
        here = HERE.get()
        if here is None:
            raise PerdureError(f"tool {self.name}: there is a receipt only inside a run")
        coroutine: Coroutine[Any, Any, Receipt[R]] = dispatch(here.execution, self._call(here, args, kwargs).receipt, blocking=False)
        return coroutine

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._signature.fn(*args, **self._with_key(kwargs, str(uuid4()), keep=True))

    def _prepared(self, here: Here, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work[R]:
        call = self._call(here, args, kwargs)

        async def work() -> R:
            return (await call.receipt()).value

        return work

    def _call(self, here: Here, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ToolCall[R]:
        options = self._options
        if options.on_unknown == "query" and not self._reconcilers:
            raise InvalidDeclaration(f"tool {self.name} says on_unknown='query' but has no reconcile function")
        arguments = self._signature.arguments(args, self._with_key(kwargs, ""))
        arguments.pop(options.key_parameter, None) if self._signature.accepts(options.key_parameter) else None
        if options.repeatable:
            options = self._counted(here.scope, here, arguments)

        def body(key: str) -> Any:
            return functools.partial(self._signature.fn, *args, **self._with_key(kwargs, key))

        data = msgspec.Raw(encode(self._sendable(arguments), f"arguments of tool {self.name}"))
        return ToolCall(here, self._signature, options, data, body, self._reconcilers[0] if self._reconcilers else None)

    def _counted(self, scope: Scope, here: Here, arguments: dict[str, Any]) -> ToolOptions:
        """Each call of a repeatable tool is an effect of its own, counted per identity. The count is that of the enclosing step, and so is
        the namespace: a step that a restart skips must not shift the count of what comes after it."""
        options = self._options
        identity = {name: value for name, value in arguments.items() if name not in options.ignore}
        if options.scope is not None:
            identity = {name: arguments.get(name) for name in options.scope}
        claim = scope.claim("activity", f"{self.name}.{fingerprint(identity)}", None, here.strand.lane)
        namespace = f"{options.namespace}|{scope.path}" if scope.path else options.namespace
        return replace(options, occurrence=int(claim.key.rpartition("#")[2]), namespace=namespace)

    def _with_key(self, kwargs: dict[str, Any], key: str, *, keep: bool = False) -> dict[str, Any]:
        parameter = self._options.key_parameter
        if not self._signature.accepts(parameter) or (keep and kwargs.get(parameter)):
            return kwargs
        return {**kwargs, parameter: key}

    def _sendable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Without the run, which is no argument of the effect, and without ignored ones that have no JSON form."""
        given = {name: value for name, value in arguments.items() if not isinstance(value, RunFacts)}
        return {name: value for name, value in given.items() if name not in self._options.ignore or _has_json(value)}


def _check(signature: Signature, options: ToolOptions) -> None:
    """Raises InvalidDeclaration for what could not work in any call."""
    what = signature.what
    if options.timeout <= 0:
        raise InvalidDeclaration(f"{what}: its timeout must be positive")
    declared.one_of(options.effect, get_args(EffectClass), f"{what}: effect")
    declared.one_of(options.on_unknown, get_args(UnknownPolicy), f"{what}: on_unknown")
    declared.count(options.retries, f"{what}: retries")
    declared.count(options.occurrence, f"{what}: occurrence")
    declared.exceptions(options.not_executed, f"{what}: not_executed")
    declared.exceptions(options.rejected, f"{what}: rejected")
    declared.names(options.scope or (), f"{what}: scope")
    declared.names(options.ignore, f"{what}: ignore")
    if not options.ledger and options.effect != "read_only":
        raise InvalidDeclaration(f"{what}: only a tool with effect='read_only' may go without the ledger")
    missing = [part for part in (options.scope or ()) if not signature.has(part) or part == options.key_parameter]
    if missing:
        raise InvalidDeclaration(f"{what}: its scope names {', '.join(missing)}, which it has no parameter for")
    for name, default in signature.defaults().items():
        # Every call that does not give it would send it.
        if name not in (options.key_parameter, *options.ignore) and not isinstance(default, RunFacts):
            try:
                encode(default)
            except NotEncodable as error:
                raise InvalidDeclaration(
                    f"{what}: the default of {name} has no JSON form: {error}; ignore=({name!r},) leaves it out"
                ) from error


def _has_json(value: object) -> bool:
    try:
        encode(value)
    except NotEncodable:
        return False
    return True


class ToolDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Tool[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Tool[P, R, R]: ...


@overload
def tool(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Tool[P, Coroutine[Any, Any, R], R]: ...
@overload
def tool(fn: Callable[P, R], /) -> Tool[P, R, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    effect: EffectClass | None = None,
    scope: tuple[str, ...] | None = None,
    scope_is_identity: bool = False,
    ignore: tuple[str, ...] = (),
    namespace: str = "",
    repeatable: bool = False,
    on_unknown: UnknownPolicy | None = None,
    timeout: Duration = 300.0,
    retries: int | None = None,
    not_executed: tuple[type[Exception], ...] = (),
    rejected: tuple[type[Exception], ...] = (),
    provider_ref: Callable[[Any], str | None] | None = None,
    key_parameter: str = "key",
    ledger: bool = True,
) -> ToolDecorator: ...
def tool(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, timeout: Duration = 300.0, **options: Any) -> Any:
    """Makes a function a tool. Outside a run it stays the function that it was.

    ``effect``: its class; without it the gateway decides by pool and name. ``scope``: the arguments that are the effect's identity;
    ``scope_is_identity``: the rest may differ. ``ignore``: arguments that do not matter. ``repeatable``: every call is an effect of its
    own. ``on_unknown``: what to do when nobody knows whether it happened. ``timeout``: seconds. ``retries``: of calls that failed.
    ``not_executed``: exceptions that prove that nothing happened, besides NotExecuted; ``rejected``: the same, and trying again is
    useless. ``provider_ref``: the provider's name for the effect, from the result. ``key_parameter``: the parameter, if the function has
    it, that gets the idempotency key; give it a default to please type checkers. ``ledger=False``: do not record; ``read_only`` only.

    A call raises EffectUnknown, EffectConflict, EffectDenied, EffectFailed, EffectBusy, ResultUndecodable, RunCancelled, and what the
    function raises.
    """
    seconds = in_seconds(timeout)

    def decorate(fn: Callable[..., Any]) -> Tool[..., Any, Any]:
        own = checked_name(name or str(getattr(fn, "__name__", "tool")), "tool")
        if isinstance(fn, Tool):
            raise InvalidDeclaration(f"tool {own} is decorated twice")
        signature = Signature(fn, f"tool {own}")
        try:
            made = ToolOptions(name=own, timeout=seconds, **options)
        except TypeError as error:
            raise InvalidDeclaration(f"tool {own}: {str(error).removeprefix('ToolOptions.__init__() ')}") from None
        _check(signature, made)
        return Tool(signature, made)

    return decorate if fn is None else decorate(fn)
