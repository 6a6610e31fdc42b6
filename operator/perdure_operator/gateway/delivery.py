"""Builds what a lease delivers to its pod (perdure.protocol.RunContext) from what the store knows."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from msgspec import Raw

from perdure import protocol as wire
from perdure_operator.domain.errors import InvalidInput, LeaseTooLarge
from perdure_operator.gateway.translate import Held, fired_payload, outcome
from perdure_operator.store import windows
from perdure_operator.store.context import Context, JournalRow
from perdure_operator.store.operations import Fence
from perdure_operator.store.payload import Payloads
from perdure_operator.store.store import Store


def entry(row: JournalRow, payloads: Payloads) -> wire.JournalEntry:
    output = b"null" if row.fetch else row.output
    if row.outcome is not None:
        output = wire.encode_json(outcome(row.outcome, payloads))
    elif row.child is not None:
        output = wire.encode_json(wire.Spawned(child=row.child, existing=True))
    return wire.JournalEntry(
        key=row.key,
        kind=row.kind,
        name=row.name,
        state=row.state,
        seq=row.seq,
        fingerprint=row.fingerprint,
        output=Raw(output),
        error=wire.ErrorInfo(**row.error) if row.error else None,
        fetch=row.fetch,
    )


def _reasons(context: Context) -> list[wire.Reason]:
    reasons = [
        wire.Reason(
            kind=r["kind"], name=r.get("name", ""), id=r.get("id", ""), at=r.get("at", ""), late_seconds=max(0.0, r.get("lateSeconds", 0))
        )
        for r in context.run.reasons
    ]
    if context.fallback is not None:
        reasons.append(wire.Reason(kind="checkpoint_fallback", name=str(context.fallback)))
    unclaimed = [
        wire.Reason(kind="signal", name=s.name, id=s.id, at=s.at, payload=Raw(s.payload or b"null"), omitted=s.payload is None)
        for s in context.signals
    ]
    return reasons + unclaimed


def lease(context: Context, *, fetches: bool) -> bytes:
    """The frame for the pod that holds the run at its current epoch. ``fetches``: its agent knows what marks are. Raises LeaseTooLarge."""
    run = context.run
    body = wire.RunContext(
        run_id=str(run.run_id),
        namespace=run.namespace,
        name=run.name,
        pool=run.pool,
        epoch=run.epoch,
        attempt=run.attempt,
        objective=run.objective,
        input=Raw(context.input),
        spec=run.spec,
        last_seq=run.last_seq,
        parent=str(run.parent_id) if run.parent_id else None,
        root=str(run.root_id),
        deadline=run.deadline,
        cancel_requested=run.cancel_requested,
        reasons=_reasons(context),
        journal=[entry(row, context.payloads) for row in context.journal],
        slices=[
            wire.SliceState(name=s.name, version=s.version, append=s.append, chunks=[Raw(chunk) for chunk in s.chunks], fetch=s.left)
            for s in context.slices
        ],
        checkpoint=wire.CheckpointRef(seq=context.checkpoint[0], type=context.checkpoint[1], cursor=Raw(context.checkpoint[2]))
        if context.checkpoint
        else None,
        ledger=[wire.LedgerEntry(**row) for row in context.ledger],
        ledger_seq=context.ledger_seq if fetches else 0,
        journal_after=context.after,
    )
    frame = wire.Lease(
        run=str(run.run_id),
        epoch=run.epoch,
        context=wire.encode_json(body),
        grace_seconds=run.grace_seconds,
        stall_timeout_seconds=run.stall_seconds,
        fetch=context.marked,
    )
    encoded = wire.encode_frame(frame)
    if len(encoded) > wire.MAX_FRAME_BYTES:
        raise LeaseTooLarge(f"what its worker is to be told has {len(encoded)} bytes; a frame may have {wire.MAX_FRAME_BYTES}")
    return encoded


def held(context: Context, pod: UUID) -> Held:
    run = context.run
    spec: dict[str, Any] = msgspec.json.decode(run.spec)
    return Held(run.run_id, str(run.run_id), run.namespace, run.name, run.pool, Fence(run.epoch, pod), spec)


async def fetch(store: Store, run: UUID, body: wire.Fetch) -> bytes:
    """One window of what a lease left in the store. Raises InvalidInput, CorruptPayload."""
    if [bool(body.keys), bool(body.fired), bool(body.chunks), body.after is not None].count(True) != 1:
        raise InvalidInput("fetch one of keys, fired, chunks and after")
    async with store.windows() as connection:
        if body.after is not None:
            page = await windows.page(connection, run, body.after)
            return wire.encode_json(wire.Fetched(journal=[entry(row, page.payloads) for row in page.rows], more=page.more))
        if body.keys:
            found, payloads = await windows.outputs(connection, run, body.keys)
            values = [wire.encode_json(outcome(one, payloads)) if isinstance(one, dict) else one for one in found]
        elif body.fired:
            satisfied, payloads = await windows.fired(connection, run, [(ref.key, ref.index) for ref in body.fired])
            values = [fired_payload(one["kind"], one["data"], payloads.get(one["stored"])) for one in satisfied]
        else:
            values = await windows.chunks(connection, run, [(ref.name, ref.seq) for ref in body.chunks])
    return wire.encode_json(wire.Fetched(values=[Raw(value) for value in values]))
