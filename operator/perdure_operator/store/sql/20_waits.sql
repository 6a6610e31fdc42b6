-- Waits and what satisfies them. Suspender and waker both hold the run's lock before they come here, and every look below is a statement
-- of its own after that lock: it sees what the other side committed (W2).

-- A wait's outcome with its payloads in stored form, base64.
create or replace function perdure.outcome(p_run uuid, p_key text) returns jsonb language sql stable as $$
  select jsonb_build_object('status', j.data ->> 'status', 'fired', coalesce((
    select jsonb_agg((f - 'source') || jsonb_build_object('payload', encode(w.payload, 'base64'), 'data', w.data) order by n)
    from jsonb_array_elements(j.data -> 'fired') with ordinality as e(f, n)
    left join perdure.wakeups w on w.run_id = p_run and w.kind = f ->> 'kind' and w.source = f ->> 'source'), '[]'))
  from perdure.journal j where j.run_id = p_run and j.key = p_key
$$;

-- Decides every open wait that can be decided now: binds the wakeups, journals the outcome, all in this commit (W5, invariant 5).
create or replace function perdure.bind_waits(r perdure.runs, p_now timestamptz) returns perdure.runs language plpgsql as $$
declare
  w perdure.waits;
  v_total int;
  v_met jsonb;
  v_failed jsonb;
  v_fired jsonb;
  v_status text;
begin
  -- Only those that something has happened to: a run may join thousands of children, one wait each.
  for w in
    select * from perdure.waits o where run_id = r.run_id and state = 'open' and (timeout_at <= p_now or exists (
      select 1 from perdure.wait_conditions c where c.run_id = r.run_id and c.key = o.key and (
        (c.kind = 'timer' and c.at <= p_now)
        or (c.kind = 'signal' and exists (select 1 from perdure.wakeups k where k.run_id = r.run_id and k.kind = 'signal' and k.name = c.name
                                          and k.bound_key is null and k.seq is not null))
        or (c.kind = 'child_done' and exists (select 1 from perdure.wakeups k where k.run_id = r.run_id and k.kind = 'child_done'
                                              and k.source = c.name and k.seq is not null)))))
    order by seq
  loop
    with c as (
      select *, row_number() over (partition by kind, name order by idx) as nth
      from perdure.wait_conditions where run_id = r.run_id and key = w.key
    ), signals as (
      select k.*, row_number() over (partition by k.name order by k.seq) as nth
      from perdure.wakeups k
      where k.run_id = r.run_id and k.kind = 'signal' and k.bound_key is null and k.seq is not null
        and k.name in (select name from c where kind = 'signal')
    ), met as (
      select c.idx, c.kind, c.name, coalesce(s.source, d.source) as source, coalesce(s.id, d.id, '') as id,
             coalesce(s.at, d.at, c.at) as at, d.data ->> 'status' as status,
             case when c.kind = 'timer' then round(extract(epoch from p_now - c.at)::numeric, 3) else 0 end as late
      from c
      left join signals s on c.kind = 'signal' and s.name = c.name and s.nth = c.nth
      left join perdure.wakeups d on c.kind = 'child_done' and d.run_id = r.run_id and d.kind = 'child_done' and d.source = c.name
                                     and d.seq is not null
      where (c.kind = 'timer' and c.at <= p_now) or s.source is not null or d.source is not null
    ), shaped as (
      select idx, at, status, jsonb_strip_nulls(jsonb_build_object('index', idx, 'kind', kind, 'name', name, 'id', id, 'at', at,
                                                                  'lateSeconds', late, 'source', source)) as fired
      from met
    )
    select (select count(*) from c),
           (select jsonb_agg(fired order by case when w.mode = 'any' then at end, idx) from shaped),
           (select jsonb_agg(fired order by at, idx) from shaped where status <> 'Succeeded')
    into v_total, v_met, v_failed;

    v_status := 'satisfied';
    if w.mode = 'any' and v_met is not null then
      v_fired := jsonb_build_array(v_met -> 0);
    elsif w.mode = 'first_failure' and v_failed is not null then
      v_fired := jsonb_build_array(v_failed -> 0);
    elsif w.mode <> 'any' and jsonb_array_length(v_met) = v_total then
      v_fired := v_met;
    elsif w.timeout_at <= p_now then
      v_status := 'timed_out';
      v_fired := jsonb_build_array(jsonb_build_object('index', -1, 'kind', 'timeout', 'at', w.timeout_at,
        'lateSeconds', round(extract(epoch from p_now - w.timeout_at)::numeric, 3)));
    else
      if w.due_at <= p_now then
        -- Its timers have passed, it waits for something else as well: only the timeout is left to the clock. (Due for ever is a busy loop.)
        update perdure.waits set due_at = w.timeout_at where run_id = r.run_id and key = w.key;
      end if;
      continue;
    end if;

    update perdure.wakeups k set bound_key = w.key
    from jsonb_array_elements(v_fired) f
    where k.run_id = r.run_id and k.kind = f ->> 'kind' and k.source = f ->> 'source' and k.bound_key is null;
    r := perdure.log(r, 'wait.' || v_status, jsonb_build_object('key', w.key, 'fired', jsonb_array_length(v_fired), 'first', v_fired -> 0), p_now);
    update perdure.waits set state = v_status, done_seq = r.last_seq where run_id = r.run_id and key = w.key;
    update perdure.journal set state = v_status, seq = r.last_seq, epoch = r.epoch,
      data = jsonb_build_object('status', v_status, 'fired', v_fired)
    where run_id = r.run_id and key = w.key;
    if r.state <> 'Running' then
      r.wake_due := true;
      if jsonb_array_length(r.reasons) < 100 then
        r.reasons := r.reasons || (v_fired -> 0);
      end if;
    else
      perform perdure.poke(r);
    end if;
  end loop;
  return r;
end $$;

-- Level-triggered: looks at everything that is due for the run and does the strongest of it: cancel > deadline > pause > wake (L1).
-- Every operation that may have made something due ends here.
create or replace function perdure.settle(r perdure.runs, p_now timestamptz) returns perdure.runs language plpgsql as $$
declare
  v_count int;
  v_cancel boolean;
  v_failed_child text;
  v_late text;
begin
  if perdure.terminal(r.state) then
    -- They come too late to matter. 0 says so, and that they need not be found again.
    update perdure.wakeups set seq = 0 where run_id = r.run_id and seq is null;
    return r;
  end if;

  if r.parent_policy = 'detach' then
    -- The parent ended with a look at its children from before this one was detached, which had been acknowledged. 0: nobody need find it again.
    update perdure.wakeups set seq = 0 where run_id = r.run_id and seq is null and kind = 'cancel' and data ->> 'by' = 'parent';
  end if;

  -- Wakeups that others inserted get their sequence. Bounded; what is left stays due.
  with new as (
    select kind, source, name, data, id, row_number() over (order by at, kind, source) as n
    from perdure.wakeups where run_id = r.run_id and seq is null order by at, kind, source limit 1000
  ), applied as (
    update perdure.wakeups w set seq = r.last_seq + new.n from new
    where w.run_id = r.run_id and w.kind = new.kind and w.source = new.source
  ), logged as (
    insert into perdure.events (run_id, seq, epoch, at, kind, data)
    select r.run_id, r.last_seq + n, r.epoch, p_now,
      case kind when 'child_done' then 'child.done' when 'cancel' then 'run.cancel_requested' else kind || '.received' end,
      case kind when 'child_done' then jsonb_build_object('child', id, 'name', name, 'status', data ->> 'status') else data end
    from new
  )
  select count(*), coalesce(bool_or(kind = 'cancel'), false),
    min(id) filter (where kind = 'child_done' and data ->> 'policy' = 'fail_parent' and data ->> 'status' <> 'Succeeded')
  into v_count, v_cancel, v_failed_child from new;
  r.last_seq := r.last_seq + v_count;

  if v_cancel and not r.cancel_requested then
    r.cancel_requested := true;
    r.cancel_due_at := perdure.cancel_due(r, p_now);
  end if;
  v_late := case
    when r.deadline_at <= p_now then format('deadlineSeconds (%s) have passed since the first start', r.deadline_seconds)
    when r.active_since + (r.active_limit_ms - r.active_ms) * interval '1 millisecond' <= p_now
      then format('activeDeadlineSeconds (%s) are used up', trim_scale(r.active_limit_ms / 1000.0)) end;
  if r.cancel_requested then
    -- Whatever ends a run that was asked to cancel, it is cancelled.
    if r.state <> 'Running' or r.cancel_due_at <= p_now or v_late is not null or v_failed_child is not null then
      return perdure.move(r, 'cancel', 'Cancelled', coalesce(v_late, ''), p_now);
    end if;
    perform perdure.poke(r);
  end if;

  if v_late is not null then
    return perdure.fail(r, 'DeadlineExceeded', v_late, p_now);
  elsif v_failed_child is not null then
    return perdure.fail(r, 'ChildFailed', format('child %s did not succeed and its policy is fail_parent', v_failed_child), p_now);
  end if;

  r := perdure.bind_waits(r, p_now);

  if r.paused or r.spec_paused then
    if r.state = 'Pending' then
      r.wake_due := true;
      return perdure.move(r, 'pause', 'Paused', '', p_now);
    elsif r.state = 'Running' then
      perform perdure.poke(r);
    end if;
  elsif r.state = 'Suspended' and r.wake_due then
    r.wake_due := false;
    return perdure.move(r, 'wake', 'Woken', '', p_now);
  end if;
  return r;
end $$;

-- Gives the pod back if no wait is decided; otherwise answers what is. Not under a call that is under way: nobody would be there to say how
-- it ended. Its receipt needs the run's lock as well, so either it is there by now, or it comes after this.
create or replace function perdure.try_suspend(r perdure.runs, p_keys text[], p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_done jsonb;
  v_what text;
begin
  select jsonb_object_agg(key, perdure.outcome(r.run_id, key)) into v_done
  from perdure.waits where run_id = r.run_id and key = any (p_keys) and state in ('satisfied', 'timed_out');
  if v_done is not null then
    return (r, jsonb_build_object('status', 'done', 'outcomes', v_done))::perdure.op_result;
  end if;
  select string_agg(distinct l.tool, ', ') into v_what from perdure.ledger l where l.run_id = r.run_id and l.state = 'RUNNING';
  if v_what is not null then
    perform perdure.refuse('effect-running', format('the call of %s is under way: end it first, then suspend', v_what));
  end if;
  select string_agg(distinct c.kind || case when c.kind = 'signal' then ' ' || c.name else '' end, ', ') into v_what
  from perdure.waits w join perdure.wait_conditions c on c.run_id = w.run_id and c.key = w.key
  where w.run_id = r.run_id and w.state = 'open';
  r.reasons := '[]';
  r := perdure.move(r, 'suspend', 'Waiting', 'waits for ' || v_what, p_now);
  return (perdure.settle(r, p_now), '{"status": "suspended"}'::jsonb)::perdure.op_result;
end $$;

-- A wait was satisfied by what its run cannot use: it keeps the signals of the conditions that are `dropped`, and gives the others back.
create or replace function perdure.give_back_signals(r perdure.runs, p_wait text, p_fingerprint text, p_dropped jsonb) returns perdure.waits
language plpgsql as $$
declare
  j perdure.journal;
  w perdure.waits;
begin
  select * into j from perdure.journal where run_id = r.run_id and key = p_wait and kind = 'wait' and state = 'satisfied';
  if not found or j.fingerprint is distinct from p_fingerprint then
    perform perdure.refuse('wait-conflict', format('there is no satisfied wait with the key %s and these conditions', p_wait));
  end if;
  update perdure.wakeups k set bound_key = null
  from jsonb_array_elements(j.data -> 'fired') f
  where k.run_id = r.run_id and k.kind = f ->> 'kind' and k.source = f ->> 'source' and k.bound_key = p_wait and not p_dropped @> (f -> 'index');
  update perdure.journal set data = jsonb_build_object('status', state, 'fired', (
    select coalesce(jsonb_agg(f order by n), '[]') from jsonb_array_elements(data -> 'fired') with ordinality e(f, n) where p_dropped @> (f -> 'index')))
  where run_id = r.run_id and key = p_wait;
  select * into w from perdure.waits where run_id = r.run_id and key = p_wait;
  return w;
end $$;

-- The agent has stopped waiting for these and has taken no outcome: a timeout of its own, a branch of a gather that has failed. Nobody listens
-- there any more, so what they took is there for others. A wait that is registered again listens again. The journal keeps for how long each
-- was awaited: a restart awaits it as long before it registers it again, since what made the agent give it up will come again.
create or replace function perdure.abandon_waits(r perdure.runs, p_waits jsonb, p_now timestamptz) returns perdure.runs language plpgsql as $$
declare
  w record;
begin
  if coalesce(jsonb_array_length(p_waits), 0) = 0 then
    return r;
  end if;
  for w in
    select s.key, a ->> 'seconds' as seconds from perdure.waits s join jsonb_array_elements(p_waits) a on a ->> 'key' = s.key
    where s.run_id = r.run_id and s.state <> 'closed' order by s.seq
  loop
    update perdure.wakeups set bound_key = null where run_id = r.run_id and bound_key = w.key;
    r := perdure.log(r, 'wait.abandoned', jsonb_build_object('key', w.key), p_now);
    update perdure.waits set state = 'closed', done_seq = null where run_id = r.run_id and key = w.key;
    update perdure.journal set state = 'abandoned', seq = r.last_seq, epoch = r.epoch, data = null,
      output = '\x00'::bytea || convert_to(coalesce(w.seconds, '0'), 'UTF8')
    where run_id = r.run_id and key = w.key;
  end loop;
  return r;
end $$;

-- What is awaited again listens again.
create or replace function perdure.listen_again(p_run uuid, p_keys text[]) returns void language sql as $$
  with again as (
    update perdure.waits set state = 'open' where run_id = p_run and key = any (p_keys) and state = 'closed' returning key
  )
  update perdure.journal set state = 'open', output = null where run_id = p_run and key in (select key from again);
$$;

create or replace function perdure.op_wait(r perdure.runs, p_body jsonb, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_key text := p_body ->> 'key';
  v_known record;
  v_before perdure.waits;
  w perdure.waits;
begin
  select fingerprint, kind into v_known from perdure.journal where run_id = r.run_id and key = v_key;
  if found and (v_known.kind <> 'wait' or v_known.fingerprint <> p_body ->> 'fingerprint') then
    perform perdure.refuse('wait-conflict', format('the key %s is that of a %s with other conditions', v_key, v_known.kind));
  elsif not found then
    if exists (select 1 from jsonb_array_elements(p_body -> 'on') c where c ->> 'kind' = 'child_done'
               and not exists (select 1 from perdure.runs k where k.run_id = (c ->> 'name')::uuid and k.parent_id = r.run_id)) then
      perform perdure.refuse('invalid-input', 'a child_done condition names a run that is no child of this one');
    end if;
    if p_body ->> 'insteadOf' is not null then
      v_before := perdure.give_back_signals(r, p_body ->> 'insteadOf', p_body ->> 'fingerprint', p_body -> 'dropped');
    end if;
    r := perdure.log(r, 'wait.opened', jsonb_strip_nulls(jsonb_build_object('key', v_key, 'name', p_body ->> 'name', 'insteadOf', v_before.key,
      'mode', p_body ->> 'mode', 'conditions', jsonb_array_length(p_body -> 'on'), 'first', p_body -> 'on' -> 0,
      'timeoutSeconds', p_body -> 'timeoutSeconds')), p_now);
    insert into perdure.wait_conditions (run_id, key, idx, kind, name, at)
    select r.run_id, v_key, n - 1, c ->> 'kind', coalesce(c ->> 'name', ''),
      case when c ->> 'kind' = 'timer'
           then coalesce((c ->> 'at')::timestamptz, p_now + (c ->> 'seconds')::double precision * interval '1 second') end
    from jsonb_array_elements(p_body -> 'on') with ordinality as e(c, n)
    where v_before.key is null
    union all
    select run_id, v_key, idx, kind, name, at from perdure.wait_conditions where run_id = r.run_id and key = v_before.key;
    insert into perdure.waits (run_id, key, name, mode, state, seq, opened_at, timeout_at, due_at)
    select r.run_id, v_key, coalesce(p_body ->> 'name', ''), t.mode, 'open', r.last_seq, coalesce(v_before.opened_at, p_now), t.timeout_at,
      least(t.timeout_at, case when t.mode = 'any' then c.first_at else c.last_at end)
    from (select p_body ->> 'mode' as mode, p_now + (p_body ->> 'timeoutSeconds')::double precision * interval '1 second' as timeout_at
          where v_before.key is null
          union all select v_before.mode, v_before.timeout_at where v_before.key is not null) t,
         (select min(at) as first_at, max(at) as last_at from perdure.wait_conditions where run_id = r.run_id and key = v_key) c;
    insert into perdure.journal (run_id, key, kind, name, state, seq, epoch, fingerprint)
    values (r.run_id, v_key, 'wait', coalesce(p_body ->> 'name', ''), 'open', r.last_seq, r.epoch, p_body ->> 'fingerprint');
  end if;
  r := perdure.abandon_waits(r, p_body -> 'abandoned', p_now);
  perform perdure.listen_again(r.run_id, array[v_key]);
  r := perdure.bind_waits(r, p_now);
  select * into w from perdure.waits where run_id = r.run_id and key = v_key;
  if w.state <> 'open' then
    return (r, jsonb_build_object('status', 'done', 'outcomes', jsonb_build_object(v_key, perdure.outcome(r.run_id, v_key))))::perdure.op_result;
  elsif (p_body ->> 'suspend')::boolean then
    return perdure.try_suspend(r, array[v_key], p_now);
  end if;
  return (r, '{"status": "open"}'::jsonb)::perdure.op_result;
end $$;

create or replace function perdure.op_suspend(r perdure.runs, p_body jsonb, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_keys text[] := array(select jsonb_array_elements_text(p_body -> 'waits'));
  v_missing text;
begin
  select k into v_missing from unnest(v_keys) k
  where not exists (select 1 from perdure.waits where run_id = r.run_id and key = k) limit 1;
  if v_missing is not null then
    perform perdure.refuse('wait-conflict', format('there is no wait with the key %s', v_missing));
  end if;
  r := perdure.abandon_waits(r, p_body -> 'abandoned', p_now);
  perform perdure.listen_again(r.run_id, v_keys);
  r := perdure.bind_waits(r, p_now);
  return perdure.try_suspend(r, v_keys, p_now);
end $$;
