-- The one way in which existing runs change: a batch of operations of many runs in one commit.
--
-- Rules of the batch:
--   1. First lock, in the order of run ids; runs that somebody else has locked are left out and answered `busy` (the gateway's slow lane
--      takes them one by one, waiting for the lock). So two batches never wait for each other in a circle.
--   2. Look in later statements only. Under READ COMMITTED a statement that had to wait still sees its old snapshot elsewhere.
--   3. Every operation is answered by a code of its own; a refusal rolls back that operation alone. Anything unexpected aborts the batch,
--      and the gateway runs its operations one by one, so that one bad operation harms nobody else.
--   4. The operations of one run are in at most one batch at a time and in order. The gateway sees to that.
--   5. Who holds the locks of runs may wait for what belongs to these runs: lease, pod, resource. Everybody else waits for one such row while
--      holding none, or passes over what is locked (skip locked), or takes leases alone, in the order of runs. So no circle can close.
--      tests/races/test_lock_pairs.py runs every pair against each other.
-- Plans: every statement here touches a few rows by key. Planning one anew costs more than running it, and a plan made while the tables
-- were empty would scan them for the rest of the session; so the functions ask for generic plans that use the indexes.
-- A worker's operation is fenced by (epoch, holder): compared here, under the lock, never by a clock.

-- The lock of the batch; gives the runs that it did not get. `p_wait`: the slow lane (lock_timeout bounds it).
create or replace function perdure.lock_runs(p_runs uuid[], p_wait boolean) returns uuid[] language plpgsql set lock_timeout = '2s' as $$
declare
  v_locked uuid[];
begin
  if p_wait then
    v_locked := array(select q.run_id from perdure.runs q where q.run_id = any (p_runs) order by q.run_id for no key update);
  else
    v_locked := array(select q.run_id from perdure.runs q where q.run_id = any (p_runs) order by q.run_id for no key update skip locked);
  end if;
  if cardinality(v_locked) = cardinality(p_runs) then
    return '{}';
  end if;
  return array(select distinct u from unnest(p_runs) u where u <> all (v_locked));
end $$;

-- A run may write so many bytes, as JSON and as they are stored; null: as many as it likes. What its worker writes counts, from outputs to
-- cursors; what others send it does not. An operation that would pass a limit is refused. What ends the run, and what became of an effect,
-- is taken in any case. Near a limit a batch decides nothing (busy): alone, an operation knows what was committed before it.
create or replace function perdure.too_much(p_raw bigint, p_stored bigint, p_raw_limit bigint, p_stored_limit bigint) returns boolean
language sql immutable as $$ select coalesce(p_raw > p_raw_limit, false) or coalesce(p_stored > p_stored_limit, false) $$;

create or replace function perdure.too_large(p_raw bigint, p_stored bigint, p_raw_more bigint, p_stored_more bigint, p_raw_limit bigint,
                                             p_stored_limit bigint) returns text language sql immutable as $$
  select format('the run has written %s bytes (%s as stored), and this would be %s more (%s); it may write %s (%s)', p_raw, p_stored,
    p_raw_more, p_stored_more, coalesce(p_raw_limit::text, 'any number'), coalesce(p_stored_limit::text, 'any number'))
$$;

-- From four fifths on a run is told, once, in its log.
create or replace function perdure.nearly_full(p_raw bigint, p_stored bigint, p_raw_limit bigint, p_stored_limit bigint) returns boolean
language sql immutable as $$ select coalesce(p_raw * 5 >= p_raw_limit * 4, false) or coalesce(p_stored * 5 >= p_stored_limit * 4, false) $$;

-- Journals step outcomes, set-based: the hot path. Arrays are by operation; one that is null stands for the usual value throughout (state
-- succeeded, attempts 1, else null); s_* are dirty slices and b_* blobs, by the operation's number. p_raw, p_stored: bytes that each writes,
-- null when all is in p_output; p_batch_*: all together. `nearly_full`: the run may have to be told (by any other operation, settle at the
-- least, which looks closely).
create or replace function perdure.journal_batch(
  p_run uuid[], p_epoch int[], p_holder uuid[], p_req uuid[], p_key text[], p_name text[], p_state text[], p_fingerprint text[],
  p_phase text[], p_attempts int[], p_output bytea[], p_error jsonb[],
  s_ord int[], s_name text[], s_append boolean[], s_version int[], s_value bytea[],
  b_ord int[], b_run uuid[], b_hash bytea[], b_data bytea[], p_wait boolean,
  p_raw int[] default null, p_stored int[] default null, p_raw_limit bigint default null, p_stored_limit bigint default null,
  p_batch_raw bigint default 0, p_batch_stored bigint default 0)
returns table (ord int, code text, seq bigint, existing boolean, detail text, nearly_full boolean)
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_mergejoin = off as $$
declare
  v_now timestamptz;
  v_unlocked uuid[] := perdure.lock_runs(p_run, p_wait);
begin
  v_now := perdure.now();
  return query
  with ops as (
    select o.run, o.epoch, o.holder, o.req, o.key, o.name, coalesce(o.state, 'succeeded') as state, o.fingerprint, o.phase,
      coalesce(o.attempts, 1) as attempts, o.output, o.error, o.n, r.last_seq, r.state as run_state, j.seq as old_seq, j.request_id as old_req,
      case
        when j.key is not null then 'existing'
        when r.run_id is null then case when exists (select 1 from perdure.runs x where x.run_id = o.run) then 'busy' else 'run-not-found' end
        when r.state <> 'Running' then case when perdure.terminal(r.state) then 'run-finished' else 'lease-lost' end
        when r.epoch <> o.epoch or r.holder <> o.holder then 'lease-lost'
        when r.expires_at <= v_now then case when r.cancel_due_at <= v_now then 'cancel-requested' else 'deadline-exceeded' end
        when row_number() over (partition by o.run, o.key order by o.n) > 1 then 'busy'
        -- As if all that the batch writes were this run's: hardly ever, and then it is looked at closely.
        when r.raw_bytes + p_batch_raw > p_raw_limit or r.stored_bytes + p_batch_stored > p_stored_limit then
          case when perdure.too_much(r.raw_bytes + coalesce(o.raw, octet_length(o.output) - 1),
                                     r.stored_bytes + coalesce(o.stored, octet_length(o.output)), p_raw_limit, p_stored_limit) then 'run-too-large'
               when cardinality(p_run) > 1 then 'busy' else 'ok' end
        else 'ok'
      end as verdict,
      coalesce(o.raw, octet_length(o.output) - 1) as raw, coalesce(o.stored, octet_length(o.output)) as stored,
      not r.size_told and perdure.nearly_full(r.raw_bytes + p_batch_raw, r.stored_bytes + p_batch_stored, p_raw_limit, p_stored_limit) as near
    from unnest(p_run, p_epoch, p_holder, p_req, p_key, p_name, p_state, p_fingerprint, p_phase, p_attempts, p_output, p_error, p_raw, p_stored)
         with ordinality as o(run, epoch, holder, req, key, name, state, fingerprint, phase, attempts, output, error, raw, stored, n)
    left join perdure.runs r on r.run_id = o.run and o.run <> all (v_unlocked)
    left join perdure.journal j on j.run_id = o.run and j.key = o.key
  ), numbered as materialized (
    select *, case when verdict = 'ok' then last_seq + count(*) filter (where verdict = 'ok') over (partition by run order by n) end as new_seq
    from ops
  ), accepted as (
    select * from numbered where verdict = 'ok'
  ), moved as (
    update perdure.runs r set last_seq = a.top, worker_seq = a.top, steps = r.steps + a.done, raw_bytes = r.raw_bytes + a.raw,
      stored_bytes = r.stored_bytes + a.stored
    from (select run, max(new_seq) as top, count(*)::int as done, sum(raw) as raw, sum(stored) as stored from accepted group by run) a
    where r.run_id = a.run
  ), logged as (
    insert into perdure.events (run_id, seq, epoch, at, kind, data)
    select run, new_seq, epoch, v_now, 'step.' || state, jsonb_build_object('key', key, 'name', name) from accepted
  ), journaled as (
    insert into perdure.journal (run_id, key, kind, name, state, seq, epoch, request_id, fingerprint, phase, attempts, output, error)
    select run, key, 'step', name, state, new_seq, epoch, req, fingerprint, phase, attempts, output, error from accepted
  )
  select n::int, case when verdict = 'existing' then 'ok' else verdict end, coalesce(new_seq, old_seq),
    old_seq is not null and old_req is distinct from req,
    case when verdict = 'run-too-large'
         then (select perdure.too_large(x.raw_bytes, x.stored_bytes, raw, stored, p_raw_limit, p_stored_limit)
               from perdure.runs x where x.run_id = run) end, near
  from numbered;
  -- What came with the steps that were journaled by this commit, and no others: what came with a resend was stored with its step, and who
  -- has lost the lease writes nothing. Apart, since most batches carry nothing.
  if cardinality(s_ord) > 0 then
    insert into perdure.slices (run_id, name, seq, append, version, value)
    select j.run_id, s.name, j.seq, s.append, s.version, s.value
    from unnest(s_ord, s_name, s_append, s_version, s_value) s(o, name, append, version, value)
    join perdure.journal j on j.run_id = p_run[s.o] and j.key = p_key[s.o] and j.request_id = p_req[s.o]
    where j.xmin = pg_current_xact_id()::xid
    on conflict do nothing;
  end if;
  if cardinality(b_ord) > 0 then
    insert into perdure.blobs (run_id, hash, data)
    select b.run, b.hash, b.data from unnest(b_ord, b_run, b_hash, b_data) b(o, run, hash, data)
    join perdure.journal j on j.run_id = p_run[b.o] and j.key = p_key[b.o] and j.request_id = p_req[b.o]
    where j.xmin = pg_current_xact_id()::xid
    on conflict do nothing;
  end if;
end $$;

-- One operation of a locked run. The row comes in as it is and goes back as it shall be.
create or replace function perdure.operate(r perdure.runs, p_kind text, p_fenced boolean, p_body jsonb, p_payload bytea, p_now timestamptz)
returns perdure.op_result language plpgsql as $$
begin
  return case p_kind
    when 'wait' then perdure.op_wait(r, p_body, p_now)
    when 'suspend' then perdure.op_suspend(r, p_body, p_now)
    when 'activity.begin' then perdure.op_activity_begin(r, p_body, p_payload, p_now)
    when 'activity.end' then perdure.op_activity_end(r, p_fenced, p_body, p_payload, p_now)
    when 'activity.resolve' then perdure.op_activity_resolve(r, p_body, p_payload, p_now)
    when 'spawn' then perdure.op_spawn(r, p_body, p_payload, p_now)
    when 'event' then perdure.op_event(r, p_body, p_payload, p_now)
    when 'checkpoint' then perdure.op_checkpoint(r, p_body, p_payload, p_now)
    when 'finish' then perdure.op_finish(r, p_body, p_payload, p_now)
    when 'signal' then perdure.op_signal(r, p_body, p_payload, p_now)
    when 'cancel' then perdure.op_verb(r, 'cancel', p_body, p_now)
    when 'pause' then perdure.op_verb(r, 'pause', p_body, p_now)
    when 'resume' then perdure.op_verb(r, 'resume', p_body, p_now)
    when 'spec' then perdure.op_spec(r, p_body, p_now)
    when 'detach' then perdure.op_detach(r, p_body, p_now)
    when 'expire' then perdure.op_expire(r, p_body, p_now)
    when 'undo_loss' then perdure.op_undo_loss(r, p_body, p_now)
    when 'note' then (case when perdure.terminal(r.state) then r else perdure.log(r, p_body ->> 'kind', p_body -> 'data', p_now) end,
                      '{}'::jsonb)::perdure.op_result
    when 'settle' then (perdure.settle(r, p_now), '{}'::jsonb)::perdure.op_result
  end;
end $$;

-- All other operations, one after the other. p_epoch null: not a worker's (signal, cancel, timer, reaper), so there is no fence.
-- p_idle: this gateway's idle pods, for the direct path. In the order of run ids (store/batch.py): what an operation locks beside its run, a
-- lease or a pod, is locked in that order too.
create or replace function perdure.control_batch(
  p_run uuid[], p_epoch int[], p_holder uuid[], p_req uuid[], p_kind text[], p_body jsonb[], p_payload bytea[],
  s_ord int[], s_name text[], s_append boolean[], s_version int[], s_value bytea[],
  b_ord int[], b_run uuid[], b_hash bytea[], b_data bytea[], p_idle uuid[], p_gateway text, p_wait boolean,
  p_raw int[] default null, p_stored int[] default null, p_raw_limit bigint default null, p_stored_limit bigint default null)
returns table (ord int, code text, detail text, answer jsonb, state text, leased uuid, epoch int)
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_mergejoin = off as $$
declare
  v_now timestamptz;
  v_unlocked uuid[] := perdure.lock_runs(p_run, p_wait);
  r perdure.runs;
  v_before perdure.runs;
  v_fenced boolean;
  v_old perdure.requests;
  v_known boolean;
  l perdure.ledger;
  v_result perdure.op_result;
begin
  for i in 1 .. cardinality(p_run) loop
    ord := i; detail := ''; answer := '{}'; state := null; leased := null; epoch := null; code := 'ok';
    if p_run[i] = any (v_unlocked) then
      code := case when exists (select 1 from perdure.runs q where q.run_id = p_run[i]) then 'busy' else 'run-not-found' end;
      return next;
      continue;
    end if;
    v_now := perdure.now();
    select q.* into r from perdure.runs q where q.run_id = p_run[i];
    v_before := r;
    v_fenced := p_epoch[i] is not null and r.state = 'Running' and r.epoch = p_epoch[i] and r.holder = p_holder[i];
    select q.* into v_old from perdure.requests q where q.run_id = p_run[i] and q.request_id = p_req[i];
    v_known := found;
    if v_known and p_kind[i] in ('activity.begin', 'activity.resolve') then
      -- What was granted once may have been granted to another since: to whom the lease is gone no execution is granted again. Nor to whoever
      -- still has it, once that execution is over: the same request may come from a gateway that its pod has left, and nobody would hear.
      v_known := v_fenced and perdure.still_granted(r, v_old.answer, p_body[i], v_now);
      if v_fenced and not v_known then
        select q.* into l from perdure.ledger q where q.run_id = r.run_id and q.key = v_old.answer ->> 'key';
        if l.state <> 'SUCCEEDED' then
          answer := perdure.ledger_answer(l, 'busy', 'what this request was granted is over: ask with a new one', 0.2);
          state := r.state;
          return next;
          continue;
        end if;
      end if;
    end if;
    if v_known then
      code := v_old.code; answer := v_old.answer; state := r.state;
      if answer ? 'decided' then
        answer := jsonb_build_object('status', 'done', 'outcomes', (
          select coalesce(jsonb_object_agg(j.key, perdure.outcome(j.run_id, j.key)), '{}') from perdure.journal j
          where j.run_id = r.run_id and j.key in (select jsonb_array_elements_text(v_old.answer -> 'decided'))
            and j.state in ('satisfied', 'timed_out')));
      end if;
      return next;
      continue;
    end if;
    begin
      if p_epoch[i] is not null and not v_fenced and p_kind[i] <> 'activity.end' then
        perform perdure.refuse(case when perdure.terminal(r.state) then 'run-finished' else 'lease-lost' end,
          format('this is epoch %s; the run is %s at epoch %s', p_epoch[i], r.state, r.epoch));
      end if;
      if v_fenced and r.expires_at <= v_now and p_kind[i] not in ('activity.end', 'finish') then
        -- The worker hears of it now; what is due is done in this commit.
        code := case when r.cancel_due_at <= v_now then 'cancel-requested' else 'deadline-exceeded' end;
        r := perdure.settle(r, v_now);
      elsif v_fenced and p_raw[i] > 0 and p_kind[i] not in ('finish', 'activity.end', 'activity.resolve')
          and perdure.too_much(r.raw_bytes + p_raw[i], r.stored_bytes + p_stored[i], p_raw_limit, p_stored_limit) then
        perform perdure.refuse('run-too-large',
          perdure.too_large(r.raw_bytes, r.stored_bytes, p_raw[i], p_stored[i], p_raw_limit, p_stored_limit));
      else
        v_result := perdure.operate(r, p_kind[i], v_fenced, p_body[i], p_payload[i], v_now);
        r := v_result.r;
        answer := v_result.answer;
        if v_fenced and r.last_seq = v_before.last_seq and i = any (s_ord) then
          -- Two writes of a slice at one sequence would be one, and a resend must meet its request.
          r := perdure.log(r, 'session.saved', '{}', v_now);
        end if;
        if v_fenced and i = any (s_ord) then
          insert into perdure.slices (run_id, name, seq, append, version, value)
          select r.run_id, n, r.last_seq, a, v, x from unnest(s_ord, s_name, s_append, s_version, s_value) s(o, n, a, v, x)
          where o = i on conflict do nothing;
        end if;
        if i = any (b_ord) then
          insert into perdure.blobs (run_id, hash, data)
          select br, h, d from unnest(b_ord, b_run, b_hash, b_data) b(o, br, h, d) where o = i on conflict do nothing;
        end if;
        if p_epoch[i] is not null and p_raw[i] > 0 and r.last_seq > v_before.last_seq then
          r.raw_bytes := r.raw_bytes + p_raw[i];
          r.stored_bytes := r.stored_bytes + p_stored[i];
        end if;
        if not r.size_told and not perdure.terminal(r.state)
            and perdure.nearly_full(r.raw_bytes, r.stored_bytes, p_raw_limit, p_stored_limit) then
          r := perdure.log(r, 'run.nearly_full', jsonb_strip_nulls(jsonb_build_object('bytes', r.raw_bytes, 'storedBytes', r.stored_bytes,
            'maxBytes', p_raw_limit, 'maxStoredBytes', p_stored_limit)), v_now);
          r.size_told := true;
          perform perdure.show(r);
        end if;
      end if;
      -- What an attempt does again each time before it breaks (the intent of a call, an event of its own, its end) is no progress.
      if v_fenced and r.last_seq > v_before.last_seq and p_kind[i] not in ('activity.begin', 'event', 'finish') then
        r.worker_seq := r.last_seq;
      end if;
      if r.state = 'Pending' and cardinality(p_idle) > 0 then
        r := perdure.grant_directly(r, p_idle, p_gateway, v_now);
        if r.state = 'Running' then
          leased := r.holder; epoch := r.epoch;
          p_idle := array_remove(p_idle, leased);
        end if;
      end if;
      if v_before.holder is not null and r.holder is distinct from v_before.holder and not v_fenced then
        -- Nobody waits for what this pod still does, and it may stand still: whoever looks after pods ends it.
        update perdure.pods set lost = true where pod_id = v_before.holder;
      end if;
      if r is distinct from v_before then
        perform perdure.save(r);
      end if;
      -- Also of what changed nothing: the same request, late, would find a run that has gone on since, and change that. Not of calls of tools
      -- that changed nothing: these are looked at anew each time, and their receipts would be stored twice.
      if p_req[i] is not null and (r.last_seq > v_before.last_seq or p_kind[i] not in ('activity.begin', 'activity.resolve', 'activity.end')) then
        -- An outcome is in the journal already: of a wait that was decided before, only its key is kept.
        insert into perdure.requests (run_id, request_id, code, answer, at)
        values (r.run_id, p_req[i], code, case when r.last_seq = v_before.last_seq and answer ->> 'status' = 'done'
          then jsonb_build_object('decided', (select jsonb_agg(k) from jsonb_object_keys(answer -> 'outcomes') k)) else answer end, v_now);
      end if;
    exception when sqlstate 'PD001' then
      code := sqlerrm;
      get stacked diagnostics detail = pg_exception_detail;
      answer := '{}'; leased := null; epoch := null; r := v_before;
    end;
    state := r.state;
    return next;
  end loop;
end $$;
