-- What the background loops of every gateway look for. They only find; each finding becomes an operation of the batch on its run.

create or replace function perdure.due_runs(p_limit int) returns table (run_id uuid) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  return query
  select distinct d.run_id from (
    (select w.run_id from perdure.waits w where w.state = 'open' and w.due_at <= v_now order by w.due_at limit p_limit)
    union all
    (select q.run_id from perdure.runs q where q.expires_at <= v_now and q.state in ('Pending', 'Running', 'Suspended') order by q.expires_at limit p_limit)
  ) d;
end $$;

create or replace function perdure.unapplied_runs(p_limit int) returns table (run_id uuid) language sql as
$$ select distinct w.run_id from (select u.run_id from perdure.wakeups u where u.seq is null limit p_limit * 20) w limit p_limit $$;

-- Leases whose last beat is older than the lease, with how many live leases there are in all (R6).
create or replace function perdure.silent_leases(p_lease_seconds double precision)
returns table (run_id uuid, epoch int, holder uuid, silent_seconds double precision, live bigint) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  return query
  select l.run_id, l.epoch, l.holder, extract(epoch from v_now - l.beat_at)::double precision, (select count(*) from perdure.leases)
  from perdure.leases l where l.beat_at <= v_now - p_lease_seconds * interval '1 second' order by l.beat_at limit 1000;
end $$;

-- Net below the wakes (W2): suspended runs with a decided or decidable wait that nobody woke. Each is counted as a bug.
create or replace function perdure.missed_wakes(p_older_seconds double precision) returns table (run_id uuid) language sql as $$
  select q.run_id from perdure.runs q
  where q.state = 'Suspended' and not q.paused and not q.spec_paused and q.state_since < perdure.now() - p_older_seconds * interval '1 second'
    and (q.wake_due or exists (
      select 1 from perdure.wakeups w join perdure.waits s on s.run_id = w.run_id and s.state = 'open' and s.mode = 'any'
      join perdure.wait_conditions c on c.run_id = s.run_id and c.key = s.key and c.kind = w.kind and c.name in (w.name, w.source)
      where w.run_id = q.run_id and w.bound_key is null and w.seq is not null))
  limit 100
$$;

-- Fleet: what each pool, or this one, has and needs.
create or replace function perdure.pool_demand(p_pool text default null)
returns table (pool text, spec jsonb, runnable bigint, idle bigint, starting bigint, leased bigint, retiring uuid[], trouble jsonb, lost uuid[])
language sql as $$
  select p.pool, p.spec,
    (select count(*) from perdure.runs r where r.pool = p.pool and r.state = 'Pending' and r.runnable_at <= perdure.now()),
    (select count(*) from perdure.pods d where d.pool = p.pool and d.state = 'idle'),
    (select count(*) from perdure.pods d where d.pool = p.pool and d.state = 'starting'),
    (select count(*) from perdure.pods d where d.pool = p.pool and d.state = 'leased'),
    array(select d.pod_id from perdure.pods d where d.pool = p.pool and d.state = 'retiring'), p.trouble,
    array(select d.pod_id from perdure.pods d where d.pool = p.pool and d.state = 'retiring' and d.lost)
  from perdure.pools p where p_pool is null or p.pool = p_pool order by p.pool
$$;

create or replace function perdure.retire_idle(p_pool text, p_count int) returns setof uuid language sql as $$
  update perdure.pods set state = 'retiring', since = perdure.now()
  where pod_id in (select pod_id from perdure.pods where pool = p_pool and state = 'idle' order by since limit p_count for update skip locked)
  returning pod_id
$$;

-- Somebody is ending these pods. One that has a run keeps it for as long as its processes live. Locked in the order of their runs, as by a batch.
create or replace function perdure.take_away(p_pods uuid[]) returns void language sql as $$
  update perdure.pods set state = 'retiring', since = perdure.now()
  where pod_id in (select pod_id from perdure.pods where pod_id = any (p_pods) and state <> 'retiring' order by run_id, pod_id for update)
$$;

create or replace function perdure.retire_silent_pods(p_silent_seconds double precision) returns bigint language sql as $$
  with gone as (
    update perdure.pods p set state = 'retiring', since = perdure.now()
    where p.state in ('idle', 'starting', 'leased') and p.run_id is null and p.seen_at < perdure.now() - p_silent_seconds * interval '1 second'
    returning 1)
  select count(*) from gone
$$;

-- A pod's process has ended. Whatever state it was in, it is retiring now and its row goes; its lease, if any, comes back to be expired.
-- `p_proven`: its containers were seen terminated; a pod that was deleted by force may still act for a while.
create or replace function perdure.pod_gone(p_pod uuid, p_proven boolean default true) returns table (run_id uuid, epoch int) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  -- A batch that is just ending its lease is waited for here, so that what it leaves UNKNOWN is seen below.
  perform 1 from perdure.leases l where l.holder = p_pod for update;
  update perdure.pods set state = 'retiring', run_id = null, since = v_now where pod_id = p_pod;
  delete from perdure.pods where pod_id = p_pod and state = 'retiring';
  if p_proven then
    -- For the lease that it holds yet, also if nothing of it is UNKNOWN: a call that it began may be on its way into the store.
    insert into perdure.executors (run_id, epoch, pod_id, lost_at) select l.run_id, l.epoch, l.holder, v_now from perdure.leases l where l.holder = p_pod
    on conflict do nothing;
    perform perdure.executors_gone('pod-ended', v_now, p_pod);
  end if;
  return query select l.run_id, l.epoch from perdure.leases l where l.holder = p_pod;
end $$;
