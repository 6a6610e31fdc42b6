"""Queries for people and programs. They lock nothing and change nothing; all lists are paged by a key that never moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol
from uuid import UUID

import asyncpg
import msgspec

from perdure_operator.domain.errors import RunNotFound
from perdure_operator.store.payload import Payloads, Room

PAGE_BYTES = 2 * 1024 * 1024
"""Of values in one page of a list; the value that fills it, at most two megabytes, comes on top."""
Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy
_decode = msgspec.json.decode

_VIEW = """
select r.*, s.summary, s.objective, s.labels, perdure.admits(r, (select perdure.now())) as not_admitted, l.beat_at, l.gateway,
  case when r.state = 'Pending' then (select p.trouble from perdure.pools p where p.pool = r.pool) end as pool_trouble,
  (select p.name from perdure.runs p where p.run_id = r.parent_id) as parent_name,
  (select count(*) from perdure.runs c where c.parent_id = r.run_id and c.state in ('Pending', 'Running', 'Suspended')) as children_active,
  (select count(*) from perdure.runs c where c.parent_id = r.run_id and c.state = 'Succeeded') as children_succeeded,
  (select count(*) from perdure.runs c where c.parent_id = r.run_id and c.state in ('Failed', 'Cancelled')) as children_failed,
  (select jsonb_agg(jsonb_build_object('kind', c.kind, 'name', c.name, 'at', c.at, 'since', w.opened_at, 'key', w.key,
                                       'timeoutAt', w.timeout_at, 'tool', c.tool)
                    order by w.seq, c.idx)
   from perdure.waits w join lateral (
     select c.*, (select e.tool from perdure.ledger e where c.kind = 'signal' and c.name like 'effect:%'
                  and e.run_id = c.run_id and e.key = split_part(c.name, ':', 2) and e.state = 'UNKNOWN') as tool
     from perdure.wait_conditions c where c.run_id = w.run_id and c.key = w.key
       and not exists (select 1 from perdure.wakeups k
                       where k.run_id = c.run_id and k.kind = 'child_done' and c.kind = 'child_done' and k.source = c.name)
     order by c.idx limit 20) c on true
   where w.run_id = r.run_id and w.state = 'open') as waiting_for
from perdure.runs r join perdure.run_specs s using (run_id) left join perdure.leases l using (run_id)
"""


class Row(Protocol):
    """A row of a result, by column name."""

    def __getitem__(self, column: str, /) -> Any: ...
    def items(self) -> Iterator[tuple[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class EventRow:
    seq: int
    at: str
    epoch: int
    kind: str
    data: dict[str, Any]
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool, as a person needs to see it who is asked what became of it."""

    key: str
    tool: str
    effect: str
    step: str | None
    attempts: int
    error: dict[str, Any] | None
    arguments: Any


class Reader:
    """One reading on one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self, namespace: str, name: str) -> UUID:
        """The id of a run by name or id; ``-`` as the namespace finds any by id. Raises RunNotFound."""
        try:
            run_id: UUID | None = UUID(name)
        except ValueError:
            run_id = None
        found = await self._connection.fetchval(
            "select run_id from perdure.runs "
            "where (namespace = $1 and name = $2 and not superseded) or (run_id = $3 and $1 in (namespace, '-'))",
            namespace,
            name,
            run_id,
        )
        if found is None:
            raise RunNotFound(f"there is no run {name} in namespace {namespace}")
        return UUID(str(found))

    async def run(self, run: UUID) -> Row:
        row = await self._connection.fetchrow(f"{_VIEW} where r.run_id = $1", run)
        if row is None:
            raise RunNotFound(f"there is no run {run}")
        return row

    async def runs_by_id(self, runs: Sequence[UUID]) -> dict[UUID, Row]:
        return {row["run_id"]: row for row in await self._connection.fetch(f"{_VIEW} where r.run_id = any ($1)", list(runs))}

    async def runs(
        self, *, namespace: str | None, state: str | None, pool: str | None, parent: UUID | None, after: UUID | None, limit: int
    ) -> Sequence[Row]:
        """Oldest first, from the run after ``after``."""
        return await self._connection.fetch(
            f"{_VIEW} where ($1::text is null or r.namespace = $1) and ($2::text is null or r.state = $2) "
            "and ($3::text is null or r.pool = $3) and ($4::uuid is null or r.parent_id = $4) "
            "and ($5::uuid is null or r.run_id > $5) order by r.run_id limit $6",
            namespace,
            state,
            pool,
            parent,
            after,
            limit,
        )

    async def tree(self, root: UUID, limit: int = 10_000) -> Sequence[Row]:
        """The run and all its descendants, parents before children."""
        return await self._connection.fetch(
            "with recursive below (run_id, depth) as (select $1::uuid, 0 union all "
            "select c.run_id, depth + 1 from below join perdure.runs c on c.parent_id = below.run_id) "
            f"{_VIEW} join below b using (run_id) order by b.depth, r.run_id limit $2",
            root,
            limit,
        )

    async def events(self, run: UUID, start: int, limit: int) -> tuple[list[EventRow], bool]:
        """From this sequence on, as many as make a page, and whether there may be others behind them."""
        rows = await self._connection.fetch(
            "select seq, at, epoch, kind, data, payload from perdure.events where run_id = $1 and seq >= $2 order by seq limit $3",
            run,
            start,
            limit,
        )
        payloads, room = Payloads(), Room(PAGE_BYTES)
        await payloads.measure(self._connection, (row["payload"] for row in rows))
        page = list(takewhile(lambda row: room.begin(payloads.size(row["payload"]) + len(row["data"])), rows))
        payloads.want(row["payload"] for row in page)
        await payloads.load(self._connection)
        return [
            EventRow(
                row["seq"],
                row["at"].isoformat(),
                row["epoch"],
                row["kind"],
                _decode(row["data"]),
                payloads.get(row["payload"]) if row["payload"] is not None else None,
            )
            for row in page
        ], len(page) < len(rows) or len(rows) == limit

    async def last_seq(self, run: UUID) -> tuple[int, str]:
        """Last sequence and state."""
        row = await self._connection.fetchrow("select last_seq, state from perdure.runs where run_id = $1", run)
        if row is None:
            raise RunNotFound(f"there is no run {run}")
        return row["last_seq"], row["state"]

    async def ledger(self, run: UUID, start: int, limit: int) -> tuple[Sequence[Row], int | None]:
        """In the order of the intents, from this sequence on: as many as make a page, and where the next one begins."""
        columns = "key, tool, effect, state, policy, occurrence, step, attempts, epoch, provider_ref, error, seq, done_seq, response"
        return await self._page("ledger", columns, "octet_length(response)", run, start, limit)

    async def received(self, run: UUID, signal: str, id: str) -> bool:
        """Whether this very signal was accepted before."""
        found = await self._connection.fetchval(
            "select exists (select 1 from perdure.wakeups where run_id = $1 and kind = 'signal' and name = $2 and id = $3)", run, signal, id
        )
        return bool(found)

    async def refusals(self, run: UUID, signals: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What the agent said of the last payload of each of these signals that it could not use."""
        rows = await self._connection.fetch(
            "select payload from perdure.events where run_id = $1 and kind in ('agent.SignalRejected', 'agent.AnswerRefused') "
            "order by seq desc limit 20",
            run,
        )
        payloads = await Payloads.of(self._connection, (row["payload"] for row in rows))
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            said = _decode(payloads.get(row["payload"]))
            if isinstance(said, dict) and said.get("signal") in signals:
                found.setdefault(said["signal"], said)
        return found

    async def calls(self, run: UUID, keys: Sequence[str]) -> list[Call]:
        """Those of these effects of which nobody knows whether they happened."""
        rows = await self._connection.fetch(
            "select key, tool, effect, step, attempts, error, request from perdure.ledger "
            "where run_id = $1 and key = any ($2) and state = 'UNKNOWN' order by seq",
            run,
            list(keys),
        )
        payloads = await Payloads.of(self._connection, (row["request"] for row in rows))
        return [
            Call(
                row["key"],
                row["tool"],
                row["effect"],
                row["step"],
                row["attempts"],
                _decode(row["error"]) if row["error"] else None,
                _decode(payloads.get(row["request"])) if row["request"] is not None else None,
            )
            for row in rows
        ]

    async def journal(self, run: UUID, start: int, limit: int) -> tuple[Sequence[Row], int | None]:
        """In the order of the log, from this sequence on: as many as make a page, and where the next one begins. A wait that is decided
        between two pages may be on both."""
        columns = "key, kind, name, state, seq, epoch, attempts, phase, fingerprint, data, output, error"
        return await self._page("journal", columns, "octet_length(output) + coalesce(octet_length(data::text), 0)", run, start, limit)

    async def _page(self, table: str, columns: str, size: str, run: UUID, start: int, limit: int) -> tuple[Sequence[Row], int | None]:
        """``size``: bytes of what may be large in a row. A page ends with the row that fills it."""
        part = f"select {columns}, coalesce({size}, 0) as size from perdure.{table} where run_id = $1 and seq >= $2 order by seq limit $3"
        rows = await self._connection.fetch(
            f"select {columns} from (select *, sum(size) over (order by seq rows between unbounded preceding and 1 preceding) as before "
            f"from ({part}) r) r where coalesce(before, 0) < $4 order by seq",
            run,
            start,
            limit + 1,
            PAGE_BYTES,
        )
        if len(rows) > limit:
            return rows[:limit], rows[limit]["seq"]
        if not rows:
            return rows, None
        more = f"select min(seq) from perdure.{table} where run_id = $1 and seq > $2"
        return rows, await self._connection.fetchval(more, run, rows[-1]["seq"])

    async def given(self, run: UUID) -> tuple[bytes, bytes]:
        """Spec and input as JSON; the input of a run that was given none is null."""
        row = await self._connection.fetchrow("select spec, input from perdure.run_specs where run_id = $1", run)
        assert row is not None, run
        return row["spec"].encode(), await self.payload(row["input"])

    async def payload(self, stored: bytes | None) -> bytes:
        payloads = await Payloads.of(self._connection, [stored])
        return payloads.get(stored)
