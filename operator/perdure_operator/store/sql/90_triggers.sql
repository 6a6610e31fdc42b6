-- Triggers and deliveries (T). Lock order: the trigger's row, then its deliveries, then a new run; no run that exists is ever locked here.

-- What a trigger's deletion closes made nothing and is to be told from what was decided: such a delivery does not use up the key of an event.
create or replace function perdure.trigger_deleted() returns jsonb language sql immutable as $$
  select '{"action": "drop", "reason": "TriggerDeleted"}'::jsonb
$$;

-- A firing is stored, once a dedup key. Held back while the trigger is suspended.
create or replace function perdure.emit(p_id uuid, p_trigger text, p_source text, p_dedup text, p_payload bytea, p_detail jsonb)
returns table (delivery_id uuid, duplicate boolean) language plpgsql as $$
declare
  v_now timestamptz := perdure.now();
  v_suspended boolean;
begin
  -- Shared with all but a change of the trigger itself: its resumption must find what was held back.
  select t.suspended into v_suspended from perdure.triggers t where t.trigger_key = p_trigger and not t.deleted for key share;
  if not found then
    perform perdure.refuse('trigger-not-found', format('there is no Trigger %s', p_trigger));
  end if;
  -- Of two at once the second waits here, finds the key handed over, and then the first one's row in its way. No source is called so.
  update perdure.deliveries d set dedup_key = format('superseded:%s:%s', d.delivery_id, d.dedup_key), superseded_by = p_id
  where d.dedup_key = p_dedup and d.state = 'FAILED' and d.decision = perdure.trigger_deleted();
  insert into perdure.deliveries as d (delivery_id, trigger_key, source, dedup_key, state, fire_at, not_before, payload, detail, created_at)
  values (p_id, p_trigger, p_source, p_dedup, 'PENDING', v_now, case when v_suspended then 'infinity' else v_now end, p_payload, p_detail, v_now)
  on conflict (dedup_key) do nothing;
  return query select d.delivery_id, d.delivery_id <> p_id from perdure.deliveries d where d.dedup_key = p_dedup;
end $$;

-- The scheduler's tick: of the triggers that are still as they were seen, claims those that nobody else has, stores their firings and moves them on.
-- Gives how many firings were new.
create or replace function perdure.fire(p_ticks jsonb) returns bigint language sql as $$
  with clock as materialized (
    select perdure.now() as now
  ), tick as (
    select * from jsonb_to_recordset(p_ticks) as k(trigger_key text, revision bigint, seen_at timestamptz, next_at timestamptz, firings jsonb)
  ), claimed as materialized (
    select k.* from perdure.triggers t join tick k using (trigger_key)
    where t.next_at = k.seen_at and t.revision = k.revision and not t.suspended and not t.deleted
    order by t.trigger_key for update of t skip locked
  ), firing as (
    select c.trigger_key, f.* from claimed c cross join lateral
      jsonb_to_recordset(c.firings) as f(id uuid, source text, dedup_key text, at timestamptz, detail jsonb)
  ), moved as (
    update perdure.triggers t
    set next_at = c.next_at, fired_at = greatest(t.fired_at, (select max(f.at) from firing f where f.trigger_key = c.trigger_key))
    from claimed c where t.trigger_key = c.trigger_key
  ), made as (
    insert into perdure.deliveries (delivery_id, trigger_key, source, dedup_key, state, fire_at, not_before, detail, created_at)
    select f.id, f.trigger_key, f.source, f.dedup_key, 'PENDING', f.at, (select now from clock), f.detail, (select now from clock)
    from firing f order by f.dedup_key
    on conflict (dedup_key) do nothing returning 1
  )
  select count(*) from made
$$;

-- Deliveries to route: those that are due, and those whose claim is over. `attempts` counts the tries that came to an end, so an outage of ours
-- costs none; what is given out is the number of the try that begins. `claims` counts those that came to none, since the last that did: whoever
-- claimed it ended, or lost the store in the middle of it. A delivery that does that to everybody must end too, though not for the outages that it
-- happened to be in: only after as many claims as no outage brings.
create or replace function perdure.claim_deliveries(p_by text, p_limit int, p_seconds double precision)
returns table (delivery_id uuid, claim_epoch int, attempts int, trigger_key text, source text, fire_at timestamptz, now timestamptz,
               payload bytea, detail jsonb, spec jsonb) language sql as $$
  with clock as materialized (
    select perdure.now() as now
  ), due as materialized (
    select d.delivery_id, d.not_before, (select c.now from clock c), d.claims >= 50 as poison from perdure.deliveries d
    where d.state in ('PENDING', 'CLAIMED') and d.not_before <= (select c.now from clock c)
    order by d.not_before limit p_limit for update of d skip locked
  ), given_up as (
    update perdure.deliveries d set state = 'DEAD', closed_at = due.now,
      message = format('claimed %s times and never decided: each time the gateway ended, or the database stopped answering, in the middle of it%s',
        d.claims, case when d.message = '' then '' else format('; before that: %s', d.message) end)
    from due where d.delivery_id = due.delivery_id and due.poison
  ), claimed as (
    update perdure.deliveries d
    set state = 'CLAIMED', claim_epoch = d.claim_epoch + 1, claims = d.claims + 1, claimed_by = p_by,
      not_before = due.now + p_seconds * interval '1 second'
    from due where d.delivery_id = due.delivery_id and not due.poison
    returning due.not_before as since, due.now, d.*
  )
  select c.delivery_id, c.claim_epoch, c.attempts + 1, c.trigger_key, c.source, c.fire_at, c.now, c.payload, c.detail, t.spec
  from claimed c join perdure.triggers t using (trigger_key) order by c.since
$$;

-- What `p_by` has claimed and not decided is anybody's at once: an outage ended the round, or the gateway ends. Only the one that was being decided
-- (`p_tried`, if any) keeps the count of this claim, comes after the others, and waits a second longer each time: it may be the cause.
-- One that is locked is being decided by a statement whose answer nobody waits for any more; its claim ends by itself.
create or replace function perdure.release_deliveries(p_by text, p_tried uuid) returns bigint language sql as $$
  with clock as materialized (
    select perdure.now() as now
  ), mine as materialized (
    select d.delivery_id, d.delivery_id is not distinct from p_tried as tried from perdure.deliveries d
    where d.state = 'CLAIMED' and d.claimed_by = p_by order by d.delivery_id for update of d skip locked
  ), released as (
    update perdure.deliveries d
    set state = 'PENDING', claims = case when mine.tried then d.claims else d.claims - 1 end,
      not_before = case when mine.tried then n.now + greatest(least(d.claims - 1, 30) * interval '1 second', interval '1 microsecond')
        else n.now end
    from mine, clock n where d.delivery_id = mine.delivery_id returning 1
  )
  select count(*) from released
$$;

-- Of a trigger's runs: which have ended since, and which of those have no resource any more.
create or replace function perdure.follow_runs(p_trigger text) returns void language plpgsql as $$
begin
  perform 1 from perdure.triggers t where t.trigger_key = p_trigger for no key update;
  update perdure.deliveries d set followed = 'ended' from perdure.runs r
  where d.trigger_key = p_trigger and d.followed = 'active' and r.run_id = d.run_id and perdure.terminal(r.state);
  update perdure.deliveries d set followed = null
  where d.trigger_key = p_trigger and d.followed = 'ended'
    and not exists (select 1 from perdure.resources c where c.run_id = d.run_id and not c.gone);
end $$;

create or replace function perdure.close_delivery(p_delivery uuid, p_state text, p_message text, p_decision jsonb, p_now timestamptz)
returns void language sql as $$
  update perdure.deliveries
  set state = p_state, message = p_message, decision = p_decision, payload = null, closed_at = p_now, attempts = attempts + 1
  where delivery_id = p_delivery
$$;

-- A delivery that is claimed under `p_claim` gets what it decides: its run, in the commit of the decision, or the reason why there is none.
--   made · skipped (another run is active) · missed (too late) · held (suspended) · trigger-deleted · name-taken (try again)
--   stale: the claim is somebody else's by now, or the delivery is closed
create or replace function perdure.route_delivery(p_delivery uuid, p_claim int, p_rules jsonb, p_run jsonb, p_input bytea, p_hash bytea, p_data bytea)
returns text language plpgsql as $$
declare
  v_now timestamptz;
  t perdure.triggers;
  d perdure.deliveries;
  v_active perdure.deliveries;
  v_run uuid;
begin
  -- One delivery of a trigger at a time: two that look for an active run at once would both find none.
  select x.* into t from perdure.triggers x
  where x.trigger_key = (select y.trigger_key from perdure.deliveries y where y.delivery_id = p_delivery) for no key update;
  select * into d from perdure.deliveries x where x.delivery_id = p_delivery and x.state = 'CLAIMED' and x.claim_epoch = p_claim for update;
  if not found then
    return 'stale';
  end if;
  v_now := perdure.now();
  if t.deleted then
    perform perdure.close_delivery(p_delivery, 'FAILED', 'the trigger was deleted', perdure.trigger_deleted(), v_now);
    return 'trigger-deleted';
  elsif t.suspended then
    update perdure.deliveries set state = 'PENDING', not_before = 'infinity', claims = 0 where delivery_id = p_delivery;
    return 'held';
  elsif d.fire_at < v_now - (p_rules ->> 'deadlineSeconds')::double precision * interval '1 second' then
    perform perdure.close_delivery(p_delivery, 'FAILED', 'later than its startingDeadlineSeconds', null, v_now);
    return 'missed';
  end if;
  if (p_rules ->> 'forbid')::boolean then
    perform perdure.follow_runs(d.trigger_key);
    select * into v_active from perdure.deliveries x where x.trigger_key = d.trigger_key and x.followed = 'active' limit 1;
    if found then
      perform perdure.close_delivery(p_delivery, 'DONE',
        format('run %s has not ended', (select r.name from perdure.runs r where r.run_id = v_active.run_id)),
        jsonb_build_object('action', 'skip', 'reason', 'Forbid', 'run', v_active.run_id), v_now);
      update perdure.deliveries set superseded_by = v_active.delivery_id where delivery_id = p_delivery;
      return 'skipped';
    end if;
  end if;
  begin
    v_run := (perdure.insert_run(p_run, p_input, v_now)).run_id;
  exception when unique_violation then
    return 'name-taken';
  end;
  insert into perdure.blobs (run_id, hash, data) select v_run, p_hash, p_data where p_hash is not null;
  if (p_rules ->> 'resource')::boolean then
    insert into perdure.resources (run_id, name, changed_seq) values (v_run, p_run ->> 'name', 1);
  end if;
  perform perdure.close_delivery(p_delivery, 'DONE', '', p_rules -> 'decision' || jsonb_build_object('action', 'newRun', 'run', v_run), v_now);
  update perdure.deliveries set run_id = v_run, owner_uid = t.uid, followed = 'active' where delivery_id = p_delivery;
  return 'made';
end $$;

-- The attempt failed: again after so many seconds, or, without a number, dead.
create or replace function perdure.fail_delivery(p_delivery uuid, p_claim int, p_message text, p_seconds double precision) returns void language sql as $$
  update perdure.deliveries
  set message = p_message, state = case when p_seconds is null then 'DEAD' else 'PENDING' end, attempts = attempts + 1, claims = 0,
    not_before = (select perdure.now()) + coalesce(p_seconds, 0) * interval '1 second',
    closed_at = case when p_seconds is null then (select perdure.now()) end
  where delivery_id = p_delivery and state = 'CLAIMED' and claim_epoch = p_claim
$$;

-- Written as its object says, if the row is still the one that `p_next` was worked out from (its revision; 0: there was none).
-- `p_fired`: what a new row takes to have fired last; that of an old one is moved by its firings only.
create or replace function perdure.put_trigger(p_key text, p_uid uuid, p_generation bigint, p_spec jsonb, p_source text, p_suspended boolean,
                                               p_anchor timestamptz, p_replan boolean, p_next timestamptz, p_seen bigint,
                                               p_fired timestamptz default null)
returns boolean language plpgsql as $$
begin
  if p_seen = 0 then
    insert into perdure.triggers (trigger_key, uid, generation, spec, source, suspended, anchor_at, next_at, fired_at)
    values (p_key, p_uid, p_generation, p_spec, p_source, p_suspended, p_anchor, p_next, p_fired) on conflict do nothing;
    return found;
  end if;
  perform 1 from perdure.triggers t where t.trigger_key = p_key for update;
  update perdure.triggers t set uid = p_uid, generation = p_generation, spec = p_spec, source = p_source, suspended = p_suspended, deleted = false,
    next_at = case when p_replan then p_next else t.next_at end, revision = t.revision + 1
  where t.trigger_key = p_key and t.revision = p_seen;
  if not found then
    return false;
  end if;
  if p_suspended then
    update perdure.deliveries set not_before = 'infinity' where trigger_key = p_key and state = 'PENDING';
  else
    update perdure.deliveries set not_before = (select perdure.now()) where trigger_key = p_key and state = 'PENDING' and not_before = 'infinity';
  end if;
  return true;
end $$;

-- Nothing fires any more; what has a run keeps it. The row stays: the trigger may come again.
create or replace function perdure.delete_trigger(p_key text, p_uid uuid) returns boolean language plpgsql as $$
begin
  perform 1 from perdure.triggers t where t.trigger_key = p_key for update;
  update perdure.triggers set deleted = true, next_at = null, revision = revision + 1
  where trigger_key = p_key and not deleted and uid is not distinct from p_uid;
  if not found then
    return false;
  end if;
  update perdure.deliveries
  set state = 'FAILED', message = 'the trigger was deleted', decision = perdure.trigger_deleted(), payload = null, closed_at = (select perdure.now())
  where trigger_key = p_key and state in ('PENDING', 'CLAIMED');
  return true;
end $$;

-- What the status of its object says.
create or replace function perdure.trigger_summary(p_key text)
returns table (next_at timestamptz, fired_at timestamptz, active bigint, pending bigint, dead bigint, last jsonb, gave_up jsonb) language sql as $$
  select t.next_at, t.fired_at,
    (select count(*) from perdure.deliveries d where d.trigger_key = p_key and d.followed = 'active'),
    (select count(*) from perdure.deliveries d where d.trigger_key = p_key and d.state in ('PENDING', 'CLAIMED')),
    (select count(*) from perdure.deliveries d where d.trigger_key = p_key and d.state = 'DEAD'),
    (select jsonb_build_object('id', d.dedup_key, 'state', d.state, 'at', d.created_at, 'message', d.message, 'run', r.name)
     from perdure.deliveries d left join perdure.runs r using (run_id)
     where d.trigger_key = p_key order by d.delivery_id desc limit 1),
    (select jsonb_build_object('delivery', x.delivery_id, 'message', x.message) from (
       select * from perdure.deliveries d
       where d.trigger_key = p_key and d.state not in ('PENDING', 'CLAIMED') order by d.delivery_id desc limit 1) x
     where x.state = 'DEAD')
  from perdure.triggers t where t.trigger_key = p_key
$$;

-- Resources of ended runs beyond those that are to be kept, the youngest first.
create or replace function perdure.outdated_runs(p_key text, p_succeeded int, p_failed int)
returns table (run_id uuid, uid uuid, namespace text, name text, active boolean) language sql as $$
  select x.run_id, x.uid, x.namespace, x.name, false from (
    select r.run_id, c.uid, r.namespace, c.name, r.state = 'Succeeded' as good,
      row_number() over (partition by r.state = 'Succeeded' order by r.finished_at desc, r.run_id desc) as place
    from perdure.deliveries d join perdure.runs r using (run_id) join perdure.resources c using (run_id)
    where d.trigger_key = p_key and d.followed = 'ended' and c.uid is not null and not c.gone) x
  where x.place > case when x.good then p_succeeded else p_failed end
$$;
