"""The identity of an effect: its class, its key and its fingerprint (E2, E3).

A key says "the same effect"; the fingerprint says "the same call". Both are computed here, on the server's side, from the arguments
that the agent sent, so that every language gets the same key for the same call.

What is hashed is the canonical form of RFC 8785. That knows doubles only, and so no integer beyond ±(2^53 - 1); ids are often larger. They
go in like this: an integer that a double holds exactly has the form of that double, because in JSON it is the same number (the one that
JavaScript sends for it, too); any other integer, of any size, is its decimal digits and an ``n``. No other value has that form: outside
of strings JSON has no letter after a digit but the ``e`` of an exponent.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import UUID

import rfc8785

from perdure_operator.domain.errors import InvalidInput


class EffectClass(StrEnum):
    EXTERNAL = "external"
    MEMORY = "memory"
    LOCAL = "local"
    READ_ONLY = "read_only"


class UnknownPolicy(StrEnum):
    QUERY = "query"
    RETRY_SAME_KEY = "retry-same-key"
    ASK = "ask"
    FAIL = "fail"
    ASSUME_NOT_DONE = "assume-not-done"


DEFAULT_POLICY = {
    EffectClass.READ_ONLY: UnknownPolicy.ASSUME_NOT_DONE,
    EffectClass.LOCAL: UnknownPolicy.ASSUME_NOT_DONE,
    EffectClass.MEMORY: UnknownPolicy.RETRY_SAME_KEY,
    EffectClass.EXTERNAL: UnknownPolicy.ASK,
}

# How bad a second execution is. A run may only tighten.
_STRICTNESS = [EffectClass.READ_ONLY, EffectClass.LOCAL, EffectClass.MEMORY, EffectClass.EXTERNAL]

_SIDE_EFFECT_VERBS = frozenset(
    "SEND CREATE UPDATE DELETE PATCH POST MERGE UPLOAD INVITE PUBLISH COMMENT REPLY FORWARD ARCHIVE LABEL MOVE MARK ASSIGN".split()
)
_READ_VERBS = frozenset("GET LIST SEARCH READ FETCH RETRIEVE".split())
_LARGE = 2**53
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@dataclass(frozen=True)
class ToolPolicy:
    """What a pool says of one tool. ``None``: the pool says nothing."""

    effect: EffectClass | None = None
    scope: tuple[str, ...] | None = None
    on_unknown: UnknownPolicy | None = None


@dataclass(frozen=True)
class Call:
    """A call of a tool as the agent described it."""

    tool: str
    arguments: Any
    declared: EffectClass | None = None
    scope: tuple[str, ...] | None = None
    ignore: frozenset[str] = field(default_factory=frozenset)
    namespace: str = ""
    occurrence: int = 0


def by_verb(tool: str) -> EffectClass:
    """The class that the words of a tool's name suggest; side-effect verbs win, and nothing known is external."""
    words = {word.upper() for word in _WORDS.findall(tool)}
    if words & _SIDE_EFFECT_VERBS:
        return EffectClass.EXTERNAL
    return EffectClass.READ_ONLY if words & _READ_VERBS else EffectClass.EXTERNAL


def classify(call: Call, pool: ToolPolicy | None = None, run_side_effect_tools: frozenset[str] = frozenset()) -> EffectClass:
    """E2: the pool's word stands; else the tool's own declaration, else its verb. The run's list can only tighten to external."""
    if pool and pool.effect is not None:
        found = pool.effect
    else:
        found = call.declared or by_verb(call.tool)
    if call.tool in run_side_effect_tools:
        return max(found, EffectClass.EXTERNAL, key=_STRICTNESS.index)
    return found


def _canonical(value: Any) -> bytes:
    try:
        try:
            return rfc8785.dumps(value)
        except rfc8785.IntegerDomainError:
            return _with_large_integers(value)
    except rfc8785.CanonicalizationError as error:
        raise InvalidInput(f"the arguments have no canonical form (RFC 8785): {error}") from error


def _with_large_integers(value: Any) -> bytes:
    if isinstance(value, dict):
        fields = sorted(value.items(), key=lambda item: item[0].encode("utf-16be"))
        return b"{%b}" % b",".join(b"%b:%b" % (rfc8785.dumps(name), _with_large_integers(item)) for name, item in fields)
    if isinstance(value, list):
        return b"[%b]" % b",".join(map(_with_large_integers, value))
    if isinstance(value, int) and not -_LARGE < value < _LARGE:
        return rfc8785.dumps(float(value)) if _is_double(value) else b"%dn" % value
    return rfc8785.dumps(value)


def _is_double(value: int) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def identity(call: Call, pool: ToolPolicy | None = None) -> Any:
    """The part of the arguments that makes two calls the same effect: the declared scope, else all but the ignored fields."""
    scope = pool.scope if pool and pool.scope is not None else call.scope
    if scope is None:
        if isinstance(call.arguments, dict):
            return {name: value for name, value in call.arguments.items() if name not in call.ignore}
        return call.arguments
    if not isinstance(call.arguments, dict):
        raise InvalidInput(f"tool {call.tool} declares a scope, so its arguments must be an object")
    missing = [name for name in scope if name not in call.arguments]
    if missing:
        raise InvalidInput(f"tool {call.tool}: its scope names {', '.join(missing)}, which the arguments do not have")
    return {name: call.arguments[name] for name in scope}


def key(run: UUID, call: Call, pool: ToolPolicy | None = None) -> str:
    """E3: sha256 over run, namespace, tool, identity and occurrence, in hex. The step is stored, not hashed."""
    return hashlib.sha256(_canonical([str(run), call.namespace, call.tool, identity(call, pool), call.occurrence])).hexdigest()


def fingerprint(call: Call) -> str:
    """Over all arguments but the ignored ones: same key with another fingerprint is a conflict."""
    arguments = call.arguments
    if isinstance(arguments, dict):
        arguments = {name: value for name, value in arguments.items() if name not in call.ignore}
    return hashlib.sha256(_canonical(arguments)).hexdigest()[:32]
