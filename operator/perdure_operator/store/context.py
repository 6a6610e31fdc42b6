"""What a lease delivers: the run, its journal, session, checkpoint and ledger, as the next worker needs them.

Read after the lease was committed: from then on only other parties' effects (signals, cancels) can come on top, and those are pushed.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from perdure_operator.domain.errors import CorruptPayload, RunNotFound
from perdure_operator.store.payload import Payloads

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy


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
class Context:
    run: dict[str, Any]
    input: bytes
    journal: list[JournalRow]
    slices: list[SliceRow]
    fallback: int | None
    checkpoint: tuple[int, str, bytes] | None
    ledger: list[dict[str, Any]]
    signals: list[dict[str, Any]]
    payloads: Payloads
    deadline: datetime | None


_RUN = """
select r.run_id, r.namespace, r.name, r.pool, r.epoch, r.attempt, r.last_seq, r.parent_id, r.root_id,
  r.cancel_requested, r.paused or r.spec_paused as pause,
  r.deadline_at, r.expires_at, r.reasons, r.grace_seconds, r.stall_seconds, s.objective, s.spec, s.input
from perdure.runs r join perdure.run_specs s using (run_id) where r.run_id = $1
"""
_JOURNAL = """
select key, kind, name, state, seq, fingerprint, output, error,
  case when kind = 'wait' and state <> 'open' then perdure.outcome(run_id, key) end as outcome,
  case when kind = 'spawn' then data ->> 'child' end as child
from perdure.journal where run_id = $1 order by seq
"""
# The session up to a sequence: of each slice the last replacement and all chunks after it.
_SLICES = """
select name, seq, append, version, value from perdure.slices s
where run_id = $1 and seq <= $2 and seq >= coalesce((
  select max(seq) from perdure.slices l where l.run_id = $1 and l.seq <= $2 and l.name = s.name and not l.append), 0)
order by name, seq
"""
_EVERYTHING = 1 << 62
_LEDGER = "select key, tool, effect, state, occurrence, step, provider_ref from perdure.ledger where run_id = $1 order by seq"
_CHECKPOINT = "select seq, type, cursor from perdure.checkpoints where run_id = $1 order by seq desc limit 1"
_SIGNALS = """
select name, id, at, payload from perdure.wakeups
where run_id = $1 and kind = 'signal' and bound_key is null and seq is not null order by seq limit 100
"""


def stored_payloads(outcome: dict[str, Any]) -> list[bytes | None]:
    """The payloads of an outcome as SQL gives it (base64 of the stored form)."""
    return [base64.b64decode(f["payload"]) if f.get("payload") else None for f in outcome.get("fired", [])]


def _result(row: asyncpg.Record, payloads: Payloads) -> tuple[str, bytes, dict[str, Any] | None]:
    """State, output and error of a journal row. A result that cannot be read back fails for good: it is never redone in silence."""
    try:
        return row["state"], payloads.get(row["output"]), msgspec.json.decode(row["error"]) if row["error"] else None
    except CorruptPayload as error:
        return "failed", b"null", {"type": "JournalCorrupt", "message": str(error), "retryable": False}


async def _session(connection: Connection, run: UUID, payloads: Payloads) -> tuple[list[SliceRow], int | None]:
    """The newest session that can be read: the latest, else that of the checkpoint before, and so on, else an empty one (C7).

    The second value is the sequence that was fallen back to, 0 for a fresh start, None when nothing was wrong.
    """
    checkpoints = await connection.fetch("select seq from perdure.checkpoints where run_id = $1 order by seq desc", run)
    for bound in (None, *(row["seq"] for row in checkpoints)):
        rows = await connection.fetch(_SLICES, run, bound if bound is not None else _EVERYTHING)
        payloads.want(row["value"] for row in rows)
        await payloads.load(connection)
        pieces: dict[str, SliceRow] = {}
        try:
            for row in rows:
                piece = pieces.get(row["name"])
                if piece is None or not row["append"]:
                    pieces[row["name"]] = piece = SliceRow(row["name"], row["version"], row["append"], [])
                piece.chunks.append(payloads.get(row["value"]))
        except CorruptPayload:
            continue
        return list(pieces.values()), bound
    return [], 0


async def load(connection: Connection, run: UUID) -> Context:
    row = await connection.fetchrow(_RUN, run)
    if row is None:
        raise RunNotFound(f"there is no run {run}")
    journal = await connection.fetch(_JOURNAL, run)
    checkpoint = await connection.fetchrow(_CHECKPOINT, run)
    ledger = await connection.fetch(_LEDGER, run)
    signals = await connection.fetch(_SIGNALS, run)

    payloads = Payloads()
    outcomes = [msgspec.json.decode(j["outcome"]) if j["outcome"] else None for j in journal]
    payloads.want([row["input"], *(j["output"] for j in journal), *(s["payload"] for s in signals)])
    for outcome in outcomes:
        if outcome:
            payloads.want(stored_payloads(outcome))
    if checkpoint:
        payloads.want([checkpoint["cursor"]])
    await payloads.load(connection)

    session, fallback = await _session(connection, run, payloads)
    run_columns = dict(row) | {"reasons": msgspec.json.decode(row["reasons"])}
    return Context(
        run=run_columns,
        input=payloads.get(row["input"]),
        journal=[
            JournalRow(
                j["key"],
                j["kind"],
                j["name"],
                j["seq"],
                j["fingerprint"],
                *_result(j, payloads),
                outcome,
                j["child"],
            )
            for j, outcome in zip(journal, outcomes, strict=True)
        ],
        slices=session,
        fallback=fallback,
        checkpoint=(checkpoint["seq"], checkpoint["type"], payloads.get(checkpoint["cursor"])) if checkpoint else None,
        ledger=[dict(entry) for entry in ledger],
        signals=[dict(s) | {"payload": payloads.get(s["payload"])} for s in signals],
        payloads=payloads,
        deadline=row["expires_at"],
    )
