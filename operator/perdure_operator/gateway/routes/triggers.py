"""Ways in for firings that no calendar makes: a webhook, a person's wish. Each returns after one durable insert; what becomes of it is the
router's. And what became of them: a trigger's deliveries, and the dead ones sent on again.

Who sends to a webhook has no account here: the signature or the token in the trigger's Secret is all that speaks for the request, and
nothing is stored, or even read as JSON, before it was compared.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from uuid import UUID

from aiohttp import web

from perdure_operator.domain.errors import InvalidInput, PayloadTooLarge, TriggerNotFound, Unauthenticated, Unavailable
from perdure_operator.domain.ids import uuid7
from perdure_operator.domain.payload import MAX_BYTES, check_json
from perdure_operator.domain.trigger import DeliveryState, Firing, Source, event_key
from perdure_operator.gateway.http import authorize, bearer, body, integer, reply
from perdure_operator.gateway.secrets import SecretReader
from perdure_operator.kube.api.trigger import SecretKey, Webhook
from perdure_operator.services.trigger_plan import parse_spec
from perdure_operator.store.triggers import Triggers

SIGNATURE_HEADER = "X-Hub-Signature-256"
ID_HEADER = "Idempotency-Key"
MAX_ID_CHARS = 253


class Unproven(Unauthenticated):
    """The request does not prove that its sender knows the webhook's secret."""

    action = "Compare secret and signature; nothing was stored."


class TriggerRoutes:
    """``emitted``: a delivery waits for a router."""

    def __init__(self, triggers: Triggers, secrets: SecretReader, emitted: Callable[[], None]) -> None:
        self._triggers, self._secrets, self._emitted = triggers, secrets, emitted

    def routes(self) -> list[web.RouteDef]:
        base = "/v1/namespaces/{ns}/triggers/{trigger}"
        return [
            web.post("/v1/hooks/{ns}/{trigger}", self.hook),
            web.post(base + "/emit", self.emit),
            web.get(base + "/deliveries", self.deliveries),
            web.post(base + "/deliveries/{id}/redrive", self.redrive),
        ]

    async def hook(self, request: web.Request) -> web.Response:
        namespace, key = request.match_info["ns"], _key(request)
        raw = await _raw(request)
        row = await self._triggers.get(key)
        webhook = parse_spec(row.spec).source.webhook if row is not None and not row.deleted else None
        if webhook is None:
            raise TriggerNotFound(f"there is no webhook {key}")
        await self._authenticate(request, namespace, webhook, raw)
        if raw:
            check_json(raw, "the body")
        return await self._emit(key, Source.WEBHOOK, request.headers.get(webhook.id_header or ID_HEADER), raw or None)

    async def emit(self, request: web.Request) -> web.Response:
        person = await authorize(request, "emit")
        raw, content = await body(request, "the payload")
        payload = raw if content is not None else None
        return await self._emit(_key(request), Source.MANUAL, request.headers.get(ID_HEADER), payload, by=person.name)

    async def deliveries(self, request: web.Request) -> web.Response:
        await authorize(request, "deliveries")
        state = request.query.get("state")
        if state is not None and state not in set(DeliveryState):
            raise InvalidInput(f"state must be one of {', '.join(DeliveryState)}, not {state!r}")
        before, limit = request.query.get("before"), integer(request, "limit", 100, 1, 1000)
        key = _key(request)
        found = await self._triggers.deliveries(key, state=state, before=_uuid(before) if before else None, limit=limit)
        if not found and await self._triggers.get(key) is None:
            raise TriggerNotFound(f"there is no Trigger {key}")
        return reply({"items": found, "next": found[-1].delivery_id if len(found) == limit else None})

    async def redrive(self, request: web.Request) -> web.Response:
        await authorize(request, "emit")
        delivery = _uuid(request.match_info["id"])
        await self._triggers.redrive(_key(request), delivery)
        self._emitted()
        return reply({"delivery": delivery}, 202)

    # ---------------------------------------------------------------------------------------------------------- joints

    async def _emit(self, key: str, source: Source, id: str | None, payload: bytes | None, *, by: str = "") -> web.Response:
        """``id``: the sender's name for this firing; the same one again is the same firing."""
        if id is not None and not _is_id(id):
            raise InvalidInput(f"the id of a delivery has 1 to {MAX_ID_CHARS} printable ASCII characters")
        delivery = uuid7()
        stored = await self._triggers.emit(
            Firing(key, source, event_key(source, key, id or str(delivery)), payload=payload, by=by), delivery
        )
        self._emitted()
        return reply({"delivery": stored.delivery, "duplicate": stored.duplicate}, 202)

    async def _authenticate(self, request: web.Request, namespace: str, webhook: Webhook, raw: bytes) -> None:
        """Raises Unproven, Unauthenticated without a token where one is wanted, or Unavailable when there is no secret to compare with."""
        if (signed := webhook.auth.hmac) is not None:
            secret = await self._secret(namespace, signed.secret_ref)
            given = request.headers.get(signed.header or SIGNATURE_HEADER, "").removeprefix("sha256=").lower()
            wanted = hmac.new(secret, raw, hashlib.sha256).hexdigest()
        elif (shown := webhook.auth.bearer) is not None:
            wanted = (await self._secret(namespace, shown.secret_ref)).decode(errors="surrogateescape").strip()
            given = bearer(request)
        else:
            raise AssertionError("the model has one of them")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), wanted.encode(errors="surrogateescape")):
            raise Unproven("the request is not signed with this webhook's secret")

    async def _secret(self, namespace: str, reference: SecretKey) -> bytes:
        found = await self._secrets.get(namespace, reference.name, reference.key)
        if not found:
            raise Unavailable(
                f"key {reference.key} of Secret {namespace}/{reference.name} cannot be read or is empty",
                action="Create the Secret, let the gateway read it, and send the request again; nothing was stored.",
            )
        return found


def _key(request: web.Request) -> str:
    return f"{request.match_info['ns']}/{request.match_info['trigger']}"


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidInput(f"the id of a delivery is a UUID, not {text[:60]!r}") from None


def _is_id(text: str) -> bool:
    return 1 <= len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable()


async def _raw(request: web.Request) -> bytes:
    """The bytes that were signed. Raises PayloadTooLarge."""
    chunks, size = [], 0
    async for chunk in request.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > MAX_BYTES:
            raise PayloadTooLarge(f"the body has more than {MAX_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
