"""Thousands of runs, made from one: what a loop of the store costs, or decides, shows only where there are many."""

from __future__ import annotations

from uuid import UUID

import asyncpg


async def copies(pg: asyncpg.Connection, run: UUID, count: int, *, every: dict[str, str] | None = None) -> None:
    """Makes ``count`` runs like ``run``, with its log and, if it has one, a lease and a pod each. ``every``: SQL expressions for columns of
    ``perdure.runs``; ``n`` counts the copies from 1."""
    async with pg.transaction():
        await pg.execute("create temporary table if not exists copies (n int, id uuid, pod uuid)")
        await pg.execute("truncate copies")
        await pg.execute("insert into copies select n, gen_random_uuid(), gen_random_uuid() from generate_series(1, $1::int) n", count)
        columns = [
            row[0]
            for row in await pg.fetch(
                "select column_name from information_schema.columns where table_schema = 'perdure' and table_name = 'runs' order by 1"
            )
        ]
        own = {
            "run_id": "c.id",
            "root_id": "c.id",
            "name": "t.name || '-' || c.id",
            "holder": "case when t.holder is not null then c.pod end",
        }
        values = ", ".join((own | (every or {})).get(column, f't."{column}"') for column in columns)
        names = ", ".join(f'"{column}"' for column in columns)
        await pg.execute(f"insert into perdure.runs ({names}) select {values} from copies c, perdure.runs t where t.run_id = $1", run)
        await pg.execute(
            "insert into perdure.events (run_id, seq, epoch, at, kind, data) "
            "select c.id, e.seq, e.epoch, e.at, e.kind, e.data from copies c, perdure.events e where e.run_id = $1",
            run,
        )
        await pg.execute(
            "insert into perdure.leases (run_id, epoch, holder, gateway, granted_at, beat_at) "
            "select c.id, l.epoch, c.pod, l.gateway, l.granted_at, l.beat_at from copies c, perdure.leases l where l.run_id = $1",
            run,
        )
        await pg.execute(
            "insert into perdure.pods (pod_id, pool, state, gateway, run_id, since, seen_at) "
            "select c.pod, p.pool, p.state, p.gateway, c.id, p.since, p.seen_at from copies c, perdure.pods p where p.run_id = $1",
            run,
        )
