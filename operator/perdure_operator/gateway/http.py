"""What all routes of the public API share: authentication, strict bodies, problem JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
from aiohttp import web

from perdure import protocol as wire
from perdure_operator.domain.errors import InvalidInput, PayloadTooLarge, PerdureError, Unauthenticated
from perdure_operator.domain.payload import MAX_BYTES, check_json
from perdure_operator.gateway.auth import Authenticator, Person
from perdure_operator.gateway.translate import problem

log = structlog.get_logger(__name__)
AUTHENTICATOR = web.AppKey("authenticator", Authenticator)
ENDING = web.AppKey("ending", asyncio.Event)
"""Set when this process has been told to end: whoever is connected for long is sent to another gateway."""
MAX_BODY = MAX_BYTES * 4
"""A batch of runs may be larger than one value."""


def reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=wire.encode_json(value), status=status, content_type="application/json")


def problem_reply(error: PerdureError) -> web.Response:
    body = problem(error)
    headers = {"WWW-Authenticate": "Bearer"} if body.status == 401 else {}
    return web.Response(body=wire.encode_json(body), status=body.status, content_type="application/problem+json", headers=headers)


def bearer(request: web.Request) -> str:
    """Raises Unauthenticated."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("send the header Authorization: Bearer <token>")
    return token


async def authorize(request: web.Request, verb: str) -> Person:
    """The person behind the request, who may do ``verb`` in the namespace of the path. Raises Unauthenticated or Forbidden."""
    info = request.match_info
    one = info.get("run") or info.get("trigger")
    return await request.app[AUTHENTICATOR].person(bearer(request), verb=verb, namespace=info.get("ns", "-"), run=one)


async def body(request: web.Request, what: str = "the body", *, limit: int = MAX_BYTES) -> tuple[bytes, Any]:
    """The strict JSON body, as bytes and decoded; an empty one is null. Raises InvalidInput or PayloadTooLarge."""
    if request.content_length is not None and request.content_length > limit:
        raise PayloadTooLarge(f"{what} has {request.content_length} bytes; at most {limit} are allowed")
    chunks, size = [], 0
    async for chunk in request.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > limit:
            raise PayloadTooLarge(f"{what} has more than {limit} bytes")
        chunks.append(chunk)
    raw = b"".join(chunks) or b"null"
    return raw, check_json(raw, what, limit=limit)


def integer(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """A bounded query parameter. Raises InvalidInput."""
    text = request.query.get(name)
    return default if text is None else whole(text, name, low, high)


def whole(text: str, name: str, low: int, high: int) -> int:
    """A bounded number. Raises InvalidInput."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidInput(f"{name} must be a whole number from {low} to {high}, not {text[:40]!r}")
    return value


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _check_head(request: web.Request) -> None:
    """What may reach the store from outside the body: text without NUL. Headers come with what was not UTF-8 as lone surrogates. And the
    body is what was sent: nothing here unpacks it."""
    for text in (request.path, *request.query.values(), request.headers.get("Idempotency-Key", "")):
        try:
            if b"\x00" in text.encode():
                raise InvalidInput("the path, the query or the Idempotency-Key holds a NUL character")
        except UnicodeEncodeError as error:
            raise InvalidInput("the Idempotency-Key is not UTF-8") from error
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidInput("send the body uncompressed, without a Content-Encoding")


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves as problem JSON; what is not typed is logged and told as ``internal`` without its text."""
    try:
        _check_head(request)
        return await handler(request)
    except PerdureError as error:
        return problem_reply(error)
    except msgspec.ValidationError as error:
        return problem_reply(InvalidInput(str(error)))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kind = type(
            "HttpError", (PerdureError,), {"code": error.reason.lower().replace(" ", "-"), "status": error.status, "__doc__": error.reason}
        )
        return problem_reply(kind(f"{request.method} {request.path}: {error.reason}", action="See /openapi.json for what there is."))
    except Exception:
        log.exception("request failed", path=request.path)
        return problem_reply(PerdureError("the gateway failed to handle this request"))
