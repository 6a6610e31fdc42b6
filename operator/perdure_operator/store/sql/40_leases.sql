-- Who may run, and on which pod. One admission function serves the dispatcher, the direct path and `why` (L4, W6).
-- Lock order here as everywhere: runs by id, then leases, then pods.

-- Null when the run may be leased now; otherwise the reason why not.
create or replace function perdure.admits(r perdure.runs, p_now timestamptz) returns text language sql stable as $$
  select case
    when r.state <> 'Pending' then 'NotPending'
    when r.cancel_requested then 'CancelRequested'
    when r.paused or r.spec_paused then 'Paused'
    when perdure.expiry(r) <= p_now then 'DeadlineExceeded'
    when r.runnable_at > p_now then 'BackOff'
    when p.pool is null then 'PoolNotFound'
    -- Asked only where there is a limit: to count costs as much as there runs.
    when p.max_running is not null
      and p.max_running <= (select count(*) from perdure.leases l join perdure.runs x using (run_id) where x.pool = r.pool) then 'PoolLimit'
    when t.max_running is not null and t.max_running <= (select count(*) from perdure.runs x where x.namespace = r.namespace and x.state = 'Running'
                             and x.run_id <> r.run_id) then 'TenantLimit'
  end
  from (select r.pool as pool_name) q left join perdure.pools p on p.pool = q.pool_name
  left join perdure.tenants t on t.namespace = r.namespace
$$;

-- Where running runs are limited, one transaction at a time admits them: two that count at once would pass the limit together. Nobody waits
-- for another here; who does not get the lock leaves the run to the next look.
create or replace function perdure.lock_limits(r perdure.runs) returns boolean language sql volatile as $$
  select coalesce(bool_and(pg_try_advisory_xact_lock(hashtextextended(l.name, 0))), true) from (
    select 'perdure pool ' || p.pool as name from perdure.pools p where p.pool = r.pool and p.max_running is not null
    union all
    select 'perdure tenant ' || t.namespace from perdure.tenants t where t.namespace = r.namespace and t.max_running is not null) l
$$;

-- Gives a locked run to one of the pods, if it is admitted and one is still idle. Otherwise the row comes back as it was.
create or replace function perdure.grant(r perdure.runs, p_pods uuid[], p_gateway text, p_now timestamptz) returns perdure.runs language plpgsql as $$
declare
  v_pod uuid;
  v_revision text;
begin
  if not perdure.lock_limits(r) then
    return r;
  end if;
  -- A statement of its own, later than the locks: the same expression would count with a snapshot from before them, and two transactions
  -- that each see room for one more run would both admit one.
  if perdure.admits(r, p_now) is not null then
    return r;
  end if;
  -- One look a pod until one will do: the table may hold thousands, and these are at hand.
  select p.pod_id, p.revision into v_pod, v_revision from unnest(p_pods) u(id) cross join lateral (
    select q.pod_id, q.revision from perdure.pods q
    where q.pod_id = u.id and q.pool = r.pool and q.state = 'idle' and q.gateway = p_gateway for update skip locked) p
  limit 1;
  if v_pod is null then
    return r;
  end if;
  update perdure.pods set state = 'leased', run_id = r.run_id, since = p_now, charged_run = null where pod_id = v_pod;
  -- That of the template: what the installation adds to it is no code of the agent.
  r.revision := nullif(split_part(v_revision, '-', 1), '');
  return perdure.move(r, 'lease', 'Leased', '', p_now,
    jsonb_strip_nulls(jsonb_build_object('pod', v_pod, 'gateway', p_gateway, 'revision', r.revision)));
end $$;

-- The direct path: a run that an operation just made Pending goes to an idle pod of the same gateway in the same commit, unless
-- something else of that pool has been waiting for one.
create or replace function perdure.grant_directly(r perdure.runs, p_pods uuid[], p_gateway text, p_now timestamptz)
returns perdure.runs language plpgsql as $$
begin
  if exists (select 1 from perdure.runs q
             where q.pool || '' = r.pool and q.state = 'Pending' and q.runnable_at <= p_now and q.run_id <> r.run_id) then
    return r;
  end if;
  return perdure.grant(r, p_pods, p_gateway, p_now);
end $$;

-- The next candidates of a pool, best first. Between tenants by running share over weight, inside a tenant by rank: enqueued time minus a
-- minute for each point of priority, so that age beats any priority in the end. A tenant that has nothing running in this pool and has waited
-- for a minute comes first: otherwise a tenant whose weight is larger than the pool would leave the others nothing, ever.
--
-- After the p_limit best come up to p_spare more, which stand in for those that somebody has locked. A tenant's limit is no bound for them:
-- the run that they stand in for counts there and is not granted. (perdure.grant decides about each, under the lock.)
--
-- Runs in back-off are not read, however many there are: of one tenant and priority the order by rank is that by runnable_at, so the index
-- runs_queue ends where the future begins.
create or replace function perdure.runnable(p_pool text, p_limit int, p_now timestamptz, p_spare int default 0)
returns setof uuid language sql stable as $$
  with recursive queue (namespace, priority) as (
    (select namespace, priority from perdure.runs where pool = p_pool and state = 'Pending' order by namespace, priority limit 1)
    union all
    select n.namespace, n.priority from queue cross join lateral (
      select q.namespace, q.priority from perdure.runs q
      where q.pool = p_pool and q.state = 'Pending' and (q.namespace, q.priority) > (queue.namespace, queue.priority)
      order by q.namespace, q.priority limit 1) n
  ), best as (
    select b.*, row_number() over (partition by b.namespace order by b.rank) as nth
    from queue cross join lateral (
      select q.run_id, q.namespace, q.rank, q.runnable_at from perdure.runs q
      where q.pool = p_pool and q.namespace = queue.namespace and q.priority = queue.priority and q.state = 'Pending'
        and q.runnable_at <= p_now and (q.expires_at is null or q.expires_at > p_now)
      order by q.runnable_at limit p_limit + p_spare) b
  ), placed as (
    select c.run_id,
      row_number() over (
        order by coalesce(u.running + c.nth > t.max_running, false),
                 case when u.here = 0 and c.nth = 1 and c.runnable_at <= p_now - interval '60 seconds' then 0
                      else (u.running + c.nth) / coalesce(t.weight, 1) end, c.rank) as place,
      coalesce(u.running + c.nth > t.max_running, false) as stands_in
    from (select distinct namespace from best) tenant
    left join perdure.tenants t on t.namespace = tenant.namespace
    cross join lateral (select count(*) as running, count(*) filter (where x.pool = p_pool) as here
                        from perdure.runs x where x.namespace = tenant.namespace and x.state = 'Running') u
    join best c on c.namespace = tenant.namespace
    where t.max_running is null or u.running < t.max_running
  )
  select run_id from placed where not stands_in and place <= p_limit or p_spare > 0 order by place limit p_limit + p_spare
$$;

-- Where a run could be leased now.
create or replace function perdure.runnable_pools(p_pools text[]) returns setof text language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  return query select p from unnest(p_pools) p
    where exists (select 1 from perdure.runs q where q.pool || '' = p and q.state = 'Pending' and q.runnable_at <= v_now); -- runs_due
end $$;

-- Claims runnable runs for the idle pods of one gateway.
create or replace function perdure.dispatch(p_gateway text, p_pods uuid[]) returns table (run_id uuid, epoch int, pod_id uuid) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
  v_pool record;
  r perdure.runs;
begin
  for v_pool in select p.pool, count(*)::int as idle from perdure.pods p
      where p.pod_id = any (p_pods) and p.state = 'idle' and p.gateway = p_gateway group by p.pool loop
    -- More candidates than pods: who sits on the first run of the queue must not stop the pool. Only as many as there are pods are locked,
    -- the best that are free; nobody is waited for, so their order is no matter of deadlocks.
    for r in
      select q.* from perdure.runnable(v_pool.pool, v_pool.idle, v_now, 32) with ordinality n(run_id, place)
      join perdure.runs q on q.run_id = n.run_id and q.state = 'Pending'
      order by n.place limit v_pool.idle for no key update of q skip locked
    loop
      r := perdure.grant(r, p_pods, p_gateway, v_now);
      if r.state = 'Running' then
        perform perdure.save(r);
        p_pods := array_remove(p_pods, r.holder);
        run_id := r.run_id; epoch := r.epoch; pod_id := r.holder;
        return next;
      end if;
    end loop;
  end loop;
end $$;

-- One call a gateway a beat. Gives back the leases that are live, with what their pods must know; a pair that does not come back is lost.
-- It holds no run's lock, so it must not wait for rows that a batch has: what is locked is being worked on and can do without this beat.
-- `silent_seconds` says how long it has done without already.
create or replace function perdure.heartbeat(p_gateway text, p_runs uuid[], p_epochs int[], p_pods uuid[], p_idle uuid[])
returns table (run_id uuid, cancel boolean, pause boolean, silent_seconds double precision) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
begin
  -- Not the gateway: a pod is where it said hello last, and an old connection of it may still beat elsewhere.
  update perdure.leases l set beat_at = v_now
  where l.run_id in (
    select x.run_id from unnest(p_runs, p_epochs, p_pods) b(run_id, epoch, pod)
    join perdure.leases x on x.run_id = b.run_id and x.epoch = b.epoch and x.holder = b.pod
    order by x.run_id for update of x skip locked);
  update perdure.pods set seen_at = v_now
  where pod_id in (select d.pod_id from perdure.pods d where d.pod_id = any (p_idle) and d.gateway = p_gateway and d.seen_at < v_now - interval '5 seconds'
                   order by d.pod_id for update skip locked);
  return query
  select r.run_id, r.cancel_requested, r.paused or r.spec_paused, extract(epoch from v_now - l.beat_at)::double precision
  from unnest(p_runs, p_epochs, p_pods) b(run_id, epoch, pod)
  join perdure.leases l on l.run_id = b.run_id and l.epoch = b.epoch and l.holder = b.pod
  join perdure.runs r on r.run_id = l.run_id;
end $$;

-- A beat of one lease, for which it waits a moment: it holds nothing else that anybody could wait for.
create or replace function perdure.renew(p_run uuid, p_epoch int, p_pod uuid) returns void language plpgsql set lock_timeout = '250ms' as $$
begin
  update perdure.leases set beat_at = (select perdure.now()) where run_id = p_run and epoch = p_epoch and holder = p_pod;
exception when lock_not_available then
  null; -- somebody sits on it: that must cost no other lease its beat
end $$;

-- A gateway marked news as told and could not bring them, or never got them. `p_run`: only those of this run.
create or replace function perdure.tell_again(p_gateway text, p_run uuid default null) returns void language sql as $$
  update perdure.leases set poke = poke + 1
  where run_id in (select run_id from perdure.leases where gateway = p_gateway and (p_run is null or run_id = p_run) order by run_id for update)
$$;

-- Leases of this gateway whose holder has not heard the latest.
create or replace function perdure.news(p_gateway text)
returns table (run_id uuid, epoch int, cancel boolean, pause boolean, outcomes jsonb, signals text[]) language plpgsql as $$
declare
  v_fresh uuid[];
begin
  with fresh as (
    update perdure.leases set told = poke
    where leases.run_id in (
      select l.run_id from perdure.leases l where l.gateway = p_gateway and l.told < l.poke order by l.run_id for update skip locked)
    returning leases.run_id
  )
  select array_agg(f.run_id) into v_fresh from fresh f;
  if v_fresh is null then
    return;
  end if;
  -- A later statement than the mark: what was marked may have been committed after the mark's snapshot was taken, and would be left out by it.
  return query
  select l.run_id, l.epoch, r.cancel_requested, r.paused or r.spec_paused,
    (select jsonb_object_agg(j.key, perdure.outcome(j.run_id, j.key)) from perdure.journal j
     where j.run_id = l.run_id and j.kind = 'wait' and j.state in ('satisfied', 'timed_out') and j.epoch = l.epoch),
    array(select distinct w.name from perdure.wakeups w where w.run_id = l.run_id and w.kind = 'signal' and w.bound_key is null)
  from perdure.leases l join perdure.runs r using (run_id) where l.run_id = any (v_fresh) and l.gateway = p_gateway;
end $$;

-- A pod says hello. Gives the lease that it holds (delivered again), or makes it idle, or lets it start until its agent is there (not
-- p_ready). `retiring`: it may not serve. `superseded`: it has connected again since (p_connection), here or elsewhere; this hello is void.
create or replace function perdure.pod_hello(
  p_pod uuid, p_pool text, p_gateway text, p_reuse boolean, p_ready boolean, p_connection bigint, p_run uuid, p_epoch int)
returns table (status text, run_id uuid, epoch int) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
  v_pod perdure.pods;
  v_lease perdure.leases;
begin
  select l.* into v_lease from perdure.leases l where l.holder = p_pod for update;
  if found then
    update perdure.pods set gateway = p_gateway, connection = p_connection, seen_at = v_now where pod_id = p_pod and connection <= p_connection;
    if not found then
      return query select 'superseded', null::uuid, null::int;
      return;
    end if;
    update perdure.leases l set gateway = p_gateway, beat_at = v_now, poke = poke + 1 where l.run_id = v_lease.run_id;
    return query select 'leased', v_lease.run_id, v_lease.epoch;
    return;
  end if;
  insert into perdure.pods (pod_id, pool, state, reuse, gateway, since, seen_at)
  values (p_pod, p_pool, 'starting', p_reuse, p_gateway, v_now, v_now) on conflict do nothing;
  select * into v_pod from perdure.pods where pod_id = p_pod for update;
  if v_pod.connection > p_connection then
    return query select 'superseded', null::uuid, null::int;
    return;
  end if;
  update perdure.pods set connection = p_connection where pod_id = p_pod;
  -- A later statement than the lock: while we waited for it, a gateway that this pod has left may have granted it a run.
  select l.* into v_lease from perdure.leases l where l.holder = p_pod;
  if found then
    update perdure.pods set gateway = p_gateway, reuse = p_reuse, seen_at = v_now where pod_id = p_pod;
    return query select 'leased', v_lease.run_id, v_lease.epoch; -- the row of the lease follows: lease_moves
  elsif v_pod.pool <> p_pool or v_pod.state = 'retiring' then
    return query select 'retire', null::uuid, null::int;
  elsif p_run is not null then
    -- It believes in a lease that is over. A reusing pod becomes idle by saying so when it has cleaned up.
    update perdure.pods set gateway = p_gateway, reuse = p_reuse, seen_at = v_now,
      state = case when p_reuse then state else 'retiring' end where pod_id = p_pod;
    return query select 'lost', p_run, p_epoch;
  else
    update perdure.pods set gateway = p_gateway, reuse = p_reuse, seen_at = v_now, since = v_now,
      state = case when not p_reuse and state not in ('starting', 'idle') then 'retiring' when p_ready then 'idle' else 'starting' end
    where pod_id = p_pod returning * into v_pod;
    return query select v_pod.state, null::uuid, null::int;
  end if;
end $$;

-- A lease that its pod was granted at a gateway which it has left: news of it belong to the one where it is. One row, by itself: whoever holds
-- the pod's row must not wait for the lease.
create or replace function perdure.lease_moves(p_pod uuid, p_gateway text, p_connection bigint) returns void language sql as $$
  update perdure.leases set gateway = p_gateway, poke = poke + 1
  where holder = p_pod and gateway <> p_gateway
    and exists (select 1 from perdure.pods p where p.pod_id = p_pod and p.gateway = p_gateway and p.connection = p_connection)
$$;

-- It is proven that nothing is left of all leases that this pod has held, or of this one. A row that somebody else has locked is being
-- deleted, or proven by another's word, and who is at it may wait for a pod or a lease that is locked here: it is left alone.
create or replace function perdure.executors_gone(p_proof text, p_now timestamptz, p_pod uuid, p_run uuid default null, p_epoch int default null)
returns void language sql as $$
  update perdure.executors x set gone_at = p_now, proof = p_proof
  where (x.run_id, x.epoch) in (
    select e.run_id, e.epoch from perdure.executors e
    where e.pod_id = p_pod and e.gone_at is null and (p_run is null or e.run_id = p_run and e.epoch = p_epoch)
      -- Under a lease that is live the pod may begin more: that its processes have ended is proven when it is over.
      and (p_proof = 'pod-ended' or not exists (select 1 from perdure.leases l where l.run_id = e.run_id and l.epoch = e.epoch))
    order by e.run_id, e.epoch for update skip locked)
$$;

-- A pod's agent has asked for a run, the first or the next. `p_run`, `p_epoch`: the lease of which, as it says, no process is left.
create or replace function perdure.pod_idle(p_pod uuid, p_gateway text, p_connection bigint, p_run uuid default null, p_epoch int default null)
returns text language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
  v_state text;
begin
  perform 1 from perdure.pods p where p.pod_id = p_pod for update;
  if p_run is not null then
    perform perdure.executors_gone('processes-ended', v_now, p_pod, p_run, p_epoch);
  end if;
  update perdure.pods p set state = 'idle', gateway = p_gateway, run_id = null, since = v_now, seen_at = v_now, lost = false
  where p.pod_id = p_pod and p.connection = p_connection and p.state in ('leased', 'idle', 'starting') and not exists (select 1 from perdure.leases l where l.holder = p_pod)
  returning p.state into v_state;
  return coalesce(v_state, 'retiring');
end $$;
