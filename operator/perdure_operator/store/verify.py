"""``perdure verify``: the invariants of the store, each as a query that finds violations. Run after every test that touches the store."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy


@dataclass(frozen=True, slots=True)
class Violation:
    """``invariant``: number and name; ``run``: the run (or pod) concerned; ``detail``: what was found."""

    invariant: str
    run: str
    detail: str


_TERMINAL = "('Succeeded', 'Failed', 'Cancelled')"

# Each query gives (id, detail) of every violation.
CHECKS: dict[str, str] = {
    "1 one live lease, of the current epoch, exactly while Running": """
        select r.run_id, format('state %s, epoch %s, holder %s; lease epoch %s, holder %s', r.state, r.epoch, r.holder, l.epoch, l.holder)
        from perdure.runs r left join perdure.leases l using (run_id)
        where (r.state = 'Running') <> (l.run_id is not null) or (r.state = 'Running') <> (r.holder is not null)
           or (l.run_id is not null and (l.epoch <> r.epoch or l.holder <> r.holder))
        union all
        select l.run_id, 'a lease without a run' from perdure.leases l
        where not exists (select 1 from perdure.runs r where r.run_id = l.run_id)
        union all
        select e.run_id, format('epoch falls at %s', e.seq) from (
          select run_id, seq, epoch, lag(epoch) over (partition by run_id order by seq) as before from perdure.events) e
        where e.epoch < e.before
        union all
        select run_id, format('epoch %s was leased %s times', epoch, count(*)) from perdure.events where kind = 'run.leased'
        group by run_id, epoch having count(*) > 1""",
    "2 no row under another epoch than the one current at its commit": """
        select j.run_id, format('journal %s: epoch %s, its event %s has epoch %s', j.key, j.epoch, j.seq, e.epoch)
        from perdure.journal j left join perdure.events e using (run_id, seq) where e.epoch is distinct from j.epoch
        union all
        select c.run_id, format('checkpoint %s: epoch %s, its event has %s', c.seq, c.epoch, e.epoch)
        from perdure.checkpoints c left join perdure.events e using (run_id, seq) where e.epoch is distinct from c.epoch
        union all
        select e.run_id, format('%s at %s was written outside a lease of epoch %s', e.kind, e.seq, e.epoch) from perdure.events e
        where (e.kind like 'step.%' or e.kind like 'agent.%'
               or e.kind in ('wait.opened', 'child.spawned', 'checkpoint.saved', 'activity.started'))
          and not exists (select 1 from perdure.events l
                          where l.run_id = e.run_id and l.kind = 'run.leased' and l.epoch = e.epoch and l.seq < e.seq
                            and not exists (select 1 from perdure.events x where x.run_id = l.run_id and x.seq > l.seq and x.seq < e.seq
                                            and x.data ->> 'from' = 'Running'))""",
    "3 dense log, fold(log) equals the row": f"""
        select r.run_id, format('last_seq %s, %s events from %s to %s', r.last_seq, count(e.seq), min(e.seq), max(e.seq))
        from perdure.runs r left join perdure.events e using (run_id)
        group by r.run_id, r.last_seq having count(e.seq) <> r.last_seq or max(e.seq) is distinct from r.last_seq or min(e.seq) <> 1
        union all
        select r.run_id, format('row: %s, epoch %s, attempt %s; log: %s', r.state, r.epoch, r.attempt, f.data)
        from perdure.runs r
        join lateral (select data from perdure.events e where e.run_id = r.run_id and e.data ? 'to' and e.kind like 'run.%'
                      order by seq desc limit 1) f on true
        where r.state <> f.data ->> 'to' or r.epoch <> (f.data ->> 'epoch')::int or r.attempt <> (f.data ->> 'attempt')::int
        union all
        select r.run_id, format('%s steps in the row, %s in the log', r.steps, s.steps) from perdure.runs r
        join lateral (select count(*) as steps from perdure.events e where e.run_id = r.run_id and e.kind like 'step.%') s on true
        where r.steps <> s.steps
        union all
        select r.run_id, 'the cancel flag differs from the log' from perdure.runs r
        where r.cancel_requested <> exists (select 1 from perdure.events e where e.run_id = r.run_id and e.kind = 'run.cancel_requested')
          and r.state not in {_TERMINAL}""",
    "4 a terminal run never changes": f"""
        select e.run_id, format('%s at %s after the end', e.kind, e.seq) from perdure.events e
        join perdure.events t on t.run_id = e.run_id and t.kind in ('run.succeeded', 'run.failed', 'run.cancelled') and e.seq > t.seq
        union all
        select run_id, 'finished_at and state disagree' from perdure.runs where (finished_at is not null) <> (state in {_TERMINAL})
        union all
        select w.run_id, format('wait %s is open', w.key) from perdure.waits w join perdure.runs r using (run_id)
        where w.state = 'open' and r.state in {_TERMINAL}""",
    "5 a wakeup is bound to at most one wait; no suspended run sleeps over one": """
        select k.run_id, format('%s %s is bound to %s, which did not take it', k.kind, k.source, k.bound_key) from perdure.wakeups k
        left join perdure.journal j on j.run_id = k.run_id and j.key = k.bound_key
        where k.bound_key is not null
          and not coalesce(j.data -> 'fired' @> jsonb_build_array(jsonb_build_object('source', k.source)), false)
        union all
        select j.run_id, format('signal %s was taken by %s waits', f ->> 'source', count(*)) from perdure.journal j,
          lateral jsonb_array_elements(j.data -> 'fired') f
        where j.kind = 'wait' and f ->> 'kind' = 'signal' group by j.run_id, f ->> 'source' having count(*) > 1
        union all
        select run_id, 'suspended with a matching unbound wakeup' from perdure.missed_wakes(0, 1e9)""",
    "6 one outcome an entry; SUCCEEDED has a receipt; intent before execution": """
        select run_id, format('%s is SUCCEEDED without a receipt', key) from perdure.ledger where state = 'SUCCEEDED' and response is null
        union all
        select l.run_id, format('%s has no intent in the log', l.key) from perdure.ledger l
        left join perdure.events e on e.run_id = l.run_id and e.seq = l.seq and e.kind = 'activity.started' and e.data ->> 'key' = l.key
        where e.seq is null
        union all
        select l.run_id, format('%s is RUNNING outside its lease', l.key) from perdure.ledger l join perdure.runs r using (run_id)
        where l.state = 'RUNNING' and (r.state <> 'Running' or r.epoch <> l.epoch)
        union all
        select run_id, format('%s succeeded %s times', data ->> 'key', count(*)) from perdure.events
        where kind = 'activity.succeeded' group by run_id, data ->> 'key' having count(*) > 1""",
    "7 the children of a terminal parent are cancelled or will be": f"""
        select c.run_id, 'the parent has ended, no cancel is on its way' from perdure.runs c join perdure.runs p on p.run_id = c.parent_id
        where p.state in {_TERMINAL} and c.state not in {_TERMINAL} and c.parent_policy <> 'detach' and not c.cancel_requested
          and not exists (select 1 from perdure.wakeups k where k.run_id = c.run_id and k.kind = 'cancel' and k.seq is null)""",
    "8 reservations stay within the budget": """
        select root_id, format('%s: %s reserved and %s used of %s', kind, reserved, used, maximum) from perdure.budgets
        where kind in ('steps', 'tool_calls', 'children') and reserved + used > maximum""",
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
        select e.run_id, format('no delivery made it, though it says %s', e.data -> 'start' ->> 'id') from perdure.events e
        where e.seq = 1 and e.data ? 'start' and not exists (select 1 from perdure.deliveries d where d.run_id = e.run_id)
        union all
        select d.delivery_id, format('its trigger %s is unknown', d.trigger_key) from perdure.deliveries d
        where not exists (select 1 from perdure.triggers t where t.trigger_key = d.trigger_key)""",
    "11 pods are leased from idle and hold what they say": """
        select p.pod_id, format('%s with run %s', p.state, p.run_id) from perdure.pods p
        left join perdure.leases l on l.holder = p.pod_id
        where (p.run_id is distinct from l.run_id) or (p.state in ('idle', 'starting') and l.run_id is not null)""",
    "12 every child that was spawned exists, and was spawned": """
        select j.run_id, format('child %s does not exist', j.data ->> 'child') from perdure.journal j
        left join perdure.runs c on c.run_id = (j.data ->> 'child')::uuid where j.kind = 'spawn' and c.run_id is null
        union all
        select c.run_id, 'its parent does not know it' from perdure.runs c
        where c.parent_id is not null and not exists (
          select 1 from perdure.journal j where j.run_id = c.parent_id and j.kind = 'spawn' and j.data ->> 'child' = c.run_id::text)
        union all
        select c.run_id, 'ended without telling its parent' from perdure.runs c
        where c.parent_id is not null and c.finished_at is not null
          and not exists (select 1 from perdure.wakeups k
                          where k.run_id = c.parent_id and k.kind = 'child_done' and k.source = c.run_id::text)""",
}


async def check(connection: Connection) -> list[Violation]:
    """All violations, from one snapshot."""
    found = []
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for invariant, query in CHECKS.items():
            # missed_wakes asks for the clock, which is a plain read.
            for row in await connection.fetch(query):
                found.append(Violation(invariant, str(row[0]), row[1] or ""))
    return found
