"""What a lease delivers: the run, its journal, session, checkpoint and ledger, as the next worker needs them.

Read after the lease was committed, in one statement: from then on only other parties' effects (signals, cancels) can come on top, and
those are pushed. Of a large run only a part is read: what does not fit stays in the store, marked, and is fetched from there when it is
needed (``windows.py``). Sizes come before contents, so neither a long journal nor one that unpacks to much takes a gateway's memory.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import asyncpg
from msgspec import Raw, Struct
from msgspec.json import decode, encode

from perdure_operator.domain.errors import CorruptPayload, LeaseTooLarge, RunNotFound
from perdure_operator.store.payload import Payloads, Room

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy
MIB = 1024 * 1024
CUT = 500
"""Characters of an error's message that come along in any case: ten thousand of them fit into a frame."""


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
    """``outcome``: of a decided wait, its status and what fired, payloads in stored form. ``child``: of a spawn. ``fetch``: the output, or
    the outcome, was left in the store."""

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
    fetch: bool = False


@dataclass(frozen=True, slots=True)
class SliceRow:
    """``left``: sequences of the chunks after ``chunks``, which were left in the store."""

    name: str
    version: int
    append: bool
    chunks: list[bytes]
    left: list[int]


@dataclass(frozen=True, slots=True)
class SignalRow:
    name: str
    id: str
    at: str
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Portion:
    """How much of a run is read at once. ``whole``: all or nothing, for who fetches nothing. ``each``: what a single value may have to come
    along; ``entries``: of journal and ledger."""

    journal: int
    session: int
    signals: int
    each: int | None
    entries: int | None
    whole: bool = False


LEAN = Portion(journal=2 * MIB, session=2 * MIB, signals=MIB // 2, each=MIB // 16, entries=10_000)
WHOLE = Portion(journal=48 * MIB, session=48 * MIB, signals=48 * MIB, each=None, entries=None, whole=True)
"""What fits into a frame, with its envelope."""


@dataclass(frozen=True, slots=True)
class Context:
    """``fallback``: the sequence of the session that had to be taken instead of the newest one, 0 for an empty one. ``after``: the key of
    the journal behind which there is more. ``ledger_seq``: of the newest intent. ``marked``: something was left in the store."""

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
    after: str | None
    ledger_seq: int

    @property
    def marked(self) -> bool:
        left = any(row.fetch or _left(row.outcome, self.payloads) for row in self.journal) or any(piece.left for piece in self.slices)
        return left or self.after is not None or any(signal.payload is None for signal in self.signals)


def stored_payloads(outcome: dict[str, Any]) -> list[bytes | None]:
    """The payloads of an outcome as SQL gives it (base64 of the stored form)."""
    return [base64.b64decode(f["payload"]) if f.get("payload") else None for f in outcome.get("fired", [])]


def _left(outcome: dict[str, Any] | None, payloads: Payloads) -> bool:
    return outcome is not None and not all(payloads.here(stored) for stored in stored_payloads(outcome))


class Reading:
    """One reading of a run in two passes: measured and chosen, and then loaded."""

    def __init__(self, portion: Portion) -> None:
        self.payloads = Payloads()
        self.portion = portion
        self._journal = Room(portion.journal, portion.each)
        self._session = self._journal if portion.whole else Room(portion.session)
        self._signals = self._journal if portion.whole else Room(portion.signals, portion.each)

    def must(self, stored: bytes | None) -> None:
        """Raises CorruptPayload, LeaseTooLarge."""
        size = self.payloads.size(stored)
        if self.portion.whole and not self._journal.take(size):
            raise self._too_large()
        self.payloads.want([stored])

    def journal(self, stored: bytes | None) -> bool:
        """Whether it comes along. Raises CorruptPayload, LeaseTooLarge."""
        return self._take(self._journal, stored)

    def signal(self, stored: bytes | None) -> bool:
        return self._take(self._signals, stored)

    def chunk(self, stored: bytes) -> bool:
        return self._take(self._session, stored)

    def error(self, error: dict[str, Any] | None) -> dict[str, Any] | None:
        """It comes along with its entry. Where it does not fit its message is cut: the journal has it whole, and what an agent does with
        an error depends on its type. Raises LeaseTooLarge."""
        if error is None or self._journal.take(len(encode(error))):
            return error
        if self.portion.whole:
            raise self._too_large()
        return error | {"message": str(error.get("message", ""))[:CUT]}

    def outcome(self, raw: dict[str, Any]) -> None:
        """Its payloads, as far as they fit. One that is broken is found out by who fetches it, where that can be."""
        for stored in stored_payloads(raw):
            if stored is not None:
                if self.portion.whole:
                    self.journal(stored)
                else:
                    with suppress(CorruptPayload):
                        self.journal(stored)

    def _take(self, room: Room, stored: bytes | None) -> bool:
        if not room.take(self.payloads.size(stored)):
            if self.portion.whole:
                raise self._too_large()
            return False
        self.payloads.want([stored])
        return True

    def _too_large(self) -> LeaseTooLarge:
        return LeaseTooLarge(
            f"what its worker is to be told has more than {self.portion.journal // MIB} MiB, and its agent cannot fetch it"
        )


def journal_row(row: asyncpg.Record, detail: dict[str, Any], reading: Reading) -> JournalRow:
    """Chooses what of it comes along. A result that cannot be read back fails for good: it is never redone in silence."""
    state, output, error, fetch = row["state"], row["payload"], reading.error(detail["error"]), False
    outcome = detail["outcome"]
    if outcome is not None:
        reading.outcome(outcome)
    elif row["kind"] == "wait":
        fetch = state in ("satisfied", "timed_out")  # what fired is too much already
    elif row["payload"] is not None:
        try:
            fetch = not reading.journal(output)
        except CorruptPayload as broken:
            state, output, error = _corrupt(broken)
    return JournalRow(
        row["key"], row["kind"], row["name"], row["seq"], detail["fingerprint"], state, b"" if fetch else output, error, outcome,
        detail["child"], fetch,
    )  # fmt: skip


def read_out(row: JournalRow, payloads: Payloads) -> JournalRow:
    """Of a chosen row, with its output read."""
    if row.fetch:
        return row
    try:
        return replace(row, output=payloads.get(row.output))
    except CorruptPayload as broken:
        state, output, error = _corrupt(broken)
        return replace(row, state=state, output=payloads.get(output), error=error)


def _corrupt(broken: CorruptPayload) -> tuple[str, None, dict[str, Any]]:
    return "failed", None, {"type": "JournalCorrupt", "message": str(broken), "retryable": False}


Chunk = tuple[str, bool, int, int, bytes]
"""Name, whether it is appended, version, sequence and stored form."""


async def _session(connection: Connection, chunks: Sequence[Chunk], reading: Reading) -> list[SliceRow]:
    """Raises CorruptPayload, LeaseTooLarge."""
    await reading.payloads.measure(connection, (stored for *_, stored in chunks))
    pieces: dict[str, SliceRow] = {}
    stored_of: dict[str, list[bytes]] = {}
    for name, append, version, seq, stored in chunks:
        piece = pieces.get(name)
        if piece is None or not append:
            pieces[name] = piece = SliceRow(name, version, append, [], [])
            stored_of[name] = []
        if not piece.left and reading.chunk(stored):
            stored_of[name].append(stored)
        else:
            reading.payloads.size(stored)  # that it is there at all
            piece.left.append(seq)
    await reading.payloads.load(connection)
    for name, piece in pieces.items():
        piece.chunks.extend(reading.payloads.get(stored) for stored in stored_of[name])
    return list(pieces.values())


async def _older_session(connection: Connection, run: UUID, portion: Portion) -> tuple[list[SliceRow], int]:
    """When the newest cannot be read: the session of the last checkpoint, else of the one before, and so on, else an empty one (C7)."""
    for checkpoint in await connection.fetch("select seq from perdure.checkpoints where run_id = $1 order by seq desc", run):
        rows = await connection.fetch("select name, append, version, seq, value from perdure.session($1, $2)", run, checkpoint["seq"])
        with suppress(CorruptPayload):
            return await _session(connection, [tuple(row) for row in rows], Reading(portion)), checkpoint["seq"]
    return [], 0


async def load(connection: Connection, run: UUID, portion: Portion = LEAN) -> Context:
    """One round trip; some more when there are large payloads. Raises RunNotFound, CorruptPayload (of what nothing can stand in for),
    LeaseTooLarge."""
    parts: dict[str, list[tuple[asyncpg.Record, Any]]] = defaultdict(list)
    stored: list[bytes | None] = []
    for row in await connection.fetch("select * from perdure.context($1, $2)", run, portion.entries and portion.entries + 1):
        detail: Any = decode(row["detail"], type=RunRow if row["part"] == "run" else Any) if row["detail"] else None
        parts[row["part"]].append((row, detail))
        if row["part"] != "slice":
            stored.append(row["payload"])
        if row["part"] == "journal" and detail["outcome"]:
            stored += stored_payloads(detail["outcome"])
    if not parts["run"]:
        raise RunNotFound(f"there is no run {run}")
    reading = Reading(portion)
    await reading.payloads.measure(connection, stored)
    [(run_row, run_detail)] = parts["run"]
    reading.must(run_row["payload"])
    for row, _ in parts["checkpoint"]:
        reading.must(row["payload"])
    entries, after = parts["journal"], None
    if portion.entries is not None and len(entries) > portion.entries:
        entries = entries[: portion.entries]
        after = str(entries[-1][0]["key"])
    # In the order in which a redo meets them.
    journal = [journal_row(row, detail, reading) for row, detail in sorted(entries, key=lambda entry: entry[0]["seq"])]
    signals = [(row, detail, reading.signal(row["payload"])) for row, detail in parts["signal"]]
    fallback: int | None = None
    try:
        chunks = [(row["name"], d["append"], d["version"], row["seq"], row["payload"]) for row, d in parts["slice"]]
        slices = await _session(connection, chunks, reading)
    except CorruptPayload:
        slices, fallback = await _older_session(connection, run, portion)
        await reading.payloads.load(connection)
    payloads = reading.payloads
    return Context(
        run=run_detail,
        state=run_row["state"],
        input=payloads.get(run_row["payload"]),
        journal=[read_out(row, payloads) for row in journal],
        slices=slices,
        fallback=fallback,
        checkpoint=next(((row["seq"], row["name"], payloads.get(row["payload"])) for row, _ in parts["checkpoint"]), None),
        ledger=[
            {"key": row["key"], "seq": row["seq"], "tool": row["name"], "effect": row["kind"], "state": row["state"], **detail}
            for row, detail in parts["ledger"]
        ],
        signals=[
            SignalRow(row["name"], row["key"], detail["at"], payloads.get(row["payload"]) if taken else None)
            for row, detail, taken in signals
        ],
        payloads=payloads,
        after=after,
        ledger_seq=next((row["seq"] for row, _ in parts["ledger_seq"]), 0),
    )


async def outcomes(connection: Connection, raw: Iterable[dict[str, Any]], portion: Portion) -> Payloads:
    """The payloads of decided waits, as many as come along. Raises CorruptPayload and LeaseTooLarge for who gets all."""
    reading, found = Reading(portion), list(raw)
    await reading.payloads.measure(connection, (stored for one in found for stored in stored_payloads(one)))
    for one in found:
        reading.outcome(one)
    await reading.payloads.load(connection)
    return reading.payloads


async def journaled(connection: Connection, run: UUID, key: str) -> JournalRow | None:
    """The journal's entry for one step, if there is one."""
    row = await connection.fetchrow(
        "select key, kind, name, seq, state, output as payload, fingerprint, error from perdure.journal where run_id = $1 and key = $2",
        run,
        key,
    )
    if row is None:
        return None
    reading = Reading(WHOLE)
    await reading.payloads.measure(connection, [row["payload"]])
    error = decode(row["error"]) if row["error"] else None
    found = journal_row(row, {"fingerprint": row["fingerprint"], "error": error, "outcome": None, "child": None}, reading)
    await reading.payloads.load(connection)
    return read_out(found, reading.payloads)
