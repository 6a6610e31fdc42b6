"""Between the wire models (perdure.protocol) and the store's operations.

Everything that an agent sends is checked before the batch: that it is proper JSON throughout when it is decoded (pods.py), that the store
can hold it here.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any
from uuid import UUID, uuid4

import msgspec
from msgspec import Raw
from pydantic import ValidationError

from perdure import protocol as wire
from perdure_operator.domain import idempotency
from perdure_operator.domain.errors import InvalidInput, PayloadTooLarge, PerdureError
from perdure_operator.domain.ids import uuid7
from perdure_operator.gateway.pools import Pools
from perdure_operator.kube.api.problems import in_words
from perdure_operator.kube.api.v1alpha1 import AgentRunSpec
from perdure_operator.services.submission import Parent, child_name, new_run, require_pool
from perdure_operator.store.operations import Control, Fence, JournalStep, Operation, SliceWrite
from perdure_operator.store.payload import Payloads


@dataclass(frozen=True, slots=True)
class Held:
    """The run that a pod holds, as far as translating its operations needs it."""

    run: UUID
    run_id: str
    namespace: str
    name: str
    pool: str
    fence: Fence
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Denied:
    """An activity that policy forbids: answered without touching the store."""

    answer: wire.ActivityDecision


_Instant = Annotated[datetime, msgspec.Meta(tz=True)]
MAX_INT = 2**31 - 1
MAX_SEQUENCE = 2**62
MAX_SECONDS = 100 * 365 * 86_400.0
MAX_KEY_BYTES = 2_000
"""Of a redo identity: what fits into an index of the store."""


def _raw(value: Raw, what: str) -> bytes:
    raw = bytes(value)
    if len(raw) > wire.MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(f"{what} has {len(raw)} bytes; at most {wire.MAX_PAYLOAD_BYTES} are allowed")
    return raw


def _slices(pieces: list[wire.Slice]) -> tuple[SliceWrite, ...]:
    names = [piece.name for piece in pieces]
    if len(set(names)) < len(names):
        raise InvalidInput("a slice stands twice in one operation")
    written = []
    for piece in pieces:
        raw = _raw(piece.value, f"slice {piece.name}")
        if piece.append and not raw.startswith(b"["):
            raise InvalidInput(f"slice {piece.name}: what is appended must be an array")
        written.append(SliceWrite(piece.name, raw, _whole(piece.version, "version"), piece.append))
    return tuple(written)


def _key(key: str) -> str:
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidInput(f"a key has at most {MAX_KEY_BYTES} bytes")
    return key


def _whole(value: int, what: str, high: int = MAX_INT) -> int:
    if not 0 <= value <= high:
        raise InvalidInput(f"{what} must be from 0 to {high}")
    return value


def _sequence(value: int | None) -> int | None:
    return _whole(value, "expectedSeq", MAX_SEQUENCE) if value is not None else None


def _seconds(value: float | None, what: str) -> float | None:
    if value is not None and value > MAX_SECONDS:
        raise InvalidInput(f"{what} must be at most {MAX_SECONDS:.0f}, which is a hundred years")
    return value


def _error(error: wire.ErrorInfo | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"type": error.type, "message": error.message, "retryable": error.retryable}


def _step(held: Held, request: UUID, body: wire.StepEnd) -> JournalStep:
    error = _error(body.error)
    return JournalStep(
        run=held.run,
        fence=held.fence,
        request=request,
        key=_key(body.key),
        name=body.name,
        state=body.state,
        output=_raw(body.output, "output"),
        fingerprint=body.fingerprint,
        phase=body.phase,
        attempts=_whole(body.attempts, "attempts"),
        error=msgspec.json.encode(error).decode() if error else None,
        slices=_slices(body.slices) if body.slices else (),
    )


def _activity(held: Held, pools: Pools, body: wire.ActivityBegin, lease_seconds: float) -> dict[str, Any] | Denied:
    constraints = held.spec.get("constraints") or {}
    allowed, forbidden = constraints.get("allowedTools") or [], constraints.get("forbiddenTools") or []
    call = idempotency.Call(
        tool=body.tool,
        arguments=msgspec.json.decode(_raw(body.arguments, "arguments")),
        declared=idempotency.EffectClass(body.effect) if body.effect else None,
        scope=tuple(body.scope) if body.scope is not None else None,
        ignore=frozenset(body.ignore),
        namespace=body.namespace,
        occurrence=body.occurrence,
    )
    policy = pools.tool(held.pool, body.tool)
    key = idempotency.key(held.run, call, policy)
    if body.tool in forbidden or (allowed and body.tool not in allowed):
        return Denied(wire.ActivityDecision(decision="denied", key=key, message=f"spec.constraints does not allow the tool {body.tool}"))
    effect = idempotency.classify(call, policy, frozenset(constraints.get("sideEffectTools") or []))
    on_unknown = (policy.on_unknown if policy else None) or body.on_unknown or idempotency.DEFAULT_POLICY[effect]
    return {
        "key": key,
        "tool": body.tool,
        "effect": effect,
        "policy": on_unknown,
        "fingerprint": idempotency.fingerprint(call),
        "scopeIsIdentity": body.scope_is_identity,
        "occurrence": _whole(body.occurrence, "occurrence"),
        "step": body.step,
        "token": uuid4(),
        "timeoutSeconds": _seconds(body.timeout_seconds, "timeoutSeconds"),
        "leaseSeconds": lease_seconds,
        "maxRetries": body.max_retries,
    }


def _spawn(held: Held, pools: Pools, body: wire.Spawn) -> Control:
    parent = Parent(held.run, held.name, body.policy)
    pool = body.pool or held.pool.partition("/")[2]
    reserved = {"agent", "input", "objective", "summary"} & body.spec.keys()
    if reserved:
        raise InvalidInput(f"spec must not hold {', '.join(sorted(reserved))}: these are fields of the spawn itself")
    try:
        spec = AgentRunSpec.model_validate(
            {**body.spec, "agent": {"poolRef": {"name": pool}}, "objective": body.objective or None, "summary": body.summary or None},
            by_alias=True,
            by_name=False,
        )
    except ValidationError as error:
        raise InvalidInput(in_words(error, AgentRunSpec, under=("spec",))) from error
    child = new_run(
        uuid7(),
        held.namespace,
        child_name(parent, body.key),
        spec,
        require_pool(pools.specs, held.namespace, pool),
        input_json=_raw(body.input, "input"),
        parent_policy=body.policy,
    )
    return Control(
        held.run,
        "spawn",
        {"key": _key(body.key), "fingerprint": body.fingerprint, "recording": body.recording, "run": child.columns},
        held.fence,
        payload=child.input,
        payload_run=child.run_id,
    )


def operation(held: Held, request: UUID, body: wire.Operation, pools: Pools, lease_seconds: float) -> Operation | Denied:
    """The store's form of a worker's operation. Raises InvalidInput, PayloadTooLarge or PoolNotFound; then nothing is stored."""
    if isinstance(body, wire.StepEnd):
        return _step(held, request, body)
    kind = str(body.__struct_config__.tag)
    content: dict[str, Any]
    payload: bytes | None = None
    pieces: list[wire.Slice] = getattr(body, "slices", [])
    if isinstance(body, wire.Spawn):
        spawn = _spawn(held, pools, body)
        return Control(spawn.run, spawn.kind, spawn.body, spawn.fence, request, spawn.payload, spawn.payload_run)
    if isinstance(body, wire.ActivityBegin):
        begun = _activity(held, pools, body, lease_seconds)
        if isinstance(begun, Denied):
            return begun
        content, payload = begun, bytes(body.arguments)
    elif isinstance(body, wire.ActivityEnd | wire.ActivityResolve):
        content = {"key": body.key, "providerRef": body.provider_ref}
        payload = _raw(body.response, "response")
        if isinstance(body, wire.ActivityEnd):
            content |= {"token": _uuid(body.token, "token"), "state": body.state, "error": _error(body.error)}
            content |= {"stillRunning": True} if body.still_running else {}
        else:
            content |= {"happened": body.happened, "by": body.by, "token": uuid4(), "leaseSeconds": lease_seconds}
    elif isinstance(body, wire.WaitBegin):
        content = _wait(body)
    elif isinstance(body, wire.Suspend):
        content = {"waits": body.waits, "abandoned": msgspec.to_builtins(body.abandoned)}
    elif isinstance(body, wire.EventAppend):
        content, payload = (
            {
                "kind": body.kind,
                "expectedSeq": _whole(body.expected_seq or 0, "expectedSeq", MAX_SEQUENCE) if body.expected_seq is not None else None,
            },
            _raw(body.data, "data"),
        )
    elif isinstance(body, wire.CheckpointSave):
        content, payload = {"type": body.type, "coversSeq": _whole(body.covers_seq, "coversSeq", MAX_SEQUENCE)}, _raw(body.cursor, "cursor")
    elif isinstance(body, wire.Finish):
        content, payload = {"outcome": body.outcome, "error": _error(body.error)}, _raw(body.output, "output")
    else:
        raise InvalidInput(f"{kind} is answered without the store")
    return Control(held.run, kind, content, held.fence, request, payload, slices=_slices(pieces) if pieces else ())


def _uuid(value: str, what: str) -> UUID:
    try:
        return UUID(value)
    except ValueError:
        raise InvalidInput(f"{what} is not a UUID") from None


def _wait(body: wire.WaitBegin) -> dict[str, Any]:
    for condition in body.on:
        if condition.kind == "timer" and (condition.seconds is None) == (condition.at is None):
            raise InvalidInput("a timer needs exactly one of seconds and at")
        if condition.kind != "timer" and not condition.name:
            raise InvalidInput(f"a {condition.kind} condition needs a name")
        if condition.kind == "child_done":
            condition.name = str(_uuid(condition.name, "the name of a child_done condition, the child's run id,"))
        if condition.at is not None:
            condition.at = _instant(condition.at)
        _seconds(condition.seconds, "seconds")
    if body.dropped and body.instead_of is None:
        raise InvalidInput("what is dropped was taken by another wait: name it in insteadOf")
    content: dict[str, Any] = msgspec.to_builtins(body)
    return {
        "key": _key(body.key),
        "name": body.name,
        "mode": body.mode,
        "on": content["on"],
        "timeoutSeconds": _seconds(body.timeout_seconds, "timeoutSeconds"),
        "suspend": body.suspend,
        "fingerprint": body.fingerprint or _conditions(body),
        "insteadOf": None if body.instead_of is None else _key(body.instead_of),
        "dropped": body.dropped,
        "abandoned": msgspec.to_builtins(body.abandoned),
    }


def _conditions(body: wire.WaitBegin) -> str:
    """Of a wait whose agent sends no fingerprint: what it waits for. Not until when, which an agent may work out anew at each attempt."""
    known = msgspec.json.encode([body.mode, [(condition.kind, condition.name) for condition in body.on]])
    return sha256(known).hexdigest()[:16]


def _instant(text: str) -> str:
    """In UTC: Postgres does not know every offset that RFC 3339 allows."""
    try:
        return msgspec.convert(text, type=_Instant).astimezone(UTC).isoformat()
    except (msgspec.ValidationError, OverflowError):
        raise InvalidInput(f"{text!r} is not an RFC 3339 time") from None


# ---------------------------------------------------------------------------------------------------------- answers


def stored(answer: dict[str, Any]) -> list[bytes | None]:
    """The payloads in stored form that an answer refers to."""
    found: list[bytes | None] = []
    if response := answer.get("response"):
        found.append(b64decode(response))
    for outcome in answer.get("outcomes", {}).values():
        found += [b64decode(fired["payload"]) for fired in outcome["fired"] if fired.get("payload")]
    return found


def fired_payload(kind: str, data: dict[str, Any] | None, payload: bytes) -> bytes:
    """What an agent gets for a condition that came true."""
    if kind != "child_done":
        return payload
    data = data or {}
    error = data.get("error")
    info = (
        wire.ErrorInfo(type=error.get("type", ""), message=error.get("message", ""), retryable=error.get("retryable", True))
        if error
        else None
    )
    return wire.encode_json(
        wire.ChildResult(status=data.get("status", ""), output=Raw(payload), error=info, reason=data.get("reason") or "")
    )


def outcome(raw: dict[str, Any], payloads: Payloads) -> wire.WaitOutcome:
    """A wait's outcome from the store's form of it. Payloads that were not loaded are to be fetched."""
    fired = []
    for f in raw["fired"]:
        stored = b64decode(f["payload"]) if f.get("payload") else None
        here = payloads.here(stored)
        payload = fired_payload(f["kind"], f.get("data"), payloads.get(stored)) if here else b"null"
        fired.append(
            wire.Fired(
                index=f["index"],
                kind=f["kind"],
                name=f.get("name", ""),
                id=f.get("id", ""),
                at=f.get("at", ""),
                late_seconds=max(0.0, f.get("lateSeconds", 0)),
                payload=Raw(payload),
                fetch=not here,
            )
        )
    return wire.WaitOutcome(status=raw["status"], fired=fired)


def answer(kind: str, content: dict[str, Any], payloads: Payloads | None) -> bytes:
    """The wire form of a control operation's answer."""
    if kind in ("wait", "suspend"):
        outcomes = {key: outcome(raw, payloads) for key, raw in content.get("outcomes", {}).items()} if payloads else {}
        return wire.encode_json(wire.WaitAnswer(status=content["status"], outcomes=outcomes))
    if kind in ("activity.begin", "activity.resolve"):
        content = {name: value for name, value in content.items() if value is not None and name != "response"} | (
            {"response": Raw(payloads.get(b64decode(content["response"])))} if payloads and content.get("response") else {}
        )
    return wire.encode_json(content)


def problem(error: PerdureError) -> wire.Problem:
    """RFC 9457 form of a typed error."""
    return wire.Problem(
        type=f"urn:perdure:{error.code}",
        title=(type(error).__doc__ or error.code).splitlines()[0],
        status=error.status,
        detail=str(error),
        retryable=error.retryable,
        action=error.advice,
    )
