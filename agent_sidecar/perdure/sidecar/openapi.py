"""The loopback API as an OpenAPI 3.1 document, made from the wire models: what they say is what is true.

Imported only when somebody asks for it. ``msgspec`` cannot give a schema to a model whose default is a ``Raw``, so the models are
rebuilt with ``Any`` in its place; names, bounds and descriptions stay.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Final, cast, get_args, get_origin

import msgspec
from msgspec import Raw, Struct

from perdure import protocol
from perdure.sidecar import VERSION
from perdure.sidecar.app import ChildEnded
from perdure.sidecar.http_server import MAX_BODY_BYTES
from perdure.sidecar.problems import KINDS

ANSWERS: Final[dict[str, type[Struct]]] = {
    "step.begin": protocol.StepDecision,
    "step.end": protocol.Recorded,
    "event": protocol.Recorded,
    "checkpoint": protocol.Recorded,
    "activity.begin": protocol.ActivityDecision,
    "activity.end": protocol.ActivityRecorded,
    "activity.resolve": protocol.ActivityDecision,
    "wait": protocol.WaitAnswer,
    "suspend": protocol.WaitAnswer,
    "spawn": protocol.Spawned,
    "fetch": protocol.Fetched,
    "finish": protocol.Finished,
}

_RULE: Final = re.compile(r" \([A-Z]\d+(?:, [A-Z]\d+)*\)")
"""The number of a rule of ours, which tells its reader nothing."""
_SCHEMAS: Final = "#/components/schemas/"
_EVERYWHERE: Final = ("bad-request", "foreign-origin", "not-found", "method-not-allowed", "misdirected", "headers-too-large", "internal")
_OF_A_RUN: Final = ("unauthorized", "no-run", "lease-lost", "run-released", "retiring")

Json = dict[str, Any]


def document() -> Json:
    operations = {cls.__struct_config__.tag: cls for cls in get_args(protocol.Operation)}
    models = [*operations.values(), *dict.fromkeys(ANSWERS.values()), protocol.RunContext, protocol.Poke, protocol.Problem, ChildEnded]
    plain = _Plain()
    _, schemas = msgspec.json.schema_components([plain.model(model) for model in models], ref_template=_SCHEMAS + "{name}")
    paths: Json = {}
    for op, path in protocol.OPERATION_PATHS.items():
        body = operations[op]
        schema = schemas[body.__name__]
        del schema["properties"]["op"]
        schema["required"] = [name for name in schema.get("required", ()) if name != "op"]
        paths[f"/v1/{path}"] = {"post": _operation(op, body, ANSWERS[op])}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Perdure sidecar",
            "version": VERSION,
            "description": "What an agent of any language talks to, on 127.0.0.1 and on a unix socket. An answer means: committed.",
        },
        "paths": paths | _other_paths(),
        "components": {
            "schemas": schemas,
            "responses": {code: _problem_response(code) for code in KINDS},
            "securitySchemes": {
                "run": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The run's secret; only where pods are reused by a fork per run.",
                },
                "parent": {"type": "http", "scheme": "bearer", "description": "The parent's secret, where one is configured."},
            },
        },
    }


class _Plain:
    """Models with every ``Raw`` turned into ``Any``."""

    def __init__(self) -> None:
        self._made: dict[type[Struct], type[Struct]] = {}

    def model(self, cls: type[Struct]) -> type[Struct]:
        if cls not in self._made:
            config = cls.__struct_config__
            hints = typing.get_type_hints(cls, include_extras=True)
            fields: list[Any] = []
            for field in msgspec.structs.fields(cls):
                # An omitted Raw is null, or (UNSET) absent; a factory makes an empty list or object.
                default: Any = None if isinstance(field.default, Raw) else field.default
                made: Any = msgspec.field(name=field.encode_name, default=default)
                if field.default_factory is not msgspec.NODEFAULT:
                    made = msgspec.field(name=field.encode_name, default_factory=cast("Callable[[], Any]", field.default_factory))
                fields.append((field.name, self._type(hints[field.name]), made))
            self._made[cls] = msgspec.defstruct(
                cls.__name__,
                fields,
                namespace={"__doc__": _prose(cls.__doc__ or "")},
                tag=config.tag,
                tag_field=config.tag_field,
                forbid_unknown_fields=config.forbid_unknown_fields,
                kw_only=True,
            )
        return self._made[cls]

    def _type(self, hint: Any) -> Any:
        if hint is Raw:
            return Any
        if isinstance(hint, type) and issubclass(hint, Struct):
            return self.model(hint)
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return Annotated[(self._type(arguments[0]), *arguments[1:])]
        if origin in (types.UnionType, typing.Union):
            return typing.Union[tuple(self._type(argument) for argument in arguments)]  # noqa: UP007  made at run time
        if origin in (list, dict):
            return origin[tuple(self._type(argument) for argument in arguments)]
        return hint


def _prose(docstring: str) -> str:
    """Without line breaks and the mark-up of Python's documentation."""
    text = _RULE.sub("", " ".join(docstring.split()))
    return re.sub(r":class:`~?(\w+)`", r"\1", text).replace("``", "`")


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _problems(*codes: str) -> Json:
    """Responses by status; several codes of one status share it."""
    by_status: dict[str, list[str]] = {}
    for code in sorted({*codes, *_EVERYWHERE}):
        by_status.setdefault(str(KINDS[code].status), []).append(code)
    return {
        status: _ref("responses", same[0])
        if len(same) == 1
        else {
            "description": "; ".join(f"urn:perdure:{code}: {KINDS[code].title}" for code in same),
            "content": {"application/problem+json": {"schema": {"$ref": f"{_SCHEMAS}Problem"}}},
        }
        for status, same in by_status.items()
    }


def _problem_response(code: str) -> Json:
    kind = KINDS[code]
    example = protocol.Problem(
        type=f"urn:perdure:{code}", title=kind.title, status=kind.status, detail="…", retryable=kind.retryable, action=kind.action
    )
    content = {"schema": {"$ref": f"{_SCHEMAS}Problem"}, "example": msgspec.to_builtins(example)}
    return {"description": f"urn:perdure:{code}: {kind.title}. {kind.action}", "content": {"application/problem+json": content}}


def _operation(op: str, body: type[Struct], answer: type[Struct]) -> Json:
    summary, _, rest = (body.__doc__ or "").partition("\n\n")
    request_id = {
        "name": "Perdure-Request-Id",
        "in": "header",
        "description": "The same on every resend of one operation, which is then recorded once. Made by the sidecar when it is missing.",
        "schema": {"type": "string", "format": "uuid"},
    }
    gateway = {
        "description": "A problem of the gateway: any status from 400, any urn:perdure: code; `retryable` and `action` say what to do.",
        "content": {"application/problem+json": {"schema": {"$ref": f"{_SCHEMAS}Problem"}}},
    }
    return {
        "operationId": op.replace(".", "_"),
        "summary": _prose(summary),
        "description": _prose(f"{rest} The body may have {MAX_BODY_BYTES} bytes."),
        "parameters": [request_id],
        "security": [{}, {"run": []}],
        "requestBody": {"required": True, "content": _json({"$ref": f"{_SCHEMAS}{body.__name__}"})},
        "responses": {
            "200": {"description": "Committed.", "content": _json({"$ref": f"{_SCHEMAS}{answer.__name__}"})},
            **_problems(*_OF_A_RUN, "payload-too-large", "busy"),
            "default": gateway,
        },
    }


def _get(summary: str, ok: Json, *problems: str, security: str = "", parameters: list[Json] | None = None) -> Json:
    return {
        "get": {
            "summary": summary,
            "parameters": parameters or [],
            "security": [{}, {security: []}] if security else [{}],
            "responses": {**ok, **_problems(*problems)},
        }
    }


def _other_paths() -> Json:
    timeout = {
        "name": "timeout",
        "in": "query",
        "description": "Seconds to wait at most; without it there is no limit.",
        "schema": {"type": "number", "minimum": 0},
    }
    fetch = {
        "name": "fetch",
        "in": "query",
        "description": "`true`: this agent fetches what is too large to come with the run (`POST /v1/fetch`). Without it everything comes "
        "whole; a run that is too large for that is not given to this pod.",
        "schema": {"type": "boolean", "default": False},
    }
    nothing = {"204": {"description": "The timeout has passed."}}
    events = (
        "Server-sent events: `cancel` {cancel}, `pause` {pause}, `wait` {outcomes}, `signal` {signals}, `lost` {reason}. A cancel or "
        "a pause that is already asked for comes first. While it is open the agent counts as alive."
    )
    session = (
        'A WebSocket of JSON text. From the agent: {"id","req","body"}, body being any operation with its `op`; {"pong"}. To the agent: '
        '{"id","answer"} or {"id","problem"}; {"push": Poke}; {"lost": reason}; {"ping"}, to be answered by {"pong"} with the same number. '
        "An agent that closes it before its run has finished or suspended counts as gone."
    )
    text: Json = {"schema": {"type": "string"}}
    secret = {"type": "object", "properties": {"secret": {"type": "string"}}, "required": ["secret"]}
    retiring = {"type": "object", "properties": {"retiring": {"type": "boolean"}}, "required": ["retiring"]}
    run = {"200": {"description": "The run that this pod holds.", "content": _json({"$ref": f"{_SCHEMAS}RunContext"})}}
    return {
        "/v1/run": _get("Waits until this pod holds a run", {**run, **nothing}, *_OF_A_RUN, security="run", parameters=[timeout, fetch]),
        "/v1/stream": _get(
            "What happens to the run, as it happens",
            {"200": {"description": events, "content": {"text/event-stream": text}}},
            "unauthorized",
            security="run",
        ),
        "/v1/session": _get("The agent's WebSocket", {"101": {"description": session}}, "unauthorized", security="run", parameters=[fetch]),
        "/v1/next": _get(
            "Fork per run, unix socket only: waits until this pod holds a run that no process has been made for",
            {"200": {"description": "What the process of the run has to show as a bearer token.", "content": _json(secret)}, **nothing},
            "parent-only",
            "retiring",
            security="parent",
            parameters=[timeout, fetch],
        ),
        "/v1/idle": {
            "post": {
                "summary": "Fork per run, unix socket only: the process of the last run has ended",
                "security": [{}, {"parent": []}],
                "requestBody": {"required": True, "content": _json({"$ref": f"{_SCHEMAS}ChildEnded"})},
                "responses": {
                    "200": {"description": "Taken. `retiring`: this pod gets no more runs.", "content": _json(retiring)},
                    **_problems("parent-only"),
                },
            }
        },
        "/healthz": _get("This process is up", {"200": {"description": "Its state.", "content": _json({"type": "object"})}}),
        "/metrics": _get("Figures", {"200": {"description": "Prometheus text.", "content": {"text/plain": text}}}),
        "/openapi.json": _get("This document", {"200": {"description": "OpenAPI 3.1.", "content": _json({"type": "object"})}}),
    }
