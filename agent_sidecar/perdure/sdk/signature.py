"""What the SDK needs to know of a decorated function, found out once: its parameters, whether it is async, how its result is decoded."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.sdk import declared
from perdure.sdk.codec import Codec, codec_of
from perdure.sdk.errors import InvalidDeclaration

_NAME = re.compile(r"[^/#=\x00-\x1f]{1,253}")


def checked_name(name: object, what: str) -> str:
    """A name that can be part of a redo key. Raises InvalidDeclaration."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidDeclaration(f"{what} {name!r}: a name has 1 to 253 characters without '/', '#', '=' and control characters")
    return name


class Signature:
    """``fn`` with its parameters and its type hints. Hints that name something not yet defined are tried again at the first use."""

    __slots__ = ("_hints", "_parameters", "_result", "_simple", "fn", "is_async", "names", "what")

    def __init__(self, fn: Callable[..., Any], what: str) -> None:
        declared.function(fn, what)
        self.fn = fn
        self.what = what
        self.is_async = inspect.iscoroutinefunction(fn)
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise InvalidDeclaration(f"{what}: a generator cannot be decorated")
        self._parameters = inspect.signature(fn)
        self.names = tuple(self._parameters.parameters)
        kinds = {parameter.kind for parameter in self._parameters.parameters.values()}
        self._simple = kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        self._result: Codec[Any] | None = None
        self._hints: dict[str, Any] | None = None
        try:
            self._hints = typing.get_type_hints(fn, include_extras=True)
        except (NameError, AttributeError):
            return
        self._result = codec_of(self._hint("return"))

    def _hint(self, name: str) -> Any:
        if self._hints is None:
            try:
                self._hints = typing.get_type_hints(self.fn, include_extras=True)
            except (NameError, AttributeError) as error:
                raise InvalidDeclaration(
                    f"{self.what}: its type hints cannot be resolved ({error}); import the types at run time, not only for type checking"
                ) from error
        hint = self._hints.get(name, Any)
        return type(None) if hint is None else hint

    @property
    def result(self) -> Codec[Any]:
        if self._result is None:
            self._result = codec_of(self._hint("return"))
        return self._result

    @property
    def resolved(self) -> bool:
        """Whether its hints are known; else they are looked at when they are first used."""
        return self._hints is not None

    def hint(self, name: str) -> Any:
        return self._hint(name)

    def defaults(self) -> dict[str, Any]:
        return {name: item.default for name, item in self._parameters.parameters.items() if item.default is not inspect.Parameter.empty}

    def positional(self, name: str) -> bool:
        """Whether ``name`` may be given by its position."""
        return self._parameters.parameters[name].kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)

    def parameter(self, name: str) -> Codec[Any]:
        return codec_of(self._hint(name))

    def has(self, name: str) -> bool:
        return name in self._parameters.parameters

    def accepts(self, name: str) -> bool:
        """Whether ``name`` may be given by keyword."""
        parameter = self._parameters.parameters.get(name)
        return parameter is not None and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, defaults filled in, ``self`` left out, keyword extras beside the rest. Raises TypeError."""
        if self._simple and not kwargs and len(args) == len(self.names):
            found = dict(zip(self.names, args, strict=True))
        else:
            try:
                bound = self._parameters.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.what}: {error}") from None
            bound.apply_defaults()
            found = dict(bound.arguments)
            for name, parameter in self._parameters.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    found.update(found.pop(name))
        if self.names and self.names[0] == "self":
            found.pop("self", None)
        return found
