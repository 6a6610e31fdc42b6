-- The ledger of effects (E1-E5). Intent and key are committed before the execution, the receipt after it. FAILED means proven not
-- executed. An UNKNOWN external call is executed again only when the old executor cannot act any more: its pod was seen terminated, it
-- reported the end of the call itself, or lease and tool timeout have passed.

-- Seconds for which the executor of an UNKNOWN entry may still act; 0 or less: it cannot any more.
create or replace function perdure.may_act_seconds(l perdure.ledger, p_now timestamptz) returns double precision language sql stable as $$
  select case when l.effect <> 'external' or l.executor_ended or exists (select 1 from perdure.terminated_pods t where t.pod_id = l.holder) then 0
              else extract(epoch from l.safe_at - p_now) end
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
begin
  update perdure.ledger set attempts = attempts + 1, past_tokens = past_tokens || token, state = 'RUNNING',
    -- A request that is looked at anew may bring the token that it was granted before: no token stands for two executions.
    token = case when (p_body ->> 'token')::uuid = any (past_tokens || token) then md5((p_body ->> 'token') || attempts)::uuid
                 else (p_body ->> 'token')::uuid end,
    policy = l.policy, timeout_seconds = l.timeout_seconds, max_retries = l.max_retries, epoch = r.epoch, holder = r.holder,
    executor_ended = false, error = null,
    -- The call starts after the backoff.
    safe_at = p_now + (p_after + l.timeout_seconds + (p_body ->> 'leaseSeconds')::double precision) * interval '1 second'
  where run_id = l.run_id and key = l.key returning * into l;
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
create or replace function perdure.ledger_retry(r perdure.runs, l perdure.ledger, p_body jsonb, p_now timestamptz)
returns perdure.op_result language plpgsql as $$
begin
  if l.attempts > coalesce(l.max_retries, r.max_tool_retries) then
    return (r, perdure.ledger_answer(l, 'failed', 'the retries of this call are used up'))::perdure.op_result;
  end if;
  return perdure.ledger_again(r, l, p_body, 'retry', 'an earlier attempt was proven not executed',
                              extract(epoch from perdure.backoff(r, l.attempts)), p_now);
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
      v_left := perdure.may_act_seconds(l, p_now);
      if l.policy in ('query', 'ask', 'fail') then
        -- A provider that is asked before the old executor has ended can say what it has, and not what it will not have.
        return (r, perdure.ledger_answer(l, 'unknown', 'nobody knows whether this effect happened',
          case when l.policy = 'query' then v_left else 0 end))::perdure.op_result;
      end if;
      if v_left > 0 then
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
begin
  select * into l from perdure.ledger where run_id = r.run_id and key = p_body ->> 'key';
  if not found or (v_token <> l.token and v_token <> all (l.past_tokens)) then
    perform perdure.refuse('unknown-activity', format('no execution of %s was granted with this token', p_body ->> 'key'));
  end if;
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

create or replace function perdure.op_activity_resolve(r perdure.runs, p_body jsonb, p_response bytea, p_now timestamptz)
returns perdure.op_result language plpgsql as $$
declare
  l perdure.ledger;
  v_left double precision;
begin
  select * into l from perdure.ledger where run_id = r.run_id and key = p_body ->> 'key';
  if not found then
    perform perdure.refuse('unknown-activity', 'there is no such ledger entry');
  elsif l.state in ('SUCCEEDED', 'RUNNING') or l.state <> 'UNKNOWN' and not (p_body ->> 'happened')::boolean then
    return perdure.op_activity_begin(r, p_body || jsonb_build_object('fingerprint', l.fingerprint, 'timeoutSeconds', l.timeout_seconds,
      'maxRetries', l.max_retries), null, p_now);
  end if;
  v_left := perdure.may_act_seconds(l, p_now);
  if (p_body ->> 'happened')::boolean then
    update perdure.ledger set state = 'SUCCEEDED', response = p_response, provider_ref = p_body ->> 'providerRef', error = null
    where run_id = l.run_id and key = l.key returning * into l;
  elsif v_left > 0 then
    return (r, perdure.ledger_answer(l, 'unknown', 'not found, but the earlier executor may still act', v_left))::perdure.op_result;
  else
    update perdure.ledger set state = 'FAILED' where run_id = l.run_id and key = l.key returning * into l;
  end if;
  r := perdure.log(r, 'activity.resolved', jsonb_strip_nulls(jsonb_build_object('key', l.key, 'tool', l.tool, 'state', l.state,
    'by', p_body ->> 'by', 'providerRef', l.provider_ref)), p_now);
  update perdure.ledger set done_seq = r.last_seq where run_id = l.run_id and key = l.key;
  if l.state = 'SUCCEEDED' then
    return (r, perdure.ledger_answer(l, 'receipt',
      case p_body ->> 'by' when 'person' then 'a person' else 'the provider' end || ' says that it has happened'))::perdure.op_result;
  end if;
  return perdure.ledger_retry(r, l, p_body, p_now);
end $$;

