"""Checks of what a decorator was given, made at import: there a mistake is seen at once, and not in the middle of a run."""

from __future__ import annotations

from typing import Any

from perdure.sdk.errors import InvalidDeclaration


def one_of(value: object, allowed: tuple[str, ...], what: str) -> None:
    """Raises InvalidDeclaration, as all of these. None is always allowed."""
    if value is not None and value not in allowed:
        raise InvalidDeclaration(f"{what} is one of {', '.join(map(repr, allowed))}, not {value!r}")


def exceptions(value: object, what: str) -> None:
    """A tuple of classes of exceptions."""
    if not isinstance(value, tuple) or not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in value):
        raise InvalidDeclaration(f"{what} is a tuple of exception classes, such as (ValueError,), not {value!r}")


def names(value: object, what: str) -> None:
    """A tuple of strings. One string alone would be taken for its letters."""
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) for name in value):
        raise InvalidDeclaration(f'{what} is a tuple of names of parameters, such as ("to",), not {value!r}')


def count(value: object, what: str) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidDeclaration(f"{what} is a whole number from 0, not {value!r}")


def function(value: Any, what: str) -> None:
    if not callable(value) or isinstance(value, type):
        raise InvalidDeclaration(f"{what} decorates a function, not {value!r}; options are given by name")
