-- Custom resources and the runs behind them. A resource is known by its uid: the same name can come again and mean another run.

-- A resource was seen. Gives what it is:
--   known       the resource of this run
--   bound       the projector made it for a run that was there first (p_bound: the run that its label names)
--   created     a new run
--   adopted     the run that has its idempotency key: whatever that run has done is done (K10)
--   wait        an earlier run has its name or key, its resource is gone, and it has not ended: it is to be cancelled first
--   name-taken  a run without a resource has the name          key-taken  another resource has the key
create or replace function perdure.admit_resource(p_uid uuid, p_generation bigint, p_bound uuid, p_run jsonb, p_input bytea, p_hash bytea, p_data bytea)
returns table (decision text, run_id uuid, state text) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
  c perdure.resources;
  q perdure.runs;
begin
  select * into c from perdure.resources x where x.uid = p_uid;
  if found then
    return query select 'known', c.run_id, x.state from perdure.runs x where x.run_id = c.run_id;
    return;
  end if;
  if p_bound is not null then
    -- The projector says the same in a transaction of its own: whoever comes second waits for the first here, and agrees. What the run
    -- was told is the spec that the projector made.
    update perdure.resources x set uid = p_uid, generation = 1
    where x.run_id = p_bound and (x.uid is null or x.uid = p_uid) and exists (
      select 1 from perdure.runs y where y.run_id = p_bound and y.namespace = p_run ->> 'namespace' and y.name = p_run ->> 'name');
    if found then
      return query select 'bound', p_bound, y.state from perdure.runs y where y.run_id = p_bound;
      return;
    end if;
  end if;

  select * into q from perdure.runs x where x.namespace = p_run ->> 'namespace' and x.idempotency_key = p_run ->> 'idempotency_key' for no key update;
  if found then
    select * into c from perdure.resources x where x.run_id = q.run_id;
    if found and not c.gone and c.name <> p_run ->> 'name' then
      return query select 'key-taken', q.run_id, q.state;
    elsif q.cancel_requested and not perdure.terminal(q.state) then
      return query select 'wait', q.run_id, q.state;
    else
      -- It has not been told this spec yet, and one that has ended never will be.
      insert into perdure.resources (run_id, uid, name, generation, changed_seq, projected_seq)
      values (q.run_id, p_uid, p_run ->> 'name', case when perdure.terminal(q.state) then p_generation else 0 end, q.last_seq, 0)
      on conflict on constraint resources_pkey do update
        set uid = excluded.uid, name = excluded.name, generation = excluded.generation, changed_seq = excluded.changed_seq, projected_seq = 0, gone = false;
      return query select 'adopted', q.run_id, q.state;
    end if;
    return;
  end if;

  select * into q from perdure.runs x where x.namespace = p_run ->> 'namespace' and x.name = p_run ->> 'name' and not x.superseded for no key update;
  if found and exists (select 1 from perdure.resources x where x.run_id = q.run_id and x.uid = p_uid) then
    -- Since our first look another operator has written it down.
    return query select 'known', q.run_id, q.state;
    return;
  elsif found and not perdure.terminal(q.state) then
    -- Two resources of one name never are at once: another one's uid proves that it is gone. A run that has none yet has lost nothing.
    return query select case when exists (select 1 from perdure.resources x where x.run_id = q.run_id and x.uid is not null) then 'wait'
      else 'name-taken' end, q.run_id, q.state;
    return;
  elsif found then
    update perdure.runs x set superseded = true where x.run_id = q.run_id;
    update perdure.resources x set gone = true where x.run_id = q.run_id;
  end if;
  q := perdure.insert_run(p_run, p_input, v_now);
  insert into perdure.blobs (run_id, hash, data) select q.run_id, p_hash, p_data where p_hash is not null;
  insert into perdure.resources (run_id, uid, name, generation, changed_seq) values (q.run_id, p_uid, q.name, p_generation, q.last_seq);
  return query select 'created', q.run_id, q.state;
exception when unique_violation then
  -- Somebody else took the name or the key between our look and our insert: look again.
  return query select 'wait', null::uuid, null::text;
end $$;

-- Runs whose resource says less than it should: those that have moved, those at work whose progress is older than p_progress_seconds, and
-- those that wait for a pod of a pool that has come into trouble since. One that was woken is about to run: only if it has no pod after
-- p_wake_seconds its resource says that it is pending.
create or replace function perdure.due_projections(p_limit int, p_progress_seconds double precision, p_wake_seconds double precision default 0)
returns table (run_id uuid, uid uuid, name text, generation bigint, read_at timestamptz) language sql as $$
  select d.*, (select perdure.now()) from (
    (select c.run_id, c.uid, c.name, c.generation from perdure.resources c join perdure.runs r using (run_id)
     where c.changed_seq > c.projected_seq and c.uid is not null and not c.gone
       and not (r.state = 'Pending' and r.reason = 'Woken' and r.state_since > (select perdure.now()) - p_wake_seconds * interval '1 second')
     limit p_limit)
    union
    (select c.run_id, c.uid, c.name, c.generation from perdure.runs r join perdure.resources c using (run_id)
     where r.state = 'Running' and r.last_seq > c.projected_seq and c.uid is not null and not c.gone
       and c.projected_at < (select perdure.now()) - p_progress_seconds * interval '1 second' limit p_limit)
    union
    (select c.run_id, c.uid, c.name, c.generation from perdure.pools p
     join perdure.runs r on r.pool = p.pool and r.state = 'Pending' join perdure.resources c using (run_id)
     where c.projected_at < (p.trouble ->> 'since')::timestamptz and c.uid is not null and not c.gone limit p_limit)) d
$$;

-- `p_at`: when that was read which they say now. One whose run was told another spec since is due still: that may be all that has changed.
-- So is one whose pool came or went since (pool_changed). What is locked is passed over: whoever has it moves the run, which makes it due
-- again. (A dispatcher moves runs in the order of its queue, so there is no order in which these could be waited for.)
create or replace function perdure.projected(p_uids uuid[], p_seqs bigint[], p_at timestamptz default null, p_generations bigint[] default null)
returns void language plpgsql as $$
declare
  v_at timestamptz := coalesce(p_at, perdure.now());
  v_free uuid[] := array(select c.uid from perdure.resources c where c.uid = any (p_uids) for no key update skip locked);
begin
  update perdure.resources c set projected_seq = greatest(c.projected_seq, u.seq), projected_at = v_at
  from unnest(p_uids, p_seqs, p_generations) u(uid, seq, generation)
  where c.uid = any (v_free) and c.uid = u.uid and c.generation = coalesce(u.generation, c.generation)
    and (c.asked_at is null or p_at is null or c.asked_at <= p_at);
end $$;

-- There is a pool of this name now, or none any more: the resources of runs that are queued for it say so. One page of them; gives where the
-- next one begins, or nothing after the last. Pages follow the queue's index, so all of them together read each queued run once.
create or replace function perdure.pool_changed(p_pool text, p_after_at timestamptz default null, p_after_run uuid default null, p_limit int default 200)
returns table (after_at timestamptz, after_run uuid) language plpgsql set plan_cache_mode = force_custom_plan as $$
declare
  v_now timestamptz := perdure.now();
  v_from timestamptz := coalesce(p_after_at, '-infinity');
  v_after uuid := coalesce(p_after_run, '00000000-0000-0000-0000-000000000000');
  v_at timestamptz;
  v_page uuid[];
  v_runs uuid[];
begin
  select array_agg(q.run_id order by q.runnable_at, q.run_id), max(q.runnable_at) into v_page, v_at from (
    select r.run_id, r.runnable_at from perdure.runs r
    where r.pool || '' = p_pool and r.state = 'Pending' and (r.runnable_at, r.run_id) > (v_from, v_after) -- by runs_due
    order by r.runnable_at, r.run_id limit p_limit) q;
  -- The runs first, as a batch: whoever holds one may wait for its resource. One that is locked is passed over, so that this waits for nobody
  -- while it holds others: whoever has it moves it, which makes its resource due. The wait below is for the projector's short write alone.
  v_runs := array(select r.run_id from perdure.runs r where r.run_id = any (v_page) and r.state = 'Pending'
                  order by r.run_id for no key update skip locked);
  update perdure.resources c set projected_seq = c.changed_seq - 1, asked_at = v_now where c.run_id = any (v_runs) and not c.gone;
  if cardinality(v_page) = p_limit then
    return query select v_at, v_page[p_limit];
  end if;
end $$;

-- Why a pool's pods do not start; null: they do. `since` is that of the reason: who waits for a pod says another one then, not at each try.
create or replace function perdure.tell_trouble(p_pool text, p_trouble jsonb) returns void language sql as $$
  update perdure.pools set trouble = p_trouble || jsonb_build_object('since',
    case when trouble ->> 'reason' = p_trouble ->> 'reason' then trouble -> 'since' else to_jsonb((select perdure.now())) end)
  where pool = p_pool
$$;

-- Who leads. A holder that renews keeps its term; whoever takes over a role that was not renewed for p_seconds gets the next one.
create or replace function perdure.lead(p_role text, p_holder text, p_seconds double precision) returns bigint language sql as $$
  insert into perdure.leaders as l (role, holder, term, renewed_at) values (p_role, p_holder, 1, (select perdure.now()))
  on conflict (role) do update set holder = excluded.holder, renewed_at = excluded.renewed_at,
    term = case when l.holder = excluded.holder then l.term else l.term + 1 end
  where l.holder = excluded.holder or l.renewed_at < excluded.renewed_at - p_seconds * interval '1 second'
  returning term
$$;
