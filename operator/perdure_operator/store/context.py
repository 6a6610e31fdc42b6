"""What a lease delivers: the run, its journal, session, checkpoint and ledger, as the next worker needs them.

Read after the lease was committed, in one statement: from then on only other parties' effects (signals, cancels) can come on top, and
those are pushed.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
from msgspec import Raw, Struct
from msgspec.json import decode

from perdure_operator.domain.errors import CorruptPayload, RunNotFound
from perdure_operator.store.payload import Payloads

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy


class RunRow(Struct, frozen=True):
    """``deadline``: RFC 3339, the nearest of the run's time limits. ``reasons``: why this lease was granted."""

    run_id: UUID
    namespace: str
    name: str
    pool: str
    epoch: int
    attempt: int
    last_seq: int
    parent_id: UUID | None
    root_id: UUID
    cancel_requested: bool
    pause: bool
    deadline: str | None
    reasons: list[dict[str, Any]]
    grace_seconds: float
    stall_seconds: float | None
    objective: str
    spec: Raw


@dataclass(frozen=True, slots=True)
class JournalRow:
    """``outcome``: of a decided wait, its status and what fired, payloads in stored form. ``child``: of a spawn."""

    key: str
    kind: str
    name: str
    seq: int
    fingerprint: str | None
    state: str
    output: bytes
    error: dict[str, Any] | None
    outcome: dict[str, Any] | None
    child: str | None


@dataclass(frozen=True, slots=True)
class SliceRow:
    name: str
    version: int
    append: bool
    chunks: list[bytes]


@dataclass(frozen=True, slots=True)
class SignalRow:
    name: str
    id: str
    at: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Context:
    """``fallback``: the sequence of the session that had to be taken instead of the newest one, 0 for an empty one."""

    run: RunRow
    state: str
    input: bytes
    journal: list[JournalRow]
    slices: list[SliceRow]
    fallback: int | None
    checkpoint: tuple[int, str, bytes] | None
    ledger: list[dict[str, Any]]
    signals: list[SignalRow]
    payloads: Payloads


def stored_payloads(outcome: dict[str, Any]) -> list[bytes | None]:
    """The payloads of an outcome as SQL gives it (base64 of the stored form)."""
    return [base64.b64decode(f["payload"]) if f.get("payload") else None for f in outcome.get("fired", [])]


def _journal(row: asyncpg.Record, detail: dict[str, Any], payloads: Payloads) -> JournalRow:
    """A result that cannot be read back fails for good: it is never redone in silence."""
    try:
        state, output, error = row["state"], payloads.get(row["payload"]), detail["error"]
    except CorruptPayload as broken:
        state, output, error = "failed", b"null", {"type": "JournalCorrupt", "message": str(broken), "retryable": False}
    return JournalRow(
        row["key"], row["kind"], row["name"], row["seq"], detail["fingerprint"], state, output, error, detail["outcome"], detail["child"]
    )


def _slices(rows: Sequence[tuple[str, bool, int, bytes]], payloads: Payloads) -> list[SliceRow]:
    """From name, append, version and value of each chunk. Raises CorruptPayload."""
    pieces: dict[str, SliceRow] = {}
    for name, append, version, value in rows:
        piece = pieces.get(name)
        if piece is None or not append:
            pieces[name] = piece = SliceRow(name, version, append, [])
        piece.chunks.append(payloads.get(value))
    return list(pieces.values())


async def _older_session(connection: Connection, run: UUID, payloads: Payloads) -> tuple[list[SliceRow], int]:
    """When the newest cannot be read: the session of the last checkpoint, else of the one before, and so on, else an empty one (C7)."""
    for checkpoint in await connection.fetch("select seq from perdure.checkpoints where run_id = $1 order by seq desc", run):
        rows = await connection.fetch("select name, append, version, value from perdure.session($1, $2)", run, checkpoint["seq"])
        payloads.want(row["value"] for row in rows)
        await payloads.load(connection)
        try:
            return _slices([tuple(row) for row in rows], payloads), checkpoint["seq"]
        except CorruptPayload:
            continue
    return [], 0


async def load(connection: Connection, run: UUID) -> Context:
    """One round trip; one more when there are large payloads. Raises RunNotFound, CorruptPayload (of what nothing can stand in for)."""
    parts: dict[str, list[tuple[asyncpg.Record, Any]]] = defaultdict(list)
    payloads = Payloads()
    for row in await connection.fetch("select * from perdure.context($1)", run):
        detail: Any = decode(row["detail"], type=RunRow if row["part"] == "run" else Any) if row["detail"] else None
        parts[row["part"]].append((row, detail))
        payloads.want([row["payload"]])
        if row["part"] == "journal" and detail["outcome"]:
            payloads.want(stored_payloads(detail["outcome"]))
    if not parts["run"]:
        raise RunNotFound(f"there is no run {run}")
    await payloads.load(connection)

    fallback: int | None = None
    try:
        slices = _slices([(row["name"], d["append"], d["version"], row["payload"]) for row, d in parts["slice"]], payloads)
    except CorruptPayload:
        slices, fallback = await _older_session(connection, run, payloads)
    [(run_row, run_detail)] = parts["run"]
    checkpoint = next(((row["seq"], row["name"], payloads.get(row["payload"])) for row, _ in parts["checkpoint"]), None)
    return Context(
        run=run_detail,
        state=run_row["state"],
        input=payloads.get(run_row["payload"]),
        journal=[_journal(row, detail, payloads) for row, detail in parts["journal"]],
        slices=slices,
        fallback=fallback,
        checkpoint=checkpoint,
        ledger=[
            {"key": row["key"], "seq": row["seq"], "tool": row["name"], "effect": row["kind"], "state": row["state"], **detail}
            for row, detail in parts["ledger"]
        ],
        signals=[SignalRow(row["name"], row["key"], detail["at"], payloads.get(row["payload"])) for row, detail in parts["signal"]],
        payloads=payloads,
    )


async def journaled(connection: Connection, run: UUID, key: str) -> JournalRow | None:
    """The journal's entry for one step, if there is one."""
    row = await connection.fetchrow(
        "select key, kind, name, seq, state, output as payload, fingerprint, error from perdure.journal where run_id = $1 and key = $2",
        run,
        key,
    )
    if row is None:
        return None
    payloads = await Payloads.of(connection, [row["payload"]])
    error = decode(row["error"]) if row["error"] else None
    return _journal(row, {"fingerprint": row["fingerprint"], "error": error, "outcome": None, "child": None}, payloads)
