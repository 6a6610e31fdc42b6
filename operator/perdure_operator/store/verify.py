"""``perdure verify``: the invariants of the store, each as a query that finds violations. Run after every test that touches the store.

Runs are checked in slices: as many as have so many events together, one snapshot and one short transaction a slice. So a large store is
checked in memory that does not grow, and no snapshot stays open for hours. Every query costs what its slice holds: it reads the rows of a
run once, in order, or looks one up by its key, and never compares each with each. Where a join could be planned as such a comparison (its
key is no index), both sides are stacked and grouped instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

EVENTS_A_SLICE = 50_000
RUNS_A_SLICE = 500
TOLD = 1000
"""Violations of one invariant in one slice."""
QUERY_SECONDS = 3600.0
"""One slice can be one run of millions of events; there is nobody who waits for a lock of this."""


@dataclass(frozen=True, slots=True)
class Violation:
    """``invariant``: number and name; ``run``: the run (or pod) concerned; ``detail``: what was found."""

    invariant: str
    run: str
    detail: str


@dataclass(slots=True)
class Progress:
    """How far a check has come, for who looks on: runs and events that are done, and what is being checked now."""

    runs: int = 0
    events: int = 0
    invariant: str = ""


_TERMINAL = "('Succeeded', 'Failed', 'Cancelled')"

# Each query gives (id, detail) of every violation. $1: the ids of the runs that are checked.
RUN_CHECKS: dict[str, str] = {
    "1 one live lease, of the current epoch, exactly while Running": """
        select r.run_id, format('state %s, epoch %s, holder %s; lease epoch %s, holder %s', r.state, r.epoch, r.holder, l.epoch, l.holder)
        from perdure.runs r left join perdure.leases l using (run_id)
        where r.run_id = any ($1) and ((r.state = 'Running') <> (l.run_id is not null) or (r.state = 'Running') <> (r.holder is not null)
           or (l.run_id is not null and (l.epoch <> r.epoch or l.holder <> r.holder)))
        union all
        select e.run_id, format('epoch falls at %s', e.seq) from (
          select run_id, seq, epoch, lag(epoch) over (partition by run_id order by seq) as before
          from perdure.events where run_id = any ($1)) e
        where e.epoch < e.before
        union all
        select run_id, format('epoch %s was leased %s times', epoch, count(*)) from perdure.events
        where run_id = any ($1) and kind = 'run.leased' group by run_id, epoch having count(*) > 1""",
    "2 no row under another epoch than the one current at its commit": """
        select j.run_id, format('journal %s: epoch %s, its event %s has epoch %s', j.key, j.epoch, j.seq, e.epoch)
        from perdure.journal j left join perdure.events e using (run_id, seq)
        where j.run_id = any ($1) and e.epoch is distinct from j.epoch
        union all
        select c.run_id, format('checkpoint %s: epoch %s, its event has %s', c.seq, c.epoch, e.epoch)
        from perdure.checkpoints c left join perdure.events e using (run_id, seq)
        where c.run_id = any ($1) and e.epoch is distinct from c.epoch
        union all
        -- `leased`: sequence and epoch of the last lease before the event; `ended`: where the run left Running last before it.
        select e.run_id, format('%s at %s was written outside a lease of epoch %s', e.kind, e.seq, e.epoch) from (
          select run_id, seq, epoch, kind,
            max(array[seq, epoch]) filter (where kind = 'run.leased') over before as leased,
            max(seq) filter (where data ->> 'from' = 'Running') over before as ended
          from perdure.events where run_id = any ($1)
          window before as (partition by run_id order by seq rows between unbounded preceding and 1 preceding)) e
        where (e.kind like 'step.%' or e.kind like 'agent.%'
               or e.kind in ('wait.opened', 'child.spawned', 'checkpoint.saved', 'activity.started'))
          and (e.leased is null or e.leased[2] <> e.epoch or e.ended > e.leased[1])""",
    "3 dense log, fold(log) equals the row": f"""
        select r.run_id, format('last_seq %s, %s events from %s to %s', r.last_seq, count(e.seq), min(e.seq), max(e.seq))
        from perdure.runs r left join perdure.events e using (run_id) where r.run_id = any ($1)
        group by r.run_id, r.last_seq having count(e.seq) <> r.last_seq or max(e.seq) is distinct from r.last_seq or min(e.seq) <> 1
        union all
        select r.run_id, format('row: %s, epoch %s, attempt %s; log: %s', r.state, r.epoch, r.attempt, f.data)
        from perdure.runs r
        join lateral (select data from perdure.events e where e.run_id = r.run_id and e.data ? 'to' and e.kind like 'run.%'
                      order by seq desc limit 1) f on true
        where r.run_id = any ($1)
          and (r.state <> f.data ->> 'to' or r.epoch <> (f.data ->> 'epoch')::int or r.attempt <> (f.data ->> 'attempt')::int)
        union all
        select r.run_id, format('%s steps in the row, %s in the log', r.steps, s.steps) from perdure.runs r
        join lateral (select count(*) as steps from perdure.events e where e.run_id = r.run_id and e.kind like 'step.%') s on true
        where r.run_id = any ($1) and r.steps <> s.steps
        union all
        select r.run_id, 'the cancel flag differs from the log' from perdure.runs r
        join lateral (select count(*) > 0 as asked from perdure.events e
                      where e.run_id = r.run_id and e.kind = 'run.cancel_requested') s on true
        where r.run_id = any ($1) and r.cancel_requested <> s.asked and r.state not in {_TERMINAL}""",
    "4 a terminal run never changes": f"""
        select e.run_id, format('%s at %s after the end', e.kind, e.seq) from (
          select run_id, seq, kind, bool_or(kind in ('run.succeeded', 'run.failed', 'run.cancelled')) over (
            partition by run_id order by seq rows between unbounded preceding and 1 preceding) as ended
          from perdure.events where run_id = any ($1)) e
        where e.ended
        union all
        select run_id, 'finished_at and state disagree' from perdure.runs
        where run_id = any ($1) and (finished_at is not null) <> (state in {_TERMINAL})
        union all
        select w.run_id, format('wait %s is open', w.key) from perdure.waits w join perdure.runs r using (run_id)
        where w.run_id = any ($1) and w.state = 'open' and r.state in {_TERMINAL}""",
    "5 a wakeup is bound to at most one wait; no suspended run sleeps over one": """
        -- Stacked: what is bound, and what the waits took.
        select run_id, format('%s %s is bound to %s, which did not take it', min(kind), source, key) from (
          select run_id, bound_key as key, source, kind, true as bound from perdure.wakeups
          where run_id = any ($1) and bound_key is not null
          union all
          select j.run_id, j.key, f ->> 'source', null, false from perdure.journal j, lateral jsonb_array_elements(j.data -> 'fired') f
          where j.run_id = any ($1)) x
        where source is not null group by run_id, key, source having bool_and(bound)
        union all
        select j.run_id, format('signal %s was taken by %s waits', f ->> 'source', count(*)) from perdure.journal j,
          lateral jsonb_array_elements(j.data -> 'fired') f
        where j.run_id = any ($1) and j.kind = 'wait' and f ->> 'kind' = 'signal' group by j.run_id, f ->> 'source' having count(*) > 1
        union all
        -- Stacked: what open waits listen to, and what has come that nobody took.
        select r.run_id, 'suspended with a matching unbound wakeup' from perdure.runs r
        where r.run_id = any ($1) and r.state = 'Suspended' and not r.paused and not r.spec_paused and (r.wake_due or r.run_id in (
          select run_id from (
            select c.run_id, c.kind, c.name, true as listens from perdure.waits s join perdure.wait_conditions c using (run_id, key)
            where s.run_id = any ($1) and s.state = 'open' and s.mode = 'any'
            union all
            select w.run_id, w.kind, unnest(array[w.name, w.source]), false from perdure.wakeups w
            where w.run_id = any ($1) and w.bound_key is null and w.seq is not null) x
          group by run_id, kind, name having bool_or(listens) and not bool_and(listens)))""",
    "6 one outcome an entry; SUCCEEDED has a receipt; intent before execution": """
        select run_id, format('%s is SUCCEEDED without a receipt', key) from perdure.ledger
        where run_id = any ($1) and state = 'SUCCEEDED' and response is null
        union all
        select l.run_id, format('%s has no intent in the log', l.key) from perdure.ledger l
        left join perdure.events e on e.run_id = l.run_id and e.seq = l.seq and e.kind = 'activity.started' and e.data ->> 'key' = l.key
        where l.run_id = any ($1) and e.seq is null
        union all
        select l.run_id, format('%s is RUNNING outside its lease', l.key) from perdure.ledger l join perdure.runs r using (run_id)
        where l.run_id = any ($1) and l.state = 'RUNNING' and (r.state <> 'Running' or r.epoch <> l.epoch)
        union all
        select run_id, format('%s succeeded %s times', data ->> 'key', count(*)) from perdure.events
        where run_id = any ($1) and kind = 'activity.succeeded' group by run_id, data ->> 'key' having count(*) > 1""",
    "7 the children of a terminal parent are cancelled or will be": f"""
        select c.run_id, 'the parent has ended, no cancel is on its way' from perdure.runs c join perdure.runs p on p.run_id = c.parent_id
        where c.run_id = any ($1)
          and p.state in {_TERMINAL} and c.state not in {_TERMINAL} and c.parent_policy <> 'detach' and not c.cancel_requested
          and not exists (select 1 from perdure.wakeups k where k.run_id = c.run_id and k.kind = 'cancel' and k.seq is null)""",
    "8 reservations stay within the budget": """
        select root_id, format('%s: %s reserved and %s used of %s', kind, reserved, used, maximum) from perdure.budgets
        where root_id = any ($1) and kind in ('steps', 'tool_calls', 'children') and reserved + used > maximum""",
    "10 the delivery that made a run is there": """
        select e.run_id, format('no delivery made it, though it says %s', e.data -> 'start' ->> 'id') from perdure.events e
        where e.run_id = any ($1) and e.seq = 1 and e.data ? 'start'
          and not exists (select 1 from perdure.deliveries d where d.run_id = e.run_id)""",
    "12 every child that was spawned exists, and was spawned": """
        select j.run_id, format('child %s does not exist', j.data ->> 'child') from perdure.journal j
        left join perdure.runs c on c.run_id = (j.data ->> 'child')::uuid
        where j.run_id = any ($1) and j.kind = 'spawn' and c.run_id is null
        union all
        -- Stacked: the children there are, and those that their parents know. Of whose parent is gone only the first is found.
        select child::uuid, 'its parent does not know it' from (
          select run_id::text as child, true as there from perdure.runs where parent_id = any ($1)
          union all
          select c.run_id::text, true from perdure.runs c
          where c.run_id = any ($1) and c.parent_id is not null and not exists (select 1 from perdure.runs p where p.run_id = c.parent_id)
          union all
          select data ->> 'child', false from perdure.journal where run_id = any ($1) and kind = 'spawn') x
        group by child having bool_and(there)
        union all
        select c.run_id, 'ended without telling its parent' from perdure.runs c
        where c.run_id = any ($1) and c.parent_id is not null and c.finished_at is not null
          and not exists (select 1 from perdure.wakeups k
                          where k.run_id = c.parent_id and k.kind = 'child_done' and k.source = c.run_id::text)""",
}

# What is not of one run. Asked once, and only when the whole store is checked.
STORE_CHECKS: dict[str, str] = {
    "1 no lease without a run": """
        select l.run_id, 'a lease without a run' from perdure.leases l
        where not exists (select 1 from perdure.runs r where r.run_id = l.run_id)""",
    "3 no log without a run": """
        with recursive logged (run_id) as (
          (select run_id from perdure.events order by run_id, seq limit 1)
          union all
          select (select e.run_id from perdure.events e where e.run_id > logged.run_id order by e.run_id, e.seq limit 1)
          from logged where logged.run_id is not null)
        select l.run_id, 'a log without a run' from logged l
        where l.run_id is not null and not exists (select 1 from perdure.runs r where r.run_id = l.run_id)""",
    "10 one delivery a dedup key, one run a delivery": """
        select min(delivery_id::text)::uuid, format('run %s has %s deliveries', run_id, count(*)) from perdure.deliveries
        where run_id is not null group by run_id having count(*) > 1
        union all
        select min(delivery_id::text)::uuid, format('%s fired %s times for %s', trigger_key, count(*), fire_at) from perdure.deliveries
        where source in ('schedule', 'interval', 'at') group by trigger_key, source, fire_at having count(*) > 1
        union all
        select delivery_id, format('%s, run %s, decision %s, closed %s', state, run_id, decision, closed_at) from perdure.deliveries
        where (run_id is not null) <> (state = 'DONE' and decision ->> 'action' = 'newRun')
           or (state = 'DONE') <> (decision is not null and decision ->> 'action' is distinct from 'drop')
           or (decision ->> 'action' = 'drop' and state <> 'FAILED')
           or (closed_at is null) <> (state in ('PENDING', 'CLAIMED')) or (payload is not null and state in ('DONE', 'FAILED'))
        union all
        select d.delivery_id, format('its key went to %s, which does not exist, or was not free', d.superseded_by)
        from perdure.deliveries d left join perdure.deliveries n on n.delivery_id = d.superseded_by
        where d.dedup_key like 'superseded:%'
          and (n.trigger_key is distinct from d.trigger_key or d.decision ->> 'action' is distinct from 'drop')
        union all
        select d.delivery_id, format('its run %s does not exist, or is another delivery''s', d.run_id) from perdure.deliveries d
        left join perdure.runs r using (run_id)
        where d.run_id is not null and r.idempotency_key is distinct from 'delivery:' || d.delivery_id
        union all
        select d.delivery_id, format('its trigger %s is unknown', d.trigger_key) from perdure.deliveries d
        where not exists (select 1 from perdure.triggers t where t.trigger_key = d.trigger_key)""",
    "11 pods are leased from idle and hold what they say": """
        select p.pod_id, format('%s with run %s', p.state, p.run_id) from perdure.pods p
        left join perdure.leases l on l.holder = p.pod_id
        where (p.run_id is distinct from l.run_id) or (p.state in ('idle', 'starting') and l.run_id is not null)""",
}

_NEXT = """
  select r.run_id, r.last_seq from perdure.runs r left join perdure.events e on e.run_id = r.run_id and e.seq = r.last_seq
  where ($1::uuid is null or r.run_id > $1) and ($2::double precision is null
    or ((r.finished_at is null or r.finished_at >= (select perdure.now()) - $2 * interval '1 second')
        and (e.at is null or e.at >= (select perdure.now()) - $2 * interval '1 second')))
  order by r.run_id limit $3
"""


async def check(
    connection: Connection, *, runs: Sequence[UUID] | None = None, since_seconds: float | None = None, progress: Progress | None = None
) -> AsyncIterator[Violation]:
    """Violations as they are found. ``runs``: only these; ``since_seconds``: only those whose last change is no older. In both cases what
    is not of one run (leases and logs without one, deliveries, pods) is left out."""
    progress = progress if progress is not None else Progress()
    if runs is None and since_seconds is None:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            async for violation in _ask(connection, STORE_CHECKS, (), progress):
                yield violation
    after: UUID | None = None
    while True:
        # The slice is chosen in the snapshot in which it is checked.
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            if runs is not None:
                found = await connection.fetch("select run_id, last_seq from perdure.runs where run_id = any ($1)", list(runs))
            else:
                found = await connection.fetch(_NEXT, after, since_seconds, RUNS_A_SLICE, timeout=QUERY_SECONDS)
            part = found if runs is not None else _first(found)
            if part:
                async for violation in _ask(connection, RUN_CHECKS, ([row["run_id"] for row in part],), progress):
                    yield violation
        progress.runs += len(part)
        progress.events += sum(row["last_seq"] for row in part)
        if runs is not None or (len(part) == len(found) and len(found) < RUNS_A_SLICE):
            return
        after = part[-1]["run_id"]


async def _ask(connection: Connection, checks: dict[str, str], arguments: Sequence[object], progress: Progress) -> AsyncIterator[Violation]:
    for invariant, query in checks.items():
        progress.invariant = invariant
        rows = await connection.fetch(f"{query}\nlimit {TOLD + 1}", *arguments, timeout=QUERY_SECONDS)
        for row in rows[:TOLD]:
            yield Violation(invariant, str(row[0]), row[1] or "")
        if len(rows) > TOLD:
            yield Violation(invariant, str(rows[TOLD][0]), f"and more: of the runs that were checked together only {TOLD} are told")


def _first(rows: Sequence[asyncpg.Record]) -> Sequence[asyncpg.Record]:
    """As many as have so many events together, at least one."""
    events = 0
    for count, row in enumerate(rows):
        events += row["last_seq"]
        if count and events > EVENTS_A_SLICE:
            return rows[:count]
    return rows
