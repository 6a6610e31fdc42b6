-- Operations that are not about waits or effects: create, spawn, checkpoint, custom events, finish; signal, cancel, pause, resume; expire.

-- A new run, Pending, with its first event. `p` holds the columns by name and the spec; the gateway has validated it.
create or replace function perdure.insert_run(p jsonb, p_input bytea, p_now timestamptz) returns perdure.runs language plpgsql as $$
declare
  r perdure.runs;
begin
  r := jsonb_populate_record(null::perdure.runs, p);
  r.state := 'Pending';
  r.reason := 'Queued';
  r.message := '';
  r.state_since := p_now;
  r.created_at := p_now;
  r.epoch := 0;
  r.attempt := 1;
  r.failures := 0; r.losses := 0; r.last_seq := 1; r.worker_seq := 0; r.loss_seq := 0; r.steps := 0;
  r.root_id := coalesce(r.root_id, r.run_id);
  r.parent_policy := coalesce(r.parent_policy, 'cancel');
  r.priority := coalesce(r.priority, 0);
  r.runnable_at := p_now;
  r.rank := extract(epoch from p_now) - r.priority * 60.0;
  -- `start`: which firing of a trigger began it, and how late.
  r.reasons := jsonb_build_array(jsonb_build_object('kind', 'start', 'at', p_now) || coalesce(p -> 'start', '{}'));
  r.cancel_requested := false; r.paused := false; r.wake_due := false;
  r.spec_paused := coalesce(r.spec_paused, false); r.superseded := false;
  r.raw_bytes := 0; r.stored_bytes := 0; r.size_told := false;
  r.active_ms := 0;
  r.active_since := p_now;
  r.expires_at := perdure.expiry(r);
  insert into perdure.runs select (r).*;
  insert into perdure.run_specs (run_id, spec, labels, summary, objective, input)
  values (r.run_id, p -> 'spec', coalesce(p -> 'labels', '{}'), coalesce(p ->> 'summary', ''), coalesce(p ->> 'objective', ''), p_input);
  insert into perdure.events (run_id, seq, epoch, at, kind, data)
  values (r.run_id, 1, 0, p_now, 'run.created', jsonb_strip_nulls(jsonb_build_object('to', 'Pending', 'epoch', 0, 'attempt', 1,
    'name', r.name, 'pool', r.pool, 'parent', r.parent_id, 'start', p -> 'start')));
  if r.spec_paused then
    r := perdure.settle(r, p_now);
    perform perdure.save(r);
  end if;
  return r;
end $$;

-- Creates runs in one commit, all or none: a name that is taken refuses the whole request. An idempotency key that exists is that run.
-- In the order of keys and names, not of the request: two that create the same ones the other way round would wait for each other.
create or replace function perdure.create_runs(p_runs jsonb[], p_inputs bytea[], p_blob_ord int[], p_blob_hash bytea[], p_blob_data bytea[])
returns table (ord int, code text, run_id uuid) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
  v_old record;
begin
  for ord in select n from unnest(p_runs) with ordinality u(p, n) order by p ->> 'idempotency_key', p ->> 'namespace', p ->> 'name' loop
    begin
      run_id := (perdure.insert_run(p_runs[ord], p_inputs[ord], v_now)).run_id;
      code := 'ok';
      insert into perdure.blobs (run_id, hash, data)
      select create_runs.run_id, h, d from unnest(p_blob_ord, p_blob_hash, p_blob_data) b(o, h, d) where o = ord on conflict do nothing;
    exception when unique_violation then
      select q.run_id, q.idempotency_key into v_old from perdure.runs q
      where q.namespace = p_runs[ord] ->> 'namespace' and q.idempotency_key = p_runs[ord] ->> 'idempotency_key';
      if found then
        code := 'existing';
        run_id := v_old.run_id;
      else
        perform perdure.refuse('name-taken', format('there is a run named %s in namespace %s', p_runs[ord] ->> 'name', p_runs[ord] ->> 'namespace'));
      end if;
    end;
    return next;
  end loop;
end $$;

create or replace function perdure.op_spawn(r perdure.runs, p_body jsonb, p_input bytea, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_child text;
  v_kind text;
begin
  select data ->> 'child', kind into v_child, v_kind from perdure.journal where run_id = r.run_id and key = p_body ->> 'key';
  if v_kind = 'spawn' then
    return (r, jsonb_build_object('child', v_child, 'existing', true))::perdure.op_result;
  elsif found then
    perform perdure.refuse('invalid-input', format('the key %s is that of a %s', p_body ->> 'key', v_kind));
  end if;
  v_child := p_body -> 'run' ->> 'run_id';
  r := perdure.log(r, 'child.spawned', jsonb_build_object('key', p_body ->> 'key', 'child', v_child, 'name', p_body -> 'run' ->> 'name',
    'pool', p_body -> 'run' ->> 'pool'), p_now);
  insert into perdure.journal (run_id, key, kind, name, state, seq, epoch, fingerprint, data)
  values (r.run_id, p_body ->> 'key', 'spawn', p_body -> 'run' ->> 'pool', 'succeeded', r.last_seq, r.epoch, p_body ->> 'fingerprint',
    jsonb_build_object('child', v_child));
  -- A resource's child is one too, unless it is to be a row and nothing else: wide fan-out must not weigh on the cluster.
  if coalesce(p_body ->> 'recording', 'Resource') = 'Resource' then
    insert into perdure.resources (run_id, name, changed_seq)
    select v_child::uuid, p_body -> 'run' ->> 'name', 1 from perdure.resources p where p.run_id = r.run_id and not p.gone;
  end if;
  begin
    perform perdure.insert_run((p_body -> 'run') || jsonb_build_object('parent_id', r.run_id, 'root_id', r.root_id), p_input, p_now);
  exception when unique_violation then
    perform perdure.refuse('name-taken', format('a run named %s exists in this namespace', p_body -> 'run' ->> 'name'));
  end;
  return (r, jsonb_build_object('child', v_child, 'existing', false))::perdure.op_result;
end $$;

create or replace function perdure.op_event(r perdure.runs, p_body jsonb, p_payload bytea, p_now timestamptz) returns perdure.op_result language plpgsql as $$
begin
  if (p_body ->> 'expectedSeq')::bigint <> r.last_seq then
    perform perdure.refuse('concurrent-append', format('the log is at %s, not at %s', r.last_seq, p_body ->> 'expectedSeq'));
  end if;
  r := perdure.log(r, 'agent.' || (p_body ->> 'kind'), '{}', p_now, p_payload);
  return (r, jsonb_build_object('seq', r.last_seq))::perdure.op_result;
end $$;

create or replace function perdure.op_checkpoint(r perdure.runs, p_body jsonb, p_cursor bytea, p_now timestamptz) returns perdure.op_result language plpgsql as $$
begin
  r := perdure.log(r, 'checkpoint.saved', jsonb_build_object('type', p_body ->> 'type', 'coversSeq', p_body -> 'coversSeq'), p_now);
  insert into perdure.checkpoints (run_id, seq, type, cursor, covers_seq, epoch)
  values (r.run_id, r.last_seq, p_body ->> 'type', p_cursor, (p_body ->> 'coversSeq')::bigint, r.epoch);
  return (r, jsonb_build_object('seq', r.last_seq))::perdure.op_result;
end $$;

create or replace function perdure.op_finish(r perdure.runs, p_body jsonb, p_output bytea, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_type text := coalesce(p_body -> 'error' ->> 'type', '');
  v_message text := left(coalesce(p_body -> 'error' ->> 'message', ''), 2000);
  v_pod uuid;
  v_counts boolean;
begin
  case p_body ->> 'outcome'
    when 'succeeded' then
      if r.cancel_requested then
        perform perdure.refuse('cancel-requested', 'a cancel was committed before this completion');
      end if;
      r.result := p_output;
      r := perdure.move(r, 'succeed', 'Succeeded', '', p_now);
    when 'failed' then
      r.error := case when r.cancel_requested then null else p_body -> 'error' end;
      r := case when r.cancel_requested then perdure.move(r, 'cancel', 'Cancelled', v_message, p_now)
                else perdure.move(r, 'fail', coalesce(nullif(v_type, ''), 'Failed'), v_message, p_now) end;
    when 'retry' then
      -- An agent that knows nothing of SIGTERM just ends, and its sidecar says so. That is not its failure when somebody took its pod away.
      r := case when v_type = 'AgentDisconnected' and perdure.taken_away(r.holder) then perdure.worker_lost(r, 'Terminated', false, p_now)
                else perdure.attempt_failed(r, v_type, v_message, p_now) end;
    when 'yielded' then
      v_pod := r.holder;
      v_counts := not perdure.taken_away(v_pod);
      r := perdure.worker_lost(r, 'Terminated', v_counts, p_now);
      if v_counts then
        -- It may turn out that somebody did take the pod away, and only his word was late (op_undo_loss).
        update perdure.pods set charged_run = r.run_id, charged_seq = r.loss_seq where pod_id = v_pod;
      end if;
    when 'stalled' then
      r := perdure.attempt_failed(r, 'Stalled', v_message, p_now);
    when 'cancelled' then
      if not r.cancel_requested then
        perform perdure.refuse('illegal-transition', 'no cancel was requested; fail the run, or cancel it through the public API');
      end if;
      r := perdure.move(r, 'cancel', 'Cancelled', '', p_now);
    when 'paused' then
      if r.paused or r.spec_paused then
        r.wake_due := true;
        r.reasons := '[{"kind": "resume"}]';
        r := perdure.move(r, 'pause', 'Paused', '', p_now);
      else
        r := perdure.move(r, 'yield', 'Resumed', '', p_now);
      end if;
  end case;
  r := perdure.settle(r, p_now);
  return (r, jsonb_build_object('state', r.state))::perdure.op_result;
end $$;

create or replace function perdure.op_signal(r perdure.runs, p_body jsonb, p_payload bytea, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_source text := jsonb_build_array(p_body ->> 'name', p_body ->> 'id'); -- both may hold any character
  v_seq bigint;
begin
  select seq into v_seq from perdure.wakeups where run_id = r.run_id and kind = 'signal' and source = v_source;
  if found then
    return (r, jsonb_build_object('seq', v_seq, 'duplicate', true, 'state', r.state))::perdure.op_result;
  elsif perdure.terminal(r.state) then
    perform perdure.refuse('run-finished', format('the run is %s', r.state));
  end if;
  r := perdure.log(r, 'signal.received', jsonb_build_object('name', p_body ->> 'name', 'id', p_body ->> 'id'), p_now);
  v_seq := r.last_seq;
  insert into perdure.wakeups (run_id, kind, source, name, id, payload, at, seq)
  values (r.run_id, 'signal', v_source, p_body ->> 'name', p_body ->> 'id', p_payload, p_now, v_seq);
  if r.state = 'Running' then
    perform perdure.poke(r);
  end if;
  r := perdure.settle(r, p_now);
  return (r, jsonb_build_object('seq', v_seq, 'duplicate', false, 'state', r.state))::perdure.op_result;
end $$;

-- cancel, pause, resume: the verbs of a person. Saying it again changes nothing.
create or replace function perdure.op_verb(r perdure.runs, p_verb text, p_body jsonb, p_now timestamptz) returns perdure.op_result language plpgsql as $$
begin
  if perdure.terminal(r.state) then
    if r.state = 'Cancelled' and p_verb = 'cancel' then
      return (r, jsonb_build_object('state', r.state))::perdure.op_result;
    end if;
    perform perdure.refuse('run-finished', format('the run is %s', r.state));
  end if;
  if p_verb = 'cancel' and not r.cancel_requested then
    r.cancel_requested := true;
    r.cancel_due_at := perdure.cancel_due(r, p_now);
    r := perdure.log(r, 'run.cancel_requested', p_body, p_now);
  elsif p_verb = 'pause' and (not r.paused or r.reason = 'LossesExhausted') then
    if r.paused then -- by its losses: from now on it is a person who holds it
      r.reason := 'Paused';
    end if;
    r.paused := true;
    r := perdure.log(r, 'run.pause_requested', p_body, p_now);
    perform perdure.show(r);
  elsif p_verb = 'resume' and r.paused then
    r.paused := false;
    r.losses := 0;
    r := perdure.log(r, 'run.resume_requested', p_body, p_now);
    perform perdure.show(r);
    perform perdure.poke(r);
  end if;
  r := perdure.settle(r, p_now);
  return (r, jsonb_build_object('state', r.state))::perdure.op_result;
end $$;

-- The resource's spec has changed: level-triggered, whatever was said before. Only what may change is here (B1).
create or replace function perdure.op_spec(r perdure.runs, p_body jsonb, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_paused boolean := p_body ->> 'desiredState' = 'Suspended';
  v_priority int := coalesce((p_body ->> 'priority')::int, 0);
begin
  if exists (select 1 from perdure.resources where run_id = r.run_id and generation > (p_body ->> 'generation')::bigint) then
    -- A leader that was frozen before it sent this has woken up: its successor has told the run a newer spec since.
    return (r, jsonb_build_object('state', r.state))::perdure.op_result;
  end if;
  -- Shown as observed, also if nothing else comes of it.
  update perdure.resources set generation = (p_body ->> 'generation')::bigint, changed_seq = r.last_seq, projected_seq = r.last_seq - 1
  where run_id = r.run_id and generation < (p_body ->> 'generation')::bigint;
  if perdure.terminal(r.state) then
    return (r, jsonb_build_object('state', r.state))::perdure.op_result;
  end if;
  r.rank := r.rank - (v_priority - r.priority) * 60.0;
  r.priority := v_priority;
  -- A limit that the spec does not name is the pool's, or that of a run which was there before its resource.
  r.active_limit_ms := coalesce((p_body ->> 'activeLimitMs')::bigint, r.active_limit_ms);
  r.deadline_seconds := coalesce((p_body ->> 'deadlineSeconds')::double precision, r.deadline_seconds);
  r.max_tool_retries := coalesce((p_body ->> 'maxToolRetries')::int, r.max_tool_retries);
  r.deadline_at := r.started_at + r.deadline_seconds * interval '1 second';
  if v_paused <> r.spec_paused then
    r.spec_paused := v_paused;
    r := perdure.log(r, case when v_paused then 'run.pause_requested' else 'run.resume_requested' end, '{"by": "spec"}', p_now);
    perform perdure.show(r);
    perform perdure.poke(r);
  end if;
  if p_body ->> 'desiredState' = 'Cancelled' then
    return perdure.op_verb(r, 'cancel', '{"by": "spec"}', p_now);
  end if;
  r := perdure.settle(r, p_now);
  return (r, jsonb_build_object('state', r.state))::perdure.op_result;
end $$;

-- The child outlives its parent (V5): its resource has lost the owner reference. Whoever hears ok can count on it: a cancel that the parent
-- inserted and the child has not applied is void from then on (perdure.settle).
create or replace function perdure.op_detach(r perdure.runs, p_body jsonb, p_now timestamptz) returns perdure.op_result language plpgsql as $$
begin
  if r.parent_policy <> 'detach' and not perdure.terminal(r.state) then
    if r.cancel_requested then
      perform perdure.refuse('cancel-requested', 'the child is being cancelled already: it cannot be detached any more');
    end if;
    r.parent_policy := 'detach';
    r := perdure.log(r, 'run.detached', p_body, p_now);
  end if;
  return (r, '{}'::jsonb)::perdure.op_result;
end $$;

-- The lease (epoch) is over without a word from the worker. `weight`: what that says of the attempt (domain/lease.py). `silentSeconds`: only if the heartbeats are
-- as old as the reaper believes; one may have come since it looked.
create or replace function perdure.op_expire(r perdure.runs, p_body jsonb, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  l perdure.leases;
begin
  -- Locked: a beat that is being committed is waited for, and counts.
  select * into l from perdure.leases where run_id = r.run_id and epoch = (p_body ->> 'leaseEpoch')::int for update;
  if not found or l.beat_at > p_now - coalesce((p_body ->> 'silentSeconds')::double precision, 0) * interval '1 second' then
    return (r, jsonb_build_object('expired', false))::perdure.op_result;
  end if;
  r := case p_body ->> 'weight'
    when 'failure' then perdure.attempt_failed(r, p_body ->> 'reason', 'the worker ended', p_now)
    else perdure.worker_lost(r, p_body ->> 'reason', p_body ->> 'weight' is distinct from 'none', p_now,
                              coalesce(p_body ->> 'message', '')) end;
  r := perdure.settle(r, p_now);
  return (r, jsonb_build_object('expired', true))::perdure.op_result;
end $$;

-- Somebody took the pod away that had given this run back: the loss that was counted is none. A run that was parked for it goes on. The
-- charge goes in the same commit, so to say it twice changes nothing.
create or replace function perdure.op_undo_loss(r perdure.runs, p_body jsonb, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_seq bigint;
begin
  update perdure.pods set charged_run = null where pod_id = (p_body ->> 'pod')::uuid and charged_run = r.run_id returning charged_seq into v_seq;
  -- Of an earlier series it says nothing: there has been progress since, and other workers were lost after that.
  if not found or perdure.terminal(r.state) or v_seq is distinct from r.loss_seq then
    return (r, jsonb_build_object('undone', false))::perdure.op_result;
  end if;
  r.losses := greatest(r.losses - 1, 0);
  if r.state = 'Suspended' and r.paused and r.reason = 'LossesExhausted' then
    r.paused := false;
    r := perdure.log(r, 'run.resume_requested', '{"by": "operator"}', p_now);
    perform perdure.show(r);
  end if;
  r := perdure.settle(r, p_now);
  return (r, jsonb_build_object('undone', true))::perdure.op_result;
end $$;
