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

-- Leases whose last beat is older than the lease: the oldest thousand. (What it gives is read by position by the version before.)
create or replace function perdure.silent_leases(p_lease_seconds double precision)
returns table (run_id uuid, epoch int, holder uuid, silent_seconds double precision, live bigint) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  return query
  select l.run_id, l.epoch, l.holder, extract(epoch from v_now - l.beat_at)::double precision, (select count(*) from perdure.leases)
  from perdure.leases l where l.beat_at <= v_now - p_lease_seconds * interval '1 second' order by l.beat_at limit 1000;
end $$;

-- How many leases there are, and how many of them are silent (R6). Apart from the list: its end says nothing of how many there are.
create or replace function perdure.lease_silence(p_lease_seconds double precision) returns table (live bigint, silent bigint) language plpgsql as $$
declare
  v_until timestamptz := perdure.now() - p_lease_seconds * interval '1 second';
begin
  return query select count(*), count(*) filter (where l.beat_at <= v_until) from perdure.leases l;
end $$;

-- Net below the wakes (W2): suspended runs with a decided or decidable wait that nobody woke. Each is counted as a bug.
-- What may have been missed began when a run fell asleep or when a wakeup came, so only what did so in the last p_within_seconds is read:
-- runs that sleep for longer were looked at then. (Not before p_older_seconds: it may be on its way.) `p_besides`: found by this sweep before.
create or replace function perdure.missed_wakes(
  p_older_seconds double precision, p_within_seconds double precision default 3600, p_besides uuid[] default '{}', p_limit int default 100)
returns table (run_id uuid) language plpgsql set plan_cache_mode = force_custom_plan as $$
declare
  v_now timestamptz := perdure.now();
  v_from timestamptz := v_now - p_within_seconds * interval '1 second';
  v_until timestamptz := v_now - p_older_seconds * interval '1 second';
begin
  return query
  with suspects as (
    select q.run_id from perdure.runs q where q.state = 'Suspended' and q.state_since between v_from and v_until
    union
    select w.run_id from perdure.wakeups w where w.bound_key is null and w.seq is not null and w.at between v_from and v_until
  ), overslept as (
    select q.run_id from perdure.runs q where q.state = 'Suspended' and q.wake_due and not q.paused and not q.spec_paused and q.state_since < v_until
    union
    select s.run_id from suspects s join perdure.runs q using (run_id)
    where q.state = 'Suspended' and not q.paused and not q.spec_paused and q.state_since < v_until and exists (
      select 1 from perdure.wakeups w join perdure.waits o on o.run_id = w.run_id and o.state = 'open' and o.mode = 'any'
      join perdure.wait_conditions c on c.run_id = o.run_id and c.key = o.key and c.kind = w.kind and c.name in (w.name, w.source)
      where w.run_id = q.run_id and w.bound_key is null and w.seq is not null)
  )
  select o.run_id from overslept o where o.run_id <> all (p_besides) limit p_limit;
end $$;

-- Fleet: what each pool, or this one, has and needs. `spec` is null where it has not changed since p_since: it is the widest part, and the
-- fleet asks ten times a second. Counts of runs end at p_most: nobody starts more pods than that.
create or replace function perdure.pool_demand(p_pool text default null, p_since timestamptz default null, p_most int default null)
returns table (pool text, spec jsonb, runnable bigint, idle bigint, starting bigint, leased bigint, retiring uuid[], trouble jsonb,
               lost uuid[], updated_at timestamptz) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  return query
  with pods as (
    select d.pool, count(*) filter (where d.state = 'idle') as idle, count(*) filter (where d.state = 'starting') as starting,
      count(*) filter (where d.state = 'leased') as leased, array_agg(d.pod_id) filter (where d.state = 'retiring') as retiring,
      array_agg(d.pod_id) filter (where d.state = 'retiring' and d.lost) as lost
    from perdure.pods d where p_pool is null or d.pool = p_pool group by d.pool
  )
  select p.pool, case when p_since is null or p.updated_at > p_since then p.spec end,
    (select count(*) from (select 1 from perdure.runs r where r.pool || '' = p.pool and r.state = 'Pending' and r.runnable_at <= v_now limit p_most) q),
    coalesce(d.idle, 0), coalesce(d.starting, 0), coalesce(d.leased, 0), coalesce(d.retiring, '{}'), p.trouble, coalesce(d.lost, '{}'),
    p.updated_at
  from perdure.pools p left join pods d using (pool) where p_pool is null or p.pool = p_pool order by p.pool;
end $$;

-- Pods change under their run's lock (a lease, a release), or, without it, by a statement that waits for no pod while it has another: it passes
-- over what is locked, as the two below do, or changes a single one.
create or replace function perdure.retire_idle(p_pool text, p_count int) returns setof uuid language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  return query update perdure.pods set state = 'retiring', since = v_now
    where pod_id in (select pod_id from perdure.pods where pool = p_pool and state = 'idle' order by since limit p_count for update skip locked)
    returning pod_id;
end $$;

-- Idle pods, and those between two runs, of which no gateway has heard for so long. One that starts is the fleet's: an image that is pulled, or a
-- node that is waited for, may take as long as it likes.
create or replace function perdure.retire_silent_pods(p_silent_seconds double precision) returns bigint language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
  v_count bigint;
begin
  update perdure.pods set state = 'retiring', since = v_now where pod_id in (
    select p.pod_id from perdure.pods p
    where p.state in ('idle', 'leased') and p.run_id is null and p.seen_at < v_now - p_silent_seconds * interval '1 second'
    for update skip locked);
  get diagnostics v_count = row_count;
  return v_count;
end $$;

-- Somebody is ending this pod. If it has a run it keeps it for as long as its processes live. One pod a transaction: see above.
create or replace function perdure.take_pod_away(p_pod uuid) returns void language sql as $$
  update perdure.pods set state = 'retiring', since = (select perdure.now()) where pod_id = p_pod and state <> 'retiring'
$$;

-- What gateways of the version before call.
create or replace function perdure.take_away(p_pods uuid[]) returns void language sql as $$
  update perdure.pods set state = 'retiring', since = (select perdure.now())
  where pod_id in (select pod_id from perdure.pods where pod_id = any (p_pods) and state <> 'retiring' for update skip locked)
$$;

-- Takes a pod that starts or waits out of service; one that has a run keeps it.
create or replace function perdure.retire_pod(p_pod uuid) returns void language sql as $$
  update perdure.pods set state = 'retiring', since = (select perdure.now()) where pod_id = p_pod and state in ('starting', 'idle')
$$;

-- A pod's process has ended. Whatever state it was in, it is retiring now and its row goes; its lease, if any, comes back to be expired.
-- `p_proven`: its containers were seen terminated; a pod that was deleted by force may still act for a while.
create or replace function perdure.pod_gone(p_pod uuid, p_proven boolean default true) returns table (run_id uuid, epoch int) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  -- The run first, as everybody who changes what belongs to it: a batch of its that is under way is waited for here, so that what it leaves
  -- UNKNOWN is seen below, and nothing of it can be waited for later, with the lease in hand.
  perform 1 from perdure.runs q where q.run_id = (select l.run_id from perdure.leases l where l.holder = p_pod) for no key update;
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
