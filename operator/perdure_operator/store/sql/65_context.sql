-- What a lease delivers, in one statement and so of one moment: rows of several parts, told apart by `part`. Of the session: of each slice
-- the last replacement up to p_until and all chunks after it.
create or replace function perdure.session(p_run uuid, p_until bigint)
returns table (seq bigint, name text, append boolean, version int, value bytea) language sql stable as $$
  select s.seq, s.name, s.append, s.version, s.value from perdure.slices s
  where s.run_id = p_run and s.seq <= p_until and s.seq >= coalesce((
    select max(l.seq) from perdure.slices l where l.run_id = p_run and l.seq <= p_until and l.name = s.name and not l.append), 0)
  order by s.name, s.seq
$$;

-- Entries of the journal by key, from the one after p_after. The outcome of a wait that more than two hundred things satisfied is
-- left out: who needs it asks for it.
create or replace function perdure.journal_page(p_run uuid, p_after text, p_limit int)
returns table (seq bigint, key text, name text, kind text, state text, detail jsonb, payload bytea)
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query select j.seq, j.key, j.name, j.kind, j.state, jsonb_build_object('fingerprint', j.fingerprint, 'error', j.error,
      'outcome', case when j.kind = 'wait' and j.state in ('satisfied', 'timed_out')
                        and (p_limit is null or jsonb_array_length(j.data -> 'fired') <= 200) then perdure.outcome(j.run_id, j.key) end,
      'child', case when j.kind = 'spawn' then j.data -> 'child' end), j.output
    from perdure.journal j where j.run_id = p_run and j.key > p_after order by j.key limit p_limit;
end $$;

-- p_entries null: all there is, for agents that fetch nothing. Otherwise of the journal the first entries by key, and of the ledger what is
-- not settled; the part 'ledger_seq' says that there are others.
create or replace function perdure.context(p_run uuid, p_entries int default null)
returns table (part text, seq bigint, key text, name text, kind text, state text, detail jsonb, payload bytea)
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query select 'run', r.last_seq, null::text, r.name, null::text, r.state, jsonb_build_object(
      'run_id', r.run_id, 'namespace', r.namespace, 'name', r.name, 'pool', r.pool, 'epoch', r.epoch, 'attempt', r.attempt, 'last_seq', r.last_seq,
      'parent_id', r.parent_id, 'root_id', r.root_id, 'cancel_requested', r.cancel_requested, 'pause', r.paused or r.spec_paused,
      'deadline', r.expires_at, 'reasons', r.reasons, 'grace_seconds', r.grace_seconds, 'stall_seconds', r.stall_seconds,
      'objective', s.objective, 'spec', s.spec), s.input
    from perdure.runs r join perdure.run_specs s using (run_id) where r.run_id = p_run;
  return query select 'journal', j.seq, j.key, j.name, j.kind, j.state, j.detail, j.payload from perdure.journal_page(p_run, '', p_entries) j;
  return query select 'slice', s.seq, null::text, s.name, null::text, null::text,
      jsonb_build_object('append', s.append, 'version', s.version), s.value from perdure.session(p_run, 9223372036854775807) s;
  return query select 'checkpoint', c.seq, null::text, c.type, null::text, null::text, null::jsonb, c.cursor
    from perdure.checkpoints c where c.run_id = p_run order by c.seq desc limit 1;
  return query select 'ledger', l.seq, l.key, l.tool, l.effect, l.state,
      jsonb_build_object('occurrence', l.occurrence, 'step', l.step, 'provider_ref', l.provider_ref), null::bytea
    from perdure.ledger l where l.run_id = p_run and (p_entries is null or l.state in ('PREPARED', 'RUNNING', 'UNKNOWN'))
    order by l.seq limit p_entries;
  return query select 'ledger_seq', max(l.seq), null::text, null::text, null::text, null::text, null::jsonb, null::bytea
    from perdure.ledger l where l.run_id = p_run having max(l.seq) is not null;
  return query select 'signal', w.seq, w.id, w.name, null::text, null::text, jsonb_build_object('at', w.at), w.payload
    from perdure.wakeups w
    where w.run_id = p_run and w.kind = 'signal' and w.bound_key is null and w.seq is not null order by w.seq limit 100;
end $$;
