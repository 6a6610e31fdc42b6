-- Indexes by which the loops read what is due, and not what exists.

-- The queue of a pool. Of one tenant and priority the order by rank is the order by runnable_at (rank = runnable_at - 60 s * priority), so a look
-- that ends at the present reads no run in back-off. It takes the place of the index by rank, which had to read them all.
create index runs_queue on perdure.runs (pool, namespace, priority, runnable_at) where state = 'Pending';
drop index perdure.runs_runnable;
-- Whether a pool has anything that could be leased now, and how much. On an expression, so that it serves only who names that: for one tenant's
-- part of the queue it would have to be read whole, and without statistics Postgres would take it.
create index runs_due on perdure.runs ((pool || ''), runnable_at) where state = 'Pending';

-- The sweep (perdure.missed_wakes): who fell asleep lately, which wakeups came lately and wait for a wait, and who should have been woken: nobody.
create index runs_asleep on perdure.runs (state_since) where state = 'Suspended';
create index runs_unwoken on perdure.runs (state_since) where state = 'Suspended' and wake_due and not paused and not spec_paused;
create index wakeups_unbound_since on perdure.wakeups (at) where bound_key is null and seq is not null;
