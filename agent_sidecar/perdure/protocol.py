"""The wire between an agent, its sidecar and the gateway: one set of models for both hops.

Agent to sidecar is JSON (HTTP, or a WebSocket for the SDK); sidecar to gateway is one msgpack WebSocket a pod.
The sidecar does not understand operations. It puts the agent's JSON body, untouched, into an :class:`Op` frame that adds
the fence (run, epoch; the holder is the pod that the connection was authenticated as) and hands the JSON answer back.
So a body below is at once the loopback API and the pod API, and a new operation needs no change to the sidecar.

JSON names are camelCase. ``Raw`` fields are a JSON value as its own bytes: never decoded between the agent and the store.
Times are RFC 3339 in UTC, durations are seconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

PROTOCOL_VERSION = 1

MAX_PAYLOAD_BYTES = 2_000_000
"""Largest single JSON value (output, input, signal payload, slice chunk)."""

MAX_PAYLOAD_DEPTH = 200
"""Deepest nesting of one JSON value."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest WebSocket frame."""

NULL = Raw(b"null")

Key = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=253)]


class Body(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything that travels as JSON. Unknown fields are refused: a typo must not be lost in silence."""


# ---------------------------------------------------------------------------------------------------- shared pieces


class ErrorInfo(Body, kw_only=True):
    """Why a step, an activity or a run failed."""

    type: Annotated[str, Meta(max_length=200)]
    message: Annotated[str, Meta(max_length=20_000)] = ""
    retryable: bool = True


class Slice(Body, kw_only=True):
    """One named, typed piece of the session. ``append`` adds ``value`` (a JSON array) as one more chunk of an append-only slice."""

    name: Name
    value: Raw
    version: int = 1
    append: bool = False


class Condition(Body, kw_only=True):
    """One thing that a wait waits for.

    ``timer``: ``seconds`` from the first registration, or an absolute ``at``. ``signal``: ``name`` is the signal's name.
    ``child_done``: ``name`` is the child's run id.
    """

    kind: Literal["timer", "signal", "child_done"]
    name: Annotated[str, Meta(max_length=253)] = ""
    seconds: Annotated[float, Meta(ge=0)] | None = None
    at: str | None = None


# ------------------------------------------------------------------------------------------------------- questions


class PersonAnswer(Body, kw_only=True):
    """What became of an UNKNOWN effect, by a person: the payload of the signal that :func:`question` names. ``response``: what the call
    would have returned."""

    happened: bool
    response: Raw = NULL
    provider_ref: str | None = None


QUESTIONS = "effect:"
"""What the names of signals that answer begin with."""
_QUESTION = re.compile(QUESTIONS + r"([0-9a-f]{64}):[0-9]{1,9}")


def question(key: str, attempt: int) -> str:
    """The signal that answers what became of one execution of an effect: a second doubt needs a second answer."""
    return f"{QUESTIONS}{key}:{attempt}"


def asked_about(signal: str) -> str | None:
    """Key of the effect that this signal is an answer about, None if it is a signal of the agent's own."""
    found = _QUESTION.fullmatch(signal)
    return found[1] if found else None


# ------------------------------------------------------------------------------------- operations: bodies and answers


class StepBegin(Body, tag="step.begin", tag_field="op", kw_only=True):
    """For clients without a journal of their own (shell): is this step done? Writes nothing. Answer: :class:`StepDecision`."""

    name: Name
    key: Key | None = None
    fingerprint: str | None = None


class StepDecision(Body, kw_only=True):
    decision: Literal["execute", "done", "failed"]
    key: str
    output: Raw | UnsetType = UNSET
    error: ErrorInfo | None = None


class StepEnd(Body, tag="step.end", tag_field="op", kw_only=True):
    """Journals the outcome of a step, with the dirty slices, in one commit (C6). Answer: :class:`Recorded`.

    ``key`` is the redo identity (E9): ``{scope}/{kind}:{name}#{ordinal}``, or ``{scope}/{kind}:{name}={key}`` when the
    author chose a key; no scope, no slash. The first outcome recorded under a key stays.
    """

    key: Key
    name: Name
    state: Literal["succeeded", "failed", "skipped"] = "succeeded"
    fingerprint: str | None = None
    phase: str | None = None
    attempts: int = 1
    output: Raw = NULL
    error: ErrorInfo | None = None
    slices: list[Slice] = []


class EventAppend(Body, tag="event", tag_field="op", kw_only=True):
    """Appends a custom event to the log. ``expectedSeq``: refuse unless it is the log's last sequence. Answer: :class:`Recorded`."""

    kind: Annotated[str, Meta(min_length=1, max_length=100)]
    data: Raw = NULL
    expected_seq: int | None = None


class CheckpointSave(Body, tag="checkpoint", tag_field="op", kw_only=True):
    """Saves the dirty slices and marks a point to resume from (C5). ``coversSeq``: the last sequence that the client had seen
    when it took the snapshot. Answer: :class:`Recorded`."""

    type: Literal["step", "phase", "pre_side_effect"] = "step"
    cursor: Raw = NULL
    covers_seq: int = 0
    slices: list[Slice] = []


class Recorded(Body, kw_only=True):
    """The operation is committed at log sequence ``seq``. ``existing``: an outcome was already recorded under that key and stays."""

    seq: int
    existing: bool = False


class ActivityBegin(Body, tag="activity.begin", tag_field="op", kw_only=True):
    """Commits the intent to call a tool with an effect; answers what to do. Answer: :class:`ActivityDecision`.

    The gateway computes class (E2) and key (E3). ``scope`` names the arguments that are the tool's identity; without it all
    arguments but ``ignore`` are. ``scopeIsIdentity``: the same scope with other arguments is the same effect, not a conflict.
    """

    tool: Name
    arguments: Raw = NULL
    effect: Literal["external", "memory", "local", "read_only"] | None = None
    scope: list[str] | None = None
    scope_is_identity: bool = False
    ignore: list[str] = []
    namespace: str = ""
    occurrence: Annotated[int, Meta(ge=0)] = 0
    step: str | None = None
    on_unknown: Literal["query", "retry-same-key", "ask", "fail", "assume-not-done"] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0)] = 300
    max_retries: Annotated[int, Meta(ge=0, le=100)] | None = None


class ActivityDecision(Body, kw_only=True):
    """``execute``: call the tool now, with ``key`` as its idempotency key, and close ``token``. ``retry``: the same, an earlier attempt
    was proven not executed; wait ``retryAfterSeconds`` first. ``receipt``: it has happened, here is the response; with ``error`` there
    is none, for that reason. ``busy``: another
    call under this key is open. ``unknown``: nobody knows whether it happened; follow ``policy`` (``query``: ask the provider by key,
    then ``activity.resolve``; with ``retryAfterSeconds`` set the old executor may still act: begin again after it; ``ask``, which also is
    the answer where nothing proves that the old executor is gone: wait for
    the signal ``effect:{key}:{attempt}``, whose payload is a person's answer, then ``activity.resolve`` with it and ``by`` person).
    ``conflict``: same key, other arguments. ``failed``: retries are used up. ``denied``: policy forbids it."""

    decision: Literal["execute", "retry", "receipt", "busy", "unknown", "conflict", "failed", "denied"]
    key: str
    token: str | None = None
    attempt: int = 1
    effect: str = "external"
    policy: str | None = None
    retry_after_seconds: float = 0
    response: Raw | UnsetType = UNSET
    provider_ref: str | None = None
    error: ErrorInfo | None = None
    message: str = ""


class ActivityEnd(Body, tag="activity.end", tag_field="op", kw_only=True):
    """Closes an execution token. ``failed`` means *proven not executed*; anything else that is not a success is ``unknown``.
    Accepted under an old epoch as evidence. ``stillRunning``: it was given up, and what was begun may still act; until it
    cannot any more no other execution is granted. ``error`` of a success: why there is no ``response``; it is given with the receipt.
    Answer: :class:`ActivityRecorded`."""

    key: Key
    token: str
    state: Literal["succeeded", "failed", "unknown", "cancelled"]
    still_running: bool = False
    response: Raw = NULL
    provider_ref: Annotated[str, Meta(max_length=1000)] | None = None
    error: ErrorInfo | None = None
    slices: list[Slice] = []


class ActivityRecorded(Body, kw_only=True):
    """``state`` is the entry's state after the call. ``evidence``: it came under an old epoch and was taken as evidence only."""

    state: str
    seq: int = 0
    evidence: bool = False


class ActivityResolve(Body, tag="activity.resolve", tag_field="op", kw_only=True):
    """The answer of the provider, or of a person, about an UNKNOWN entry. Not found does not permit a second execution before it is proven
    that the old executor is gone; that a person says no is a decision, and does. ``by``: whose answer it is, as the worker says. Answer:
    :class:`ActivityDecision`."""

    key: Key
    happened: bool
    by: Literal["query", "person"] = "query"
    response: Raw = NULL
    provider_ref: str | None = None


class Abandoned(Body, kw_only=True):
    """A wait that the agent has stopped awaiting, after ``seconds``, without having taken an outcome."""

    key: Key
    seconds: Annotated[float, Meta(ge=0)] = 0


class WaitBegin(Body, tag="wait", tag_field="op", kw_only=True):
    """Registers a wait; with ``suspend`` also gives the pod back if nothing has satisfied it. Answer: :class:`WaitAnswer`.

    With ``suspend`` it is refused with ``effect-running``, and not registered, while a call that was begun is not ended.

    ``instead_of``: the key of a wait for the same that was satisfied by what the agent cannot use. The signals of its conditions
    ``dropped`` (positions in ``on``) are used up, its other signals are there again, and this wait goes on with its times.
    ``abandoned``: these take no signal any more, and what they took is there again; one that is registered again listens again. With
    other waits open, register without ``suspend``, then suspend on all of them: what satisfied one of those meanwhile would not be told
    here. ``fingerprint``: of what is waited for; by default of mode and conditions without their times. A known key with another one is
    refused.
    """

    key: Key
    name: str = ""
    mode: Literal["any", "all", "first_failure"] = "any"
    on: Annotated[list[Condition], Meta(min_length=1, max_length=10_000)]
    timeout_seconds: Annotated[float, Meta(ge=0)] | None = None
    suspend: bool = False
    fingerprint: str | None = None
    instead_of: Key | None = None
    dropped: Annotated[list[int], Meta(max_length=10_000)] = []
    abandoned: Annotated[list[Abandoned], Meta(max_length=10_000)] = []
    slices: list[Slice] = []


class Suspend(Body, tag="suspend", tag_field="op", kw_only=True):
    """Every open operation of the run is a wait, ``waits`` are their keys: give the pod back, unless one of them is satisfied by now.
    ``abandoned``: as in :class:`WaitBegin`. Refused with ``effect-running`` while a call that was begun is not ended. Answer:
    :class:`WaitAnswer`."""

    waits: Annotated[list[Key], Meta(min_length=1)]
    abandoned: Annotated[list[Abandoned], Meta(max_length=10_000)] = []
    slices: list[Slice] = []


class Fired(Body, kw_only=True):
    """A condition that came true. ``index`` is its place in the wait's ``on``; a timeout has ``index`` -1 and kind ``timeout``.

    ``payload``: of a signal, what was sent; of ``child_done`` a :class:`ChildResult`; else null. ``id``: the signal's or the child's.
    ``fetch``: the payload is too large to travel here; :class:`Fetch` gives it.
    """

    index: int
    kind: str
    name: str = ""
    id: str = ""
    at: str = ""
    late_seconds: float = 0
    payload: Raw = NULL
    fetch: bool = False


class ChildResult(Body, kw_only=True):
    """How a child run ended. ``status``: Succeeded, Failed or Cancelled; ``reason``: e.g. RetriesExhausted."""

    status: str
    output: Raw = NULL
    error: ErrorInfo | None = None
    reason: str = ""


class WaitOutcome(Body, kw_only=True):
    """The journaled outcome of a wait. It never changes once it is there."""

    status: Literal["satisfied", "timed_out"]
    fired: list[Fired] = []


class WaitAnswer(Body, kw_only=True):
    """``open``: registered, the pod is kept, a ``wait`` push follows. ``suspended``: the run has let the pod go, exit now.
    ``done``: ``outcomes`` maps wait keys to what happened."""

    status: Literal["open", "suspended", "done"]
    outcomes: dict[str, WaitOutcome] = {}


class Spawn(Body, tag="spawn", tag_field="op", kw_only=True):
    """Starts a child run, or finds the one that was started under the same key. ``pool`` empty: the parent's. ``spec`` may hold any
    field of an AgentRun's spec but agent, input and objective. ``recording``: whether the child of a run that has a resource of the
    cluster gets one as well. Answer: :class:`Spawned`."""

    key: Key
    pool: str = ""
    objective: Annotated[str, Meta(max_length=20_000)] = ""
    summary: Annotated[str, Meta(max_length=200)] = ""
    input: Raw = NULL
    spec: dict[str, Any] = {}
    policy: Literal["cancel", "detach", "fail_parent"] = "cancel"
    recording: Literal["Resource", "StoreOnly"] = "Resource"
    fingerprint: str | None = None


class Spawned(Body, kw_only=True):
    child: str
    existing: bool = False


class FiredRef(Body, kw_only=True):
    """What satisfied a wait: the wait's ``key`` and the ``index`` of the condition."""

    key: Key
    index: int


class ChunkRef(Body, kw_only=True):
    """One chunk of a slice."""

    name: Name
    seq: int


class Fetch(Body, tag="fetch", tag_field="op", kw_only=True):
    """Reads what the lease did not carry. Writes nothing. Answer: :class:`Fetched`.

    Exactly one of: ``keys`` of journal entries, for their outputs; ``fired``, for the payloads of what satisfied waits; ``chunks`` of
    slices; ``after``, for the journal's entries whose keys follow this one. Of several as many are answered as fit into one window, the
    first in any case; ask again for the others."""

    keys: Annotated[list[Key], Meta(max_length=1000)] = []
    fired: Annotated[list[FiredRef], Meta(max_length=1000)] = []
    chunks: Annotated[list[ChunkRef], Meta(max_length=1000)] = []
    after: Key | None = None


class Finish(Body, tag="finish", tag_field="op", kw_only=True):
    """Ends the lease for good or for this attempt. Answer: :class:`Finished`.

    From agents: ``succeeded`` (with ``output``), ``failed`` (final), ``retry`` (this attempt failed; L5 decides), ``yielded`` (told to
    end by SIGTERM: the run goes on elsewhere, and no attempt has failed), ``cancelled`` (obeyed a cancel). From the sidecar: ``stalled``,
    ``paused``."""

    outcome: Literal["succeeded", "failed", "retry", "yielded", "cancelled", "stalled", "paused"]
    output: Raw = NULL
    error: ErrorInfo | None = None
    slices: list[Slice] = []


class Finished(Body, kw_only=True):
    """``state``: what the run is now (``Pending`` when it will be tried again)."""

    state: str


Operation = (
    StepBegin
    | StepEnd
    | EventAppend
    | CheckpointSave
    | ActivityBegin
    | ActivityEnd
    | ActivityResolve
    | WaitBegin
    | Suspend
    | Spawn
    | Fetch
    | Finish
)

# Path of each operation on the loopback API: POST /v1/<path>, the body without its "op" field.
OPERATION_PATHS: dict[str, str] = {
    "step.begin": "steps/begin",
    "step.end": "steps/end",
    "event": "events",
    "checkpoint": "checkpoints",
    "activity.begin": "activities/begin",
    "activity.end": "activities/end",
    "activity.resolve": "activities/resolve",
    "wait": "waits",
    "suspend": "suspend",
    "spawn": "children",
    "fetch": "fetch",
    "finish": "finish",
}


# ------------------------------------------------------------------------------------------------ what a lease carries


class JournalEntry(Body, kw_only=True):
    """A durable operation that this run has already begun or done. ``state``: open, succeeded, failed, skipped, satisfied, timed_out,
    abandoned. ``output`` of a wait is its :class:`WaitOutcome`, of an abandoned one the seconds for which it was awaited, of a spawn its
    :class:`Spawned`. ``fetch``: there is an output, and it does not travel here; :class:`Fetch` gives it."""

    key: str
    kind: str
    name: str
    state: str
    seq: int
    fingerprint: str | None = None
    output: Raw = NULL
    error: ErrorInfo | None = None
    fetch: bool = False


class Fetched(Body, kw_only=True):
    """``values``: of the first so many of what was asked for, in that order. Asked for ``after`` a key: ``journal``, the next entries by
    key, and ``more`` if there are others behind them."""

    values: list[Raw] = []
    journal: list[JournalEntry] = []
    more: bool = False


class SliceState(Body, kw_only=True):
    """``chunks``: one value, or for an append-only slice the arrays in order. ``fetch``: sequences of the chunks that follow these and do
    not travel here; :class:`Fetch` gives them."""

    name: str
    version: int
    append: bool
    chunks: list[Raw]
    fetch: list[int] = []


class CheckpointRef(Body, kw_only=True):
    seq: int
    type: str
    cursor: Raw = NULL


class LedgerEntry(Body, kw_only=True):
    """``seq``: of its intent in the log."""

    key: str
    seq: int = 0
    tool: str
    effect: str
    state: str
    occurrence: int
    step: str | None = None
    provider_ref: str | None = None


class Reason(Body, kw_only=True):
    """Why this lease was granted: ``start``, ``signal``, ``timer``, ``timeout``, ``child_done``, ``resume``, ``retry``, ``lost``. Signals
    that no wait has taken yet are listed at every lease; ``omitted``: without its payload, which is large and comes with the wait that
    takes it."""

    kind: str
    name: str = ""
    id: str = ""
    at: str = ""
    late_seconds: float = 0
    payload: Raw = NULL
    omitted: bool = False


class RunContext(Body, kw_only=True):
    """What ``GET /v1/run`` gives: all that an agent needs to go on from where the run is.

    With ``?fetch=true`` large values stay behind and are marked, each at its place, for :class:`Fetch`. So do the journal's entries behind
    the key ``journalAfter`` (an agent needs all before it begins: what it misses it would do again), and ``ledger`` has only effects that
    are not settled; ``ledgerSeq`` is the sequence of the newest intent of all."""

    run_id: str
    namespace: str
    name: str
    pool: str
    epoch: int
    attempt: int
    objective: str
    input: Raw
    spec: Raw
    last_seq: int
    parent: str | None = None
    root: str
    deadline: str | None = None
    cancel_requested: bool = False
    reasons: list[Reason] = []
    journal: list[JournalEntry] = []
    slices: list[SliceState] = []
    checkpoint: CheckpointRef | None = None
    ledger: list[LedgerEntry] = []
    ledger_seq: int = 0
    journal_after: str | None = None


class Poke(Body, kw_only=True):
    """Pushed to a pod that holds a run when something happens to the run: the stream of the loopback API."""

    cancel: bool = False
    pause: bool = False
    outcomes: dict[str, WaitOutcome] = {}
    signals: list[str] = []


# -------------------------------------------------------------------------------------------------------------- errors


class Problem(Struct, rename="camel", omit_defaults=False, kw_only=True):
    """RFC 9457 problem details. ``type`` is ``urn:perdure:<code>``; ``action`` says what to do; a retry helps iff ``retryable``."""

    type: str
    title: str
    status: int
    detail: str
    retryable: bool
    action: str


# ------------------------------------------------------------- frames of the pod WebSocket (msgpack, one frame a message)


class Frame(Struct, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of the msgpack frames; ``t`` tells which."""


class Hello(Frame, tag="hello", kw_only=True):
    """First frame of a pod. ``ready``: its agent has asked for a run; while it is not, the pod is given none, and ``Idle`` follows.
    ``run``/``epoch``: the lease that it believes it holds, if any. ``connection`` grows with every connection of the pod: what is left of
    an earlier one, at whichever gateway, is void. ``fetch``: its agent fetches what is too large to travel with a lease or an outcome;
    to others everything is sent whole, as long as it fits into a frame. ``ended_run``/``ended_epoch``: as ``run``/``epoch`` of the last
    ``Idle``, which may have been lost."""

    protocol: int
    sidecar: str
    reuse: bool = False
    ready: bool = True
    fetch: bool = False
    connection: int = 0
    run: str | None = None
    epoch: int | None = None
    ended_run: str | None = None
    ended_epoch: int | None = None


class Welcome(Frame, tag="welcome", kw_only=True):
    """Answer to hello. A pod that may not serve is told so by ``Retire`` instead."""

    pod: str
    pool: str
    heartbeat_seconds: float
    lease_seconds: float


class Lease(Frame, tag="lease", kw_only=True):
    """The pod holds this run now. ``context`` is a :class:`RunContext` as JSON. Delivered again on reconnect. ``fetch``: something of it
    is to be fetched."""

    run: str
    epoch: int
    context: bytes
    grace_seconds: float = 30
    stall_timeout_seconds: float | None = None
    fetch: bool = False


class Op(Frame, tag="op", kw_only=True):
    """One operation of the held run. ``body`` is JSON with its ``op`` tag; ``req`` a UUID that stays the same on every resend."""

    id: int
    run: str
    epoch: int
    req: str
    body: bytes


class Answer(Frame, tag="answer", kw_only=True):
    id: int
    body: bytes
    released: bool = False
    """True when this answer ended the lease: the pod is idle (reuse) or to end."""


class Refusal(Frame, tag="refusal", kw_only=True):
    id: int
    problem: Problem


class Beat(Frame, tag="beat", kw_only=True):
    """Heartbeat of a held run, or of an idle pod. ``agent``: seconds since the agent's event loop last answered."""

    run: str | None = None
    epoch: int | None = None
    agent: float | None = None
    step: str | None = None


class Idle(Frame, tag="idle", kw_only=True):
    """This pod can take a run: its agent has asked for one, and nothing of the last run is left. ``run``/``epoch``: the lease of which no
    process is left, if there was one and that is certain: what it left unknown cannot happen any more. ``fetch``: as in :class:`Hello`."""

    run: str | None = None
    epoch: int | None = None
    fetch: bool = False


class Push(Frame, tag="push", kw_only=True):
    """``poke`` is a :class:`Poke` as JSON."""

    run: str
    epoch: int
    poke: bytes


class LeaseLost(Frame, tag="lost", kw_only=True):
    """This epoch is over: stop the agent at once. Late receipts may still be sent and are taken as evidence."""

    run: str
    epoch: int
    reason: str


class Retire(Frame, tag="retire", kw_only=True):
    """End now; ``reason`` is for the log."""

    reason: str


FromPod = Hello | Op | Beat | Idle
FromGateway = Welcome | Lease | Answer | Refusal | Push | LeaseLost | Retire

_frame_encoder = msgspec.msgpack.Encoder()
_from_pod: msgspec.msgpack.Decoder[FromPod] = msgspec.msgpack.Decoder(FromPod)
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
_operation: msgspec.json.Decoder[Operation] = msgspec.json.Decoder(Operation)
_json_encoder = msgspec.json.Encoder()


def encode_frame(frame: FromPod | FromGateway) -> bytes:
    return _frame_encoder.encode(frame)


def decode_from_pod(data: bytes) -> FromPod:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _from_pod.decode(data)


def decode_from_gateway(data: bytes) -> FromGateway:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _from_gateway.decode(data)


def decode_operation(data: bytes) -> Operation:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _operation.decode(data)


def encode_json(value: object) -> bytes:
    return _json_encoder.encode(value)
