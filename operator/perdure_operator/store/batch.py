"""Turns operations into the arrays of the batch functions (``sql/60_batch.sql``, which explains the rules) and their rows into outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from perdure_operator.store.operations import UNLIMITED, Control, JournalStep, Limits, Operation, Outcome
from perdure_operator.store.payload import Blob, encode

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy
_json = msgspec.json.Encoder(enc_hook=str)


class _Attachments:
    """Slices and blobs of a batch, flattened, each with the number of its operation; ``raw`` and ``stored``: bytes that each operation
    writes, as JSON and as they are stored."""

    def __init__(self, operations: int) -> None:
        self.raw, self.stored = [0] * operations, [0] * operations
        self.slices: tuple[list[Any], ...] = ([], [], [], [], [])
        self.blobs: tuple[list[Any], ...] = ([], [], [], [])

    def payload(self, ord_: int, run: UUID, raw: bytes | None) -> bytes | None:
        if raw is None:
            return None
        stored, blob = encode(run, raw)
        size = len(stored)
        if blob is not None:
            self._blob(ord_, blob)
            size += len(blob.data)
        self.raw[ord_ - 1] += len(raw)
        self.stored[ord_ - 1] += size
        return stored

    def _blob(self, ord_: int, blob: Blob) -> None:
        for column, value in zip(self.blobs, (ord_, blob.run, blob.hash, blob.data), strict=True):
            column.append(value)

    def add_error(self, ord_: int, error: str) -> None:
        """A step's error is stored as the text that it is."""
        size = len(error.encode())
        self.raw[ord_ - 1] += size
        self.stored[ord_ - 1] += size

    def add_slices(self, ord_: int, operation: Operation) -> None:
        for piece in operation.slices:
            stored = self.payload(ord_, operation.run, piece.value)
            for column, value in zip(self.slices, (ord_, piece.name, piece.append, piece.version, stored), strict=True):
                column.append(value)


_JOURNAL = "select * from perdure.journal_batch(" + ", ".join(f"${n}" for n in range(1, 29)) + ")"
_CONTROL = "select * from perdure.control_batch(" + ", ".join(f"${n}" for n in range(1, 24)) + ")"


def _column(values: list[Any], usual: Any) -> list[Any] | None:
    """None for a column that holds its usual value throughout: the function puts that in, and the driver has nothing to encode."""
    return None if values.count(usual) == len(values) else values


async def journal(connection: Connection, steps: Sequence[JournalStep], *, wait: bool, limits: Limits = UNLIMITED) -> list[Outcome]:
    """Commits step outcomes of any runs. One round trip, one commit."""
    attached = _Attachments(len(steps))
    outputs = []
    for n, step in enumerate(steps, 1):
        outputs.append(attached.payload(n, step.run, step.output))
        if step.slices:
            attached.add_slices(n, step)
    errors = _column([s.error for s in steps], None)
    for n, error in enumerate(errors or (), 1):
        if error is not None:
            attached.add_error(n, error)
    in_place = errors is None and not attached.slices[0] and not attached.blobs[0]
    rows = await connection.fetch(
        _JOURNAL,
        [s.run for s in steps],
        [s.fence.epoch for s in steps],
        [s.fence.holder for s in steps],
        [s.request for s in steps],
        [s.key for s in steps],
        [s.name for s in steps],
        _column([s.state for s in steps], "succeeded"),
        _column([s.fingerprint for s in steps], None),
        _column([s.phase for s in steps], None),
        _column([s.attempts for s in steps], 1),
        outputs,
        errors,
        *attached.slices,
        *attached.blobs,
        wait,
        None if in_place else attached.raw,
        None if in_place else attached.stored,
        limits.raw,
        limits.stored,
        sum(attached.raw),
        sum(attached.stored),
    )
    outcomes: list[Outcome] = [Outcome("internal", {})] * len(steps)
    for row in rows:
        outcomes[row["ord"] - 1] = Outcome(
            row["code"], {"seq": row["seq"], "existing": row["existing"]}, row["detail"] or "", nearly_full=bool(row["nearly_full"])
        )
    return outcomes


async def control(
    connection: Connection,
    operations: Sequence[Control],
    *,
    wait: bool,
    idle: Sequence[UUID] = (),
    gateway: str = "",
    limits: Limits = UNLIMITED,
) -> list[Outcome]:
    """Commits other operations of any runs. One round trip, one commit."""
    places = sorted(range(len(operations)), key=lambda n: operations[n].run)  # those of one run stay in order
    operations = [operations[n] for n in places]
    attached = _Attachments(len(operations))
    payloads = []
    for n, op in enumerate(operations, 1):
        payloads.append(attached.payload(n, op.payload_run or op.run, op.payload))
        attached.add_slices(n, op)
    rows = await connection.fetch(
        _CONTROL,
        [op.run for op in operations],
        [op.fence.epoch if op.fence else None for op in operations],
        [op.fence.holder if op.fence else None for op in operations],
        [op.request for op in operations],
        [op.kind for op in operations],
        [_json.encode(op.body).decode() for op in operations],
        payloads,
        *attached.slices,
        *attached.blobs,
        list(idle),
        gateway,
        wait,
        attached.raw,
        attached.stored,
        limits.raw,
        limits.stored,
    )
    outcomes = {
        place: Outcome(row["code"], msgspec.json.decode(row["answer"]), row["detail"], row["state"], row["leased"], row["epoch"])
        for place, row in zip(places, rows, strict=True)
    }
    return [outcomes[place] for place in range(len(places))]
