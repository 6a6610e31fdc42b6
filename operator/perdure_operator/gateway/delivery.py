"""Builds what a lease delivers to its pod (perdure.protocol.RunContext) from what the store knows."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from msgspec import Raw

from perdure import protocol as wire
from perdure_operator.gateway.translate import Held, outcome
from perdure_operator.store.context import Context, JournalRow
from perdure_operator.store.operations import Fence


def _entry(row: JournalRow, context: Context) -> wire.JournalEntry:
    output = row.output
    if row.outcome is not None:
        output = wire.encode_json(outcome(row.outcome, context.payloads))
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
    unclaimed = [wire.Reason(kind="signal", name=s.name, id=s.id, at=s.at, payload=Raw(s.payload)) for s in context.signals]
    return reasons + unclaimed


def lease(context: Context) -> wire.Lease:
    """The frame for the pod that holds the run at its current epoch."""
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
        journal=[_entry(row, context) for row in context.journal],
        slices=[
            wire.SliceState(name=s.name, version=s.version, append=s.append, chunks=[Raw(chunk) for chunk in s.chunks])
            for s in context.slices
        ],
        checkpoint=wire.CheckpointRef(seq=context.checkpoint[0], type=context.checkpoint[1], cursor=Raw(context.checkpoint[2]))
        if context.checkpoint
        else None,
        ledger=[wire.LedgerEntry(**entry) for entry in context.ledger],
    )
    return wire.Lease(
        run=str(run.run_id),
        epoch=run.epoch,
        context=wire.encode_json(body),
        grace_seconds=run.grace_seconds,
        stall_timeout_seconds=run.stall_seconds,
    )


def held(context: Context, pod: UUID) -> Held:
    run = context.run
    spec: dict[str, Any] = msgspec.json.decode(run.spec)
    return Held(run.run_id, str(run.run_id), run.namespace, run.name, run.pool, Fence(run.epoch, pod), spec)
