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
from itertools import pairwise
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

# E2's, and others that are hardly ever nouns. What is a noun as well (store, run, order) changes something only after
# a connective.
_SIDE_EFFECT_VERBS = frozenset(
    """
    SEND CREATE UPDATE DELETE PATCH POST MERGE UPLOAD INVITE PUBLISH COMMENT REPLY FORWARD ARCHIVE LABEL MOVE MARK ASSIGN
    ACK ACKNOWLEDGE ADD ALTER APPEND APPLY ATTACH BUY CANCEL CLEAR CONSUME DECREMENT DEL DEQUEUE DESTROY DETACH DISABLE DRAIN DROP EDIT
    ENABLE ERASE EXEC EXECUTE INCREMENT INSERT INSTALL INVOKE KILL MODIFY OVERWRITE PAY POP PRUNE PURGE PUSH PUT REMOVE RENAME REPLACE
    RESET REVOKE SAVE SELL SET SUBMIT SUBSCRIBE TAKE TRUNCATE UNSUBSCRIBE UPSERT WIPE WRITE
    """.split()
)
_READ_VERBS = frozenset("GET LIST SEARCH READ FETCH RETRIEVE".split())
_CONNECTIVES = frozenset("AND OR THEN N PLUS TO INTO".split())
# What may stand before the verb with nothing but "_", "-" or a capital between: names of services and of kinds of them. Any other word
# there may be the verb itself (`rebuild_search_index`, `sort_list`).
_SERVICES = frozenset(
    """
    API AIRTABLE ASANA AWS AZURE BOX BROWSER BROWSERBASE CALENDAR CLICKUP CLOUDFLARE CONFLUENCE CONTACTS DATABRICKS DATADOG DB DISCORD
    DRIVE DROPBOX ELASTICSEARCH FIGMA FILESYSTEM FIRECRAWL FS GCP GDRIVE GIT GITHUB GITLAB GMAIL GOOGLE GRAFANA GSHEETS HUBSPOT INTERCOM
    JIRA KAGI KUBECTL KUBERNETES LINEAR MAPS MCP MONDAY MONGODB MYSQL NEON NOTION ONEDRIVE OUTLOOK PAGERDUTY PERPLEXITY PG PLAYWRIGHT
    POSTGRES PUPPETEER REDDIT REDIS S3 SALESFORCE SENTRY SHAREPOINT SHEETS SHOPIFY SLACK SNOWFLAKE SPOTIFY SQL SQLITE STRIPE SUPABASE
    TEAMS TELEGRAM TODOIST TRELLO TWITTER VERCEL WEB YOUTUBE ZENDESK
    """.split()
)
_SEGMENTS = re.compile(r"__+|[./:]+")
_LARGE = 2**53
_WORDS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


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
    """The class that a tool's name suggests: read_only if each verb in it reads, as far as that can be seen, and external otherwise.

    A word counts as a whole, in ``snake_case``, ``kebab-case`` and ``camelCase``. The verb of the last segment (``users.list``,
    ``mcp__github__get_issue``) comes first in it, or after the name of a service. What follows are nouns, unless a verb that changes
    something is among them, anywhere in the name, or a connective joins what is no reading verb (``searchAndReplace``,
    ``fetch_and_store``).
    """
    if not tool.isascii():
        return EffectClass.EXTERNAL
    words = [word.upper() for word in _WORDS.findall(_SEGMENTS.split(tool)[-1])]
    while words and words[0] in _SERVICES:
        del words[0]
    joined = [after for word, after in pairwise([*words, ""]) if word in _CONNECTIVES]
    reads = bool(words) and all(verb in _READ_VERBS for verb in (words[0], *joined))
    changes = any(word.upper() in _SIDE_EFFECT_VERBS for word in _WORDS.findall(tool))
    return EffectClass.READ_ONLY if reads and not changes else EffectClass.EXTERNAL


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
