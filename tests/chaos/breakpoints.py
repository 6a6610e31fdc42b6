"""Stops the transaction that is to write a certain event of a run, after all it does and just before it commits.

A deferred trigger on the log takes, for a run and sequence number listed in ``chaos.points``, an advisory lock that the test holds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import asyncpg

from perdure_operator.store.errors import translated

SETUP = """
create schema chaos;
create table chaos.points (lock bigint primary key, name text not null, child boolean not null, seq bigint not null);
create function chaos.hold() returns trigger language plpgsql as $$
declare
  v_lock bigint;
begin
  select p.lock into v_lock
  from chaos.points p join perdure.runs r on r.run_id = new.run_id left join perdure.runs q on q.run_id = r.parent_id
  where p.seq = new.seq and p.name = coalesce(q.name, r.name) and p.child = (q.run_id is not null);
  if found then
    perform pg_advisory_xact_lock_shared(v_lock);
  end if;
  return null;
end $$;
create constraint trigger hold after insert on perdure.events deferrable initially deferred for each row execute function chaos.hold();
"""

HELD = """
select l.pid, a.usename as role from pg_locks l join pg_stat_activity a using (pid)
where l.locktype = 'advisory' and not l.granted and l.classid = 0 and l.objid = $1 limit 1
"""

_locks = itertools.count(1)


@dataclass
class Holder:
    """The transaction that stands still: its backend, and the database role that it came as."""

    pid: int
    role: str


class Breakpoint:
    """At event ``seq`` of the run ``name``, or of its child. Holds from ``set`` to ``release``, or until Postgres ends."""

    def __init__(self, dsn: str, name: str, seq: int, *, child: bool) -> None:
        self._dsn = dsn
        self._point = (name, child, seq)
        self._lock = next(_locks)
        self._connection: asyncpg.Connection | None = None

    async def set(self) -> None:
        """Also again, when Postgres was restarted. Raises Unavailable."""
        self.release()
        with translated():
            self._connection = connection = await asyncpg.connect(self._dsn)
            await connection.execute("select pg_advisory_lock($1)", self._lock)
            await connection.execute("insert into chaos.points values ($1, $2, $3, $4) on conflict do nothing", self._lock, *self._point)

    async def holder(self) -> Holder | None:
        """Raises Unavailable when this breakpoint is no more."""
        if self._connection is None:
            return None
        with translated():
            row = await self._connection.fetchrow(HELD, self._lock)
        return None if row is None else Holder(row["pid"], row["role"])

    async def abort(self, holder: Holder) -> None:
        """Ends the session that stands still: its transaction is rolled back. Raises Unavailable."""
        assert self._connection is not None
        with translated():
            await self._connection.execute("select pg_terminate_backend($1)", holder.pid)

    def release(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
