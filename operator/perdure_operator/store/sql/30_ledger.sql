-- The ledger of effects (E1-E5). Intent and key are committed before the execution, the receipt after it. FAILED means proven not
-- executed. An UNKNOWN external call is executed again on its provider's or its policy's word only with proof that its executor is gone:
-- the executor reported the end of the call itself, or perdure.executors says that nothing of its lease is left. That time has passed
-- proves nothing: what was frozen thaws. Without proof a person decides. Only where the provider ignores a second call (retry-same-key)
-- is it enough that lease and tool timeout have passed.

-- Seconds for which a proof that the executor of an UNKNOWN entry is gone may still come; 0: it is gone. Null: nothing proves it, and nothing
-- that would is on its way. A worker that lost its lease is ended and seen to have ended within its grace and a little more.
create or replace function perdure.gone_after(r perdure.runs, l perdure.ledger, p_policy text, p_now timestamptz) returns double precision
language plpgsql stable as $$
declare
  x perdure.executors;
  v_left double precision := extract(epoch from l.safe_at - p_now);
begin
  if l.effect <> 'external' or l.executor_ended then
    return 0;
  end if;
  select * into x from perdure.executors where run_id = l.run_id and epoch = l.epoch;
  if x.gone_at is not null then
    return 0;
  elsif p_policy = 'retry-same-key' then
    return greatest(v_left, 0);
  end if;
  v_left := greatest(v_left, extract(epoch from x.lost_at - p_now) + r.grace_seconds + 30);
  return case when v_left > 0 then v_left end;
end $$;

-- An entry of this lease is UNKNOWN no more. The last one takes with it what was known of its executor; but a lease that is live may leave
-- others, and its pod may have been seen gone already.
create or replace function perdure.forget_executor(p_run uuid, p_epoch int) returns void language sql as $$
  delete from perdure.executors x where x.run_id = p_run and x.epoch = p_epoch
    and not exists (select 1 from perdure.ledger l where l.run_id = p_run and l.epoch = p_epoch and l.state = 'UNKNOWN')
    and not exists (select 1 from perdure.leases s where s.run_id = p_run and s.epoch = p_epoch)
$$;

create or replace function perdure.ledger_answer(l perdure.ledger, p_decision text, p_message text, p_after double precision default 0)
returns jsonb language sql immutable as $$
  select jsonb_strip_nulls(jsonb_build_object('decision', p_decision, 'key', l.key, 'attempt', l.attempts, 'effect', l.effect,
    'token', case when p_decision in ('execute', 'retry') then l.token end, 'policy', l.policy, 'message', p_message,
    'retryAfterSeconds', greatest(p_after, 0), 'providerRef', l.provider_ref, 'error', l.error,
    'response', case when p_decision = 'receipt' then encode(l.response, 'base64') end))
$$;

-- Grants one more execution under the same key, with a new token.
create or replace function perdure.ledger_again(r perdure.runs, l perdure.ledger, p_body jsonb, p_decision text, p_message text,
                                                p_after double precision, p_now timestamptz) returns perdure.op_result language plpgsql as $$
declare
  v_before int := l.epoch;
begin
  update perdure.ledger set attempts = attempts + 1, past_tokens = past_tokens || token, state = 'RUNNING',
    token = (p_body ->> 'token')::uuid,
    policy = l.policy, timeout_seconds = l.timeout_seconds, max_retries = l.max_retries, epoch = r.epoch, holder = r.holder,
    executor_ended = false, error = null, absent_at = null, asked_at = null,
    -- The call starts after the backoff.
    safe_at = p_now + (p_after + l.timeout_seconds + (p_body ->> 'leaseSeconds')::double precision) * interval '1 second'
  where run_id = l.run_id and key = l.key returning * into l;
  perform perdure.forget_executor(l.run_id, v_before);
  r := perdure.log(r, 'activity.started', jsonb_build_object('key', l.key, 'tool', l.tool, 'effect', l.effect, 'attempt', l.attempts,
                                                            'token', l.token), p_now);
  return (r, perdure.ledger_answer(l, p_decision, p_message, p_after))::perdure.op_result;
end $$;

-- Whether the stored answer to a request of the present lease may be given again. One that granted an execution only while that is the one
-- that is open; and who hears of it now starts now, so what it may do ends later than it did at the first commit.
create or replace function perdure.still_granted(r perdure.runs, p_answer jsonb, p_body jsonb, p_now timestamptz) returns boolean language plpgsql as $$
begin
  if coalesce(p_answer ->> 'decision', '') not in ('execute', 'retry') then
    return true;
  end if;
  update perdure.ledger set safe_at = greatest(safe_at, p_now + interval '1 second' * (
    coalesce((p_answer ->> 'retryAfterSeconds')::double precision, 0) + timeout_seconds + (p_body ->> 'leaseSeconds')::double precision))
  where run_id = r.run_id and key = p_answer ->> 'key' and state = 'RUNNING' and token = (p_answer ->> 'token')::uuid;
  return found;
end $$;

-- What to do about an entry that is FAILED (proven not executed): again under the same key, until the retries are used up.
create or replace function perdure.ledger_retry(r perdure.runs, l perdure.ledger, p_body jsonb, p_now timestamptz,
                                                p_message text default 'an earlier attempt was proven not executed')
returns perdure.op_result language plpgsql as $$
begin
  if l.attempts > coalesce(l.max_retries, r.max_tool_retries) then
    return (r, perdure.ledger_answer(l, 'failed', 'the retries of this call are used up'))::perdure.op_result;
  end if;
  return perdure.ledger_again(r, l, p_body, 'retry', p_message, extract(epoch from perdure.backoff(r, l.attempts)), p_now);
end $$;

create or replace function perdure.op_activity_begin(r perdure.runs, p_body jsonb, p_request bytea, p_now timestamptz)
returns perdure.op_result language plpgsql as $$
declare
  l perdure.ledger;
  v_left double precision;
begin
  select * into l from perdure.ledger where run_id = r.run_id and key = p_body ->> 'key';
  if not found then
    r := perdure.log(r, 'activity.started', jsonb_build_object('key', p_body ->> 'key', 'tool', p_body ->> 'tool',
      'effect', p_body ->> 'effect', 'attempt', 1, 'token', p_body ->> 'token'), p_now);
    insert into perdure.ledger (run_id, key, tool, effect, state, policy, fingerprint, occurrence, step, timeout_seconds, max_retries, token, epoch,
      holder, safe_at, request, seq)
    values (r.run_id, p_body ->> 'key', p_body ->> 'tool', p_body ->> 'effect', 'RUNNING', p_body ->> 'policy', p_body ->> 'fingerprint',
      (p_body ->> 'occurrence')::int, p_body ->> 'step', (p_body ->> 'timeoutSeconds')::double precision, (p_body ->> 'maxRetries')::int,
      (p_body ->> 'token')::uuid, r.epoch, r.holder,
      p_now + ((p_body ->> 'timeoutSeconds')::double precision + (p_body ->> 'leaseSeconds')::double precision) * interval '1 second',
      p_request, r.last_seq)
    returning * into l;
    return (r, perdure.ledger_answer(l, 'execute', ''))::perdure.op_result;
  end if;

  if l.fingerprint <> p_body ->> 'fingerprint' and not coalesce((p_body ->> 'scopeIsIdentity')::boolean, false) then
    return (r, perdure.ledger_answer(l, 'conflict', format(
      'the same effect was begun with other arguments (it is %s): call it with those, or raise the occurrence if a second one is meant', l.state)))::perdure.op_result;
  end if;

  -- The call of today decides how long it may take and how often, and what is done when nobody knows: a pool or a new release may have
  -- changed it to get a stuck run going.
  l.timeout_seconds := (p_body ->> 'timeoutSeconds')::double precision;
  l.max_retries := (p_body ->> 'maxRetries')::int;

  case l.state
    when 'SUCCEEDED' then
      return (r, perdure.ledger_answer(l, 'receipt', 'this effect has happened; raise the occurrence if a second one is meant'))::perdure.op_result;
    when 'RUNNING' then
      return (r, perdure.ledger_answer(l, 'busy', 'another call under this key is open', 0.2))::perdure.op_result;
    when 'UNKNOWN' then
      l.policy := p_body ->> 'policy';
      v_left := perdure.gone_after(r, l, l.policy, p_now);
      if v_left is null and (l.policy = 'assume-not-done' or l.policy = 'query' and l.absent_at is not null) then
        l.policy := 'ask';
        return (r, perdure.ledger_answer(l, 'unknown',
          'nothing proves that the earlier executor is gone, so it may still act: a person must decide'))::perdure.op_result;
      elsif l.policy in ('query', 'ask', 'fail') then
        -- A provider that is asked before the old executor has ended can say what it has, and not what it will not have.
        if l.policy = 'query' and v_left = 0 and l.asked_at is null then
          update perdure.ledger set asked_at = p_now where run_id = l.run_id and key = l.key;
        end if;
        return (r, perdure.ledger_answer(l, 'unknown', 'nobody knows whether this effect happened',
          case when l.policy = 'query' then coalesce(v_left, 0) else 0 end))::perdure.op_result;
      elsif v_left > 0 then
        return (r, perdure.ledger_answer(l, 'unknown', 'the earlier executor may still act', v_left))::perdure.op_result;
      end if;
      return perdure.ledger_again(r, l, p_body, 'execute', 'the outcome of an earlier call is unknown; the policy is ' || l.policy, 0, p_now);
    else
      return perdure.ledger_retry(r, l, p_body, p_now);
  end case;
end $$;

-- A receipt. `p_fenced`: it came under the lease that is live now; otherwise it is evidence (invariant 2).
create or replace function perdure.op_activity_end(r perdure.runs, p_fenced boolean, p_body jsonb, p_response bytea, p_now timestamptz)
returns perdure.op_result language plpgsql as $$
declare
  l perdure.ledger;
  v_state text := upper(p_body ->> 'state');
  v_token uuid := (p_body ->> 'token')::uuid;
  v_current boolean;
  v_evidence boolean;
  v_twice boolean;
  v_before text;
begin
  select * into l from perdure.ledger where run_id = r.run_id and key = p_body ->> 'key';
  if not found or (v_token <> l.token and v_token <> all (l.past_tokens)) then
    perform perdure.refuse('unknown-activity', format('no execution of %s was granted with this token', p_body ->> 'key'));
  end if;
  v_before := l.state;
  v_current := v_token = l.token;
  v_evidence := not (p_fenced and v_current and l.state = 'RUNNING');

  if v_state = 'CANCELLED' and l.effect in ('external', 'memory') then
    v_state := 'UNKNOWN'; -- E1: that a call was cancelled does not prove that nothing happened
  end if;
  -- An execution that was given up for lost did happen, and another was granted since.
  v_twice := v_state = 'SUCCEEDED' and not v_current and l.state in ('RUNNING', 'SUCCEEDED');

  -- Success is believed from whoever was granted the call, whatever was thought of it since: a receipt that is ignored would permit a second
  -- execution. Any other word counts only from the execution that is the last one granted. The token that succeeded is the entry's from then on.
  if v_state = 'SUCCEEDED' and l.state <> 'SUCCEEDED'
     or v_state <> 'SUCCEEDED' and v_current and (l.state = 'RUNNING' or l.state = 'UNKNOWN' and (v_state <> 'UNKNOWN' or p_fenced)) then
    update perdure.ledger set state = v_state, response = case when v_state = 'SUCCEEDED' then p_response end,
      provider_ref = p_body ->> 'providerRef', error = p_body -> 'error',
      executor_ended = executor_ended or v_current and not coalesce((p_body ->> 'stillRunning')::boolean, false),
      token = v_token, past_tokens = case when v_current then past_tokens else array_append(array_remove(past_tokens, v_token), token) end
    where run_id = l.run_id and key = l.key returning * into l;
    if v_before = 'UNKNOWN' then
      perform perdure.forget_executor(l.run_id, l.epoch);
    elsif l.state = 'UNKNOWN' and l.executor_ended then
      -- Whoever asks the provider what became of it asks after this.
      update perdure.ledger set asked_at = p_now where run_id = l.run_id and key = l.key;
    elsif l.state = 'UNKNOWN' and not l.executor_ended then
      insert into perdure.executors (run_id, epoch, pod_id, lost_at) values (l.run_id, l.epoch, l.holder, p_now) on conflict do nothing;
    end if;
    if not perdure.terminal(r.state) then
      r := perdure.log(r, case when v_evidence then 'activity.evidence' else 'activity.' || lower(v_state) end,
        jsonb_strip_nulls(jsonb_build_object('key', l.key, 'tool', l.tool, 'state', l.state, 'attempt', l.attempts,
          'providerRef', l.provider_ref, 'error', l.error)), p_now);
      update perdure.ledger set done_seq = r.last_seq where run_id = l.run_id and key = l.key;
    end if;
  end if;
  if v_twice and not perdure.terminal(r.state) then
    r := perdure.log(r, 'activity.duplicate_effect', jsonb_strip_nulls(jsonb_build_object('key', l.key, 'tool', l.tool, 'state', l.state,
      'providerRef', p_body ->> 'providerRef')), p_now);
  end if;
  return (r, jsonb_build_object('state', l.state, 'seq', r.last_seq, 'evidence', v_evidence))::perdure.op_result;
end $$;

-- What a provider, or a person, says about an UNKNOWN entry. That it happened is believed. That it did not is a provider's word only if it
-- was asked when nobody could make it happen any more, so after a `begin` that knew that; a person's word is a decision, which stands at
-- once, and says what it disregards.
create or replace function perdure.op_activity_resolve(r perdure.runs, p_body jsonb, p_response bytea, p_now timestamptz)
returns perdure.op_result language plpgsql as $$
declare
  l perdure.ledger;
  v_left double precision;
  v_person boolean := p_body ->> 'by' = 'person';
  v_message text := 'an earlier attempt was proven not executed';
  v_may_act jsonb;
begin
  select * into l from perdure.ledger where run_id = r.run_id and key = p_body ->> 'key';
  if not found then
    perform perdure.refuse('unknown-activity', 'there is no such ledger entry');
  elsif l.state in ('SUCCEEDED', 'RUNNING') or l.state <> 'UNKNOWN' and not (p_body ->> 'happened')::boolean then
    return perdure.op_activity_begin(r, p_body || jsonb_build_object('fingerprint', l.fingerprint, 'timeoutSeconds', l.timeout_seconds,
      'maxRetries', l.max_retries), null, p_now);
  end if;
  if (p_body ->> 'happened')::boolean then
    update perdure.ledger set state = 'SUCCEEDED', response = p_response, provider_ref = p_body ->> 'providerRef', error = null
    where run_id = l.run_id and key = l.key returning * into l;
  else
    v_left := perdure.gone_after(r, l, 'query', p_now);
    if v_person then
      v_message := 'a person says that it did not happen';
      if v_left is distinct from 0 then
        v_may_act := jsonb_build_object('pod', l.holder, 'epoch', l.epoch);
        v_message := v_message || format('; pod %s, which executed it under epoch %s, was not seen to have ended and may still act', l.holder, l.epoch);
      end if;
    elsif v_left is null then
      update perdure.ledger set absent_at = p_now where run_id = l.run_id and key = l.key;
      l.policy := 'ask';
      return (r, perdure.ledger_answer(l, 'unknown',
        'not found, but nothing proves that the earlier executor is gone, so it may still act: a person must decide'))::perdure.op_result;
    elsif v_left > 0 then
      return (r, perdure.ledger_answer(l, 'unknown', 'not found, but the earlier executor may still act: begin again', v_left))::perdure.op_result;
    elsif l.asked_at is null and l.effect = 'external' then
      return (r, perdure.ledger_answer(l, 'unknown', 'not found, but that was asked before the earlier executor was known to be gone: begin again',
                                       0.1))::perdure.op_result;
    end if;
    update perdure.ledger set state = 'FAILED' where run_id = l.run_id and key = l.key returning * into l;
  end if;
  perform perdure.forget_executor(l.run_id, l.epoch);
  r := perdure.log(r, 'activity.resolved', jsonb_strip_nulls(jsonb_build_object('key', l.key, 'tool', l.tool, 'state', l.state,
    'by', p_body ->> 'by', 'providerRef', l.provider_ref, 'mayStillAct', v_may_act)), p_now);
  update perdure.ledger set done_seq = r.last_seq where run_id = l.run_id and key = l.key;
  if l.state = 'SUCCEEDED' then
    return (r, perdure.ledger_answer(l, 'receipt',
      case when v_person then 'a person' else 'the provider' end || ' says that it has happened'))::perdure.op_result;
  end if;
  return perdure.ledger_retry(r, l, p_body, p_now, v_message);
end $$;
