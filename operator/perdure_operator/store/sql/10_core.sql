-- How one run moves. Every function here gets the run's row `r`, which the batch has locked, changes it as a value and gives it back;
-- perdure.save writes it once. Nothing here locks another run: effects on others are rows inserted into perdure.wakeups.

create or replace function perdure.now() returns timestamptz language sql volatile as
$$ select clock_timestamp() + shift from perdure.clock $$;

-- A refusal: rolls back what the operation did so far and becomes its code. PD001 never leaves the batch.
create or replace function perdure.refuse(p_code text, p_detail text default '') returns void language plpgsql as $$
begin
  raise exception using errcode = 'PD001', message = p_code, detail = p_detail;
end $$;

create or replace function perdure.terminal(p_state text) returns boolean language sql immutable as
$$ select p_state in ('Succeeded', 'Failed', 'Cancelled') $$;

-- Sequence numbers are allotted here and in the journal path of the batch, nowhere else, always under the run's lock: dense from 1.
create or replace function perdure.log(r perdure.runs, p_kind text, p_data jsonb, p_now timestamptz, p_payload bytea default null)
returns perdure.runs language plpgsql as $$
begin
  r.last_seq := r.last_seq + 1;
  insert into perdure.events (run_id, seq, epoch, at, kind, data, payload)
  values (r.run_id, r.last_seq, r.epoch, p_now, p_kind, p_data, p_payload);
  return r;
end $$;

create or replace function perdure.expiry(r perdure.runs) returns timestamptz language sql immutable as $$
  select case when perdure.terminal(r.state) then null else least(
    r.deadline_at, r.cancel_due_at,
    case when r.active_since is not null and r.active_limit_ms is not null
         then r.active_since + (r.active_limit_ms - r.active_ms) * interval '1 millisecond' end) end
$$;

create or replace function perdure.save(r perdure.runs) returns void language plpgsql as $$
begin
  update perdure.runs set
    state = r.state, reason = r.reason, message = r.message, state_since = r.state_since, epoch = r.epoch, holder = r.holder, revision = r.revision,
    attempt = r.attempt, failures = r.failures, losses = r.losses, last_seq = r.last_seq, worker_seq = r.worker_seq,
    loss_seq = r.loss_seq, priority = r.priority, deadline_seconds = r.deadline_seconds, active_limit_ms = r.active_limit_ms,
    max_tool_retries = r.max_tool_retries, rank = r.rank, runnable_at = r.runnable_at, reasons = r.reasons,
    parent_policy = r.parent_policy, cancel_requested = r.cancel_requested, paused = r.paused, spec_paused = r.spec_paused, wake_due = r.wake_due,
    active_ms = r.active_ms, active_since = r.active_since, deadline_at = r.deadline_at, cancel_due_at = r.cancel_due_at,
    expires_at = perdure.expiry(r), error = r.error, result = r.result, started_at = r.started_at, finished_at = r.finished_at,
    raw_bytes = r.raw_bytes, stored_bytes = r.stored_bytes, size_told = r.size_told
  where run_id = r.run_id;
end $$;

-- L7: the worker's own grace, and five seconds for its last words to arrive.
create or replace function perdure.cancel_due(r perdure.runs, p_now timestamptz) returns timestamptz language sql immutable as
$$ select p_now + (r.grace_seconds + 5) * interval '1 second' $$;

-- Tells the holder that it should look: its gateway finds the raised counter.
create or replace function perdure.poke(r perdure.runs) returns void language sql as
$$ update perdure.leases set poke = poke + 1 where run_id = r.run_id and epoch = r.epoch $$;

-- The run has not moved, but what its last event says belongs into its resource's status: that a person has paused it.
create or replace function perdure.show(r perdure.runs) returns void language sql as
$$ update perdure.resources set changed_seq = r.last_seq where run_id = r.run_id $$;

-- Applies one event of the transition table, with its effects, and logs it.
create or replace function perdure.move(r perdure.runs, p_event text, p_reason text, p_message text, p_now timestamptz,
                                        p_data jsonb default '{}')
returns perdure.runs language plpgsql as $$
declare
  t perdure.transitions;
  v_from text := r.state;
  v_effect text;
  v_entry record;
begin
  select * into strict t from perdure.transitions where state = r.state and event = p_event;
  if t.next_state is null then
    perform perdure.refuse(t.refusal, format('a run that is %s cannot take the event %s', r.state, p_event));
  end if;
  if t.next_state = r.state and t.effects = '{}' then
    return r;
  end if;
  r.state := t.next_state;
  r.reason := p_reason;
  r.message := p_message;
  r.state_since := p_now;

  foreach v_effect in array t.effects loop
    case v_effect
      when 'grant' then
        r.epoch := r.epoch + 1;
        r.holder := (p_data ->> 'pod')::uuid;
        r.wake_due := false; -- the lease brings whatever came until now
        r.started_at := coalesce(r.started_at, p_now);
        if r.deadline_at is null and r.deadline_seconds is not null then
          r.deadline_at := p_now + r.deadline_seconds * interval '1 second';
        end if;
        insert into perdure.leases (run_id, epoch, holder, gateway, granted_at, beat_at)
        values (r.run_id, r.epoch, r.holder, p_data ->> 'gateway', p_now, p_now);
      when 'revoke' then
        r.epoch := r.epoch + 1;
      when 'release' then
        delete from perdure.leases where run_id = r.run_id;
        -- A reusing pod stays leased, without a run, until it says that it has cleaned up.
        update perdure.pods set run_id = null, since = p_now, state = case when reuse and state = 'leased' then 'leased' else 'retiring' end
        where pod_id = r.holder and run_id = r.run_id;
        r.holder := null;
      when 'orphan' then
        for v_entry in update perdure.ledger set state = 'UNKNOWN' where run_id = r.run_id and state = 'RUNNING' returning key, tool, epoch, holder loop
          -- Its pod may have been seen gone before this commit: then that stays.
          insert into perdure.executors (run_id, epoch, pod_id, lost_at) values (r.run_id, v_entry.epoch, v_entry.holder, p_now) on conflict do nothing;
          r := perdure.log(r, 'activity.unknown', jsonb_build_object('key', v_entry.key, 'tool', v_entry.tool, 'why', p_event), p_now);
        end loop;
      when 'attempt' then
        r.attempt := r.attempt + 1;
      when 'enqueue' then
        r.runnable_at := greatest(r.runnable_at, p_now);
        r.rank := extract(epoch from r.runnable_at) - r.priority * 60.0;
      when 'clock_on' then
        r.active_since := coalesce(r.active_since, p_now);
      when 'clock_off' then
        r.active_ms := r.active_ms + coalesce(extract(epoch from p_now - r.active_since) * 1000, 0)::bigint;
        r.active_since := null;
      when 'finish' then
        r.finished_at := p_now;
        r.reasons := '[]';
        r.wake_due := false;
        update perdure.waits set state = 'closed' where run_id = r.run_id and state = 'open';
        delete from perdure.executors x where x.run_id = r.run_id and not exists (
          select 1 from perdure.ledger l where l.run_id = x.run_id and l.epoch = x.epoch and l.state = 'UNKNOWN');
        if r.parent_id is not null then
          insert into perdure.wakeups (run_id, kind, source, name, id, data, payload, at)
          values (r.parent_id, 'child_done', r.run_id::text, r.name, r.run_id::text,
                  jsonb_build_object('status', r.state, 'reason', p_reason, 'error', r.error, 'policy', r.parent_policy), r.result, p_now)
          on conflict do nothing;
        end if;
        -- The set of children is stable here: only this run spawns them, under the lock that we hold.
        insert into perdure.wakeups (run_id, kind, source, data, at)
        select c.run_id, 'cancel', r.run_id::text, jsonb_build_object('by', 'parent', 'reason', 'the parent is ' || r.state), p_now
        from perdure.runs c
        where c.parent_id = r.run_id and c.parent_policy <> 'detach' and not perdure.terminal(c.state)
        on conflict do nothing;
    end case;
  end loop;

  -- The resource's status follows (projector). For most runs this finds nothing: they have no resource.
  update perdure.resources set changed_seq = r.last_seq + 1 where run_id = r.run_id;
  return perdure.log(r, case p_event
      when 'lease' then 'run.leased' when 'suspend' then 'run.suspended' when 'wake' then 'run.woken' when 'lose' then 'run.lost'
      when 'retry' then 'run.retrying' when 'yield' then 'run.yielded' when 'pause' then 'run.paused'
      when 'succeed' then 'run.succeeded' when 'fail' then 'run.failed' when 'cancel' then 'run.cancelled' end,
    jsonb_strip_nulls(jsonb_build_object('from', v_from, 'to', r.state, 'epoch', r.epoch, 'attempt', r.attempt,
      'reason', nullif(p_reason, ''), 'message', nullif(p_message, ''))) || p_data, p_now);
end $$;

create or replace function perdure.fail(r perdure.runs, p_type text, p_message text, p_now timestamptz)
returns perdure.runs language plpgsql as $$
begin
  r.error := jsonb_build_object('type', p_type, 'message', p_message);
  return perdure.move(r, 'fail', p_type, p_message, p_now);
end $$;

-- L5: base * 2^(n-1), capped, times 0.5 to 1 by a hash of run and attempt: jitter that a test can know.
create or replace function perdure.backoff(r perdure.runs, p_n int) returns interval language sql immutable as $$
  select least(r.max_backoff_seconds, r.backoff_seconds * power(2, least(p_n - 1, 30)))
         * (0.5 + 0.5 * ((hashtext(r.run_id::text || p_n) & 2147483647) % 1000) / 999.0) * interval '1 second'
$$;

-- L5: one attempt ended badly. Attempts that count are limited; losses without progress park the run for a person.
create or replace function perdure.attempt_failed(r perdure.runs, p_type text, p_message text, p_now timestamptz)
returns perdure.runs language plpgsql as $$
begin
  r.failures := r.failures + 1;
  if r.cancel_requested then
    return perdure.move(r, 'cancel', 'Cancelled', p_message, p_now);
  elsif r.failures > r.max_retries then
    r.error := jsonb_build_object('type', 'RetriesExhausted', 'message', format('%s attempts failed, the last one: %s: %s', r.failures, p_type, p_message));
    return perdure.move(r, 'fail', 'RetriesExhausted', r.error ->> 'message', p_now);
  end if;
  r.runnable_at := p_now + perdure.backoff(r, r.failures);
  r.reasons := r.reasons || jsonb_build_array(jsonb_build_object('kind', 'retry', 'name', p_type, 'at', p_now));
  return perdure.move(r, 'retry', p_type, p_message, p_now, jsonb_build_object('runnableAt', r.runnable_at));
end $$;

-- Whether somebody is ending this pod, which may still hold a run: a deletion, an eviction, the end of `perdure dev`.
create or replace function perdure.taken_away(p_pod uuid) returns boolean language sql stable as $$
  select exists (select 1 from perdure.pods where pod_id = p_pod and state = 'retiring')
$$;

-- `p_counts`: false when somebody took the worker away on purpose. `p_message`: what there is to say beside the reason.
create or replace function perdure.worker_lost(r perdure.runs, p_reason text, p_counts boolean, p_now timestamptz, p_message text default '')
returns perdure.runs language plpgsql as $$
begin
  if p_counts then
    r.losses := case when r.worker_seq > r.loss_seq then 1 else r.losses + 1 end;
    r.loss_seq := r.worker_seq;
  end if;
  if r.cancel_requested then
    return perdure.move(r, 'cancel', 'Cancelled', 'the worker was lost after the cancel', p_now);
  elsif p_counts and r.losses > r.max_losses then
    r.paused := true;
    r.wake_due := true;
    return perdure.move(r, 'pause', 'LossesExhausted',
      format('%s workers were lost without progress, the last one: %s; resume to try again', r.losses,
             p_reason || coalesce(': ' || nullif(p_message, ''), '')), p_now);
  end if;
  r.reasons := r.reasons || jsonb_build_array(jsonb_build_object('kind', 'lost', 'name', p_reason, 'at', p_now));
  return perdure.move(r, 'lose', p_reason, p_message, p_now);
end $$;
