"""What a lease left in the store (``context.py``), read on demand: as much at once as fits into one window.

Values are answered in the order in which they were asked for, and stop at the first that does not fit any more; the first one always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from uuid import UUID

import asyncpg
from msgspec.json import decode

from perdure_operator.domain.errors import CorruptPayload, InvalidInput
from perdure_operator.store.context import LEAN, MIB, JournalRow, Reading, journal_row, outcomes, read_out, stored_payloads
from perdure_operator.store.payload import Payloads, Room

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy
WINDOW_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Page:
    """Entries of the journal by key. ``more``: there are others behind them."""

    rows: list[JournalRow]
    payloads: Payloads
    more: bool


async def page(connection: Connection, run: UUID, after: str) -> Page:
    entries = LEAN.entries or 1
    rows = await connection.fetch("select * from perdure.journal_page($1, $2, $3)", run, after, entries + 1)
    details = [decode(row["detail"]) for row in rows[:entries]]
    reading = Reading(LEAN)
    stored = [row["payload"] for row in rows[:entries]]
    await reading.payloads.measure(connection, [*stored, *(s for d in details if d["outcome"] for s in stored_payloads(d["outcome"]))])
    chosen = [journal_row(row, detail, reading) for row, detail in zip(rows, details, strict=False)]
    await reading.payloads.load(connection)
    return Page([read_out(row, reading.payloads) for row in chosen], reading.payloads, len(rows) > entries)


async def outputs(connection: Connection, run: UUID, keys: Sequence[str]) -> tuple[list[bytes | dict[str, Any]], Payloads]:
    """The outputs of these entries of the journal. That of a decided wait is its outcome as SQL gives it, with as many of its payloads as
    fit; it fills a window of its own."""
    rows = await connection.fetch(
        "select key, output, kind = 'wait' and state in ('satisfied', 'timed_out') as decided from perdure.journal "
        "where run_id = $1 and key = any ($2)",
        run,
        list(keys),
    )
    found = {row["key"]: row for row in rows}
    known = [_known(found, key, f"an entry {key} in its journal") for key in keys]
    if known and known[0]["decided"]:
        outcome = decode(await connection.fetchval("select perdure.outcome($1, $2)", run, keys[0]))
        return [outcome], await outcomes(connection, [outcome], LEAN)
    plain = [row["output"] for row in takewhile(lambda row: not row["decided"], known)]
    payloads = Payloads()
    await payloads.measure(connection, plain)
    taken = _fitting(plain, payloads, Room(WINDOW_BYTES))
    await payloads.load(connection)
    return [payloads.get(stored) for stored in taken], payloads


async def fired(connection: Connection, run: UUID, refs: Sequence[tuple[str, int]]) -> tuple[list[dict[str, Any]], Payloads]:
    """What satisfied waits: each a part of an outcome as SQL gives it, payload in stored form."""
    rows = await connection.fetch(
        "select j.key, (f ->> 'index')::int as index, f ->> 'kind' as kind, w.payload, w.data "
        "from perdure.journal j cross join lateral jsonb_array_elements(j.data -> 'fired') f "
        "join perdure.wakeups w on w.run_id = j.run_id and w.kind = f ->> 'kind' and w.source = f ->> 'source' "
        "where j.run_id = $1 and j.key = any ($2) and (f ->> 'index')::int = any ($3)",
        run,
        list({key for key, _ in refs}),
        list({index for _, index in refs}),
    )
    found = {(row["key"], row["index"]): row for row in rows}
    known = [_known(found, ref, f"what satisfied condition {ref[1]} of the wait {ref[0]}") for ref in refs]
    payloads = Payloads()
    await payloads.measure(connection, [row["payload"] for row in known])
    taken = _fitting([row["payload"] for row in known], payloads, Room(WINDOW_BYTES))
    await payloads.load(connection)
    return [
        {"kind": row["kind"], "stored": stored, "data": decode(row["data"])} for row, stored in zip(known, taken, strict=False)
    ], payloads


async def chunks(connection: Connection, run: UUID, refs: Sequence[tuple[str, int]]) -> list[bytes]:
    """Chunks of slices, by name and sequence."""
    rows = await connection.fetch(
        "select s.name, s.seq, s.value from perdure.slices s join unnest($2::text[], $3::bigint[]) w(name, seq) using (name, seq) "
        "where s.run_id = $1",
        run,
        [name for name, _ in refs],
        [seq for _, seq in refs],
    )
    found = {(row["name"], row["seq"]): row["value"] for row in rows}
    stored = [_known(found, ref, f"a chunk {ref[1]} of the slice {ref[0]}") for ref in refs]
    payloads = Payloads()
    await payloads.measure(connection, stored)
    taken = _fitting(stored, payloads, Room(WINDOW_BYTES))
    await payloads.load(connection)
    return [payloads.get(one) for one in taken]


def _known(found: dict[Any, Any], ref: Any, what: str) -> Any:
    if ref not in found:
        raise InvalidInput(f"the run has not {what}")
    return found[ref]


def _fitting(stored: Sequence[bytes | None], payloads: Payloads, room: Room) -> Sequence[bytes | None]:
    """Chooses the first ones, at least one. Raises CorruptPayload if that cannot be read; others before a broken one come without it."""
    for place, one in enumerate(stored):
        try:
            size = payloads.size(one)
        except CorruptPayload:
            if place == 0:
                raise
            return stored[:place]
        if place == 0:
            room.charge(size)
        elif not room.take(size):
            return stored[:place]
        payloads.want([one])
    return stored
