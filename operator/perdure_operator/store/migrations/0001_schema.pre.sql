-- The tables of Perdure. One row of `runs` is the projection of one run's event log; all else hangs on a run id.
--
-- Hot tables (runs, leases) have room on their pages and no index on columns that every write changes, so that updates stay on the page.
-- There are no foreign keys to runs: they would take a key-share lock on another run's row, and the lock discipline says that a
-- transaction locks only the runs it operates on. Payload columns hold the stored form of store/payload.py (inline or a blob's address).

create schema if not exists perdure;

-- The clock. `shift` is zero in production; tests move time by writing it.
create table perdure.clock (one boolean primary key default true check (one), shift interval not null default '0');
insert into perdure.clock default values;

-- Generated from domain/transitions.py.
create table perdure.transitions (
  state text not null, event text not null, next_state text, effects text[] not null, refusal text,
  primary key (state, event)
);

-- Which store this is (R8): a restored or replaced database has another incarnation.
create table perdure.store (one boolean primary key default true check (one), incarnation uuid not null default gen_random_uuid());
insert into perdure.store default values;

create table perdure.tenants (
  namespace text primary key,
  weight double precision not null default 1 check (weight > 0),
  max_running int
);

create table perdure.pools (
  pool text primary key,                 -- namespace/name
  namespace text not null,
  name text not null,
  spec jsonb not null,
  max_running int,
  trouble jsonb,                         -- why its pods do not start, and when that is tried again; null while they do
  updated_at timestamptz not null
);

create table perdure.runs (
  run_id uuid primary key,               -- UUIDv7, minted once
  namespace text not null,
  name text not null,
  pool text not null,
  parent_id uuid,
  root_id uuid not null,
  parent_policy text not null default 'cancel' check (parent_policy in ('cancel', 'detach', 'fail_parent')),
  superseded boolean not null default false, -- it has ended, and a later run has its name
  idempotency_key text,

  state text not null check (state in ('Pending', 'Running', 'Suspended', 'Succeeded', 'Failed', 'Cancelled')),
  reason text not null default '',
  message text not null default '',
  state_since timestamptz not null,
  epoch int not null default 0,
  holder uuid,                           -- the pod, while Running
  attempt int not null default 1,
  failures int not null default 0,       -- attempts that failed and count (L5)
  losses int not null default 0,         -- workers lost since the last progress
  last_seq bigint not null default 0,
  worker_seq bigint not null default 0,  -- last sequence of progress that a worker made
  loss_seq bigint not null default 0,    -- worker_seq at the last loss
  steps int not null default 0,

  priority int not null default 0,
  rank double precision not null,        -- place in the queue: earlier is smaller; priority is worth time, so nothing starves
  runnable_at timestamptz not null,      -- not before: backoff
  reasons jsonb not null default '[]',   -- why the next lease is granted (W5)

  cancel_requested boolean not null default false,
  paused boolean not null default false, -- the verb
  spec_paused boolean not null default false, -- spec.desiredState; the stricter of the two holds (L8)
  wake_due boolean not null default false,    -- a wake came that has not queued the run yet

  active_ms bigint not null default 0,   -- activeDeadlineSeconds: what has been used before active_since
  active_since timestamptz,
  active_limit_ms bigint,
  deadline_seconds double precision,
  deadline_at timestamptz,
  cancel_due_at timestamptz,             -- a worker that has not obeyed a cancel by then loses its lease
  expires_at timestamptz,                -- the nearest of these three, null while none runs

  max_retries int not null,
  backoff_seconds double precision not null,
  max_backoff_seconds double precision not null,
  max_losses int not null,
  max_tool_retries int not null,
  grace_seconds double precision not null,
  stall_seconds double precision,

  error jsonb,
  result bytea,
  created_at timestamptz not null,
  started_at timestamptz,
  finished_at timestamptz
) with (fillfactor = 70);
create unique index runs_name on perdure.runs (namespace, name) where not superseded;

create index runs_runnable on perdure.runs (pool, namespace, rank) where state = 'Pending';
create index runs_running on perdure.runs (namespace) where state = 'Running';
create index runs_expiring on perdure.runs (expires_at) where expires_at is not null and state in ('Pending', 'Running', 'Suspended');
create index runs_children on perdure.runs (parent_id, run_id) where parent_id is not null;
create index runs_tree on perdure.runs (root_id);
create unique index runs_idempotency on perdure.runs (namespace, idempotency_key) where idempotency_key is not null;

-- What a run was asked for. Apart from runs, because it is wide and never changes.
create table perdure.run_specs (
  run_id uuid primary key,
  spec jsonb not null,
  labels jsonb not null default '{}',
  summary text not null default '',
  objective text not null default '',
  input bytea
);

-- The custom resource of a run, for runs that have one. Known by its uid; a name can be used again. `changed_seq`: the last move of the run,
-- `projected_seq`: what the resource's status says. `gone`: the resource has been deleted, and the run was told.
create table perdure.resources (
  run_id uuid primary key,
  uid uuid unique,                       -- null: to be made by the projector
  name text not null,                    -- the resource's own: one that adopts a run may be called otherwise
  generation bigint not null default 0,
  changed_seq bigint not null,
  projected_seq bigint not null default 0,
  projected_at timestamptz,
  gone boolean not null default false
) with (fillfactor = 70);
create index resources_unmade on perdure.resources (run_id) where uid is null and not gone;
create index resources_due on perdure.resources (run_id) where changed_seq > projected_seq and uid is not null and not gone;

create table perdure.events (
  run_id uuid not null,
  seq bigint not null,
  epoch int not null,
  at timestamptz not null,
  kind text not null,
  data jsonb not null,
  payload bytea,
  primary key (run_id, seq)
);

-- Answers to control operations, so that a resend after a lost answer gets the same one. (A step needs none: its key is its identity.)
create table perdure.requests (
  run_id uuid not null,
  request_id uuid not null,
  code text not null,
  answer jsonb not null,
  at timestamptz not null,
  primary key (run_id, request_id)
);

create table perdure.blobs (
  run_id uuid not null,
  hash bytea not null,
  data bytea not null,                   -- zstd
  primary key (run_id, hash)
);
alter table perdure.blobs alter column data set storage external;

-- The outcomes of durable operations under their redo identity (E9).
create table perdure.journal (
  run_id uuid not null,
  key text not null,
  kind text not null,                    -- step, wait, spawn
  name text not null,
  state text not null,                   -- open, succeeded, failed, skipped, satisfied, timed_out
  seq bigint not null,
  epoch int not null,
  request_id uuid,
  fingerprint text,
  phase text,
  attempts int not null default 1,
  data jsonb,                            -- wait: its outcome; spawn: the child
  output bytea,
  error jsonb,
  primary key (run_id, key)
);

create table perdure.waits (
  run_id uuid not null,
  key text not null,
  name text not null,
  mode text not null check (mode in ('any', 'all', 'first_failure')),
  state text not null check (state in ('open', 'satisfied', 'timed_out', 'closed')),
  seq bigint not null,
  opened_at timestamptz not null,
  timeout_at timestamptz,
  due_at timestamptz,                    -- when a timer or the timeout may decide it
  done_seq bigint,
  primary key (run_id, key)
);
create index waits_due on perdure.waits (due_at) where state = 'open' and due_at is not null;

create table perdure.wait_conditions (
  run_id uuid not null,
  key text not null,
  idx int not null,
  kind text not null check (kind in ('timer', 'signal', 'message', 'child_done', 'approval', 'resume')),
  name text not null,
  at timestamptz,
  primary key (run_id, key, idx)
);

-- What may wake a run. Effects on another run are rows inserted here; the applier gives them a sequence under the target's lock.
create table perdure.wakeups (
  run_id uuid not null,
  kind text not null check (kind in ('signal', 'child_done', 'cancel', 'message', 'budget')),
  source text not null,                  -- identity within the kind: signal name and id, child id, parent id
  name text not null default '',
  id text not null default '',
  data jsonb not null default '{}',
  payload bytea,
  at timestamptz not null,
  seq bigint,                            -- null: not applied yet; 0: came after the run had ended
  bound_key text,                        -- the wait that took it (invariant 5)
  primary key (run_id, kind, source)
);
create index wakeups_unapplied on perdure.wakeups (run_id) where seq is null;
create index wakeups_unbound on perdure.wakeups (run_id, kind, name, seq) where bound_key is null and seq is not null;

create table perdure.leases (
  run_id uuid primary key,
  epoch int not null,
  holder uuid not null,
  gateway text not null,
  granted_at timestamptz not null,
  beat_at timestamptz not null,
  poke int not null default 0,           -- raised when the holder must hear something
  told int not null default 0
) with (fillfactor = 70);
create unique index leases_holder on perdure.leases (holder); -- a pod holds one run

create table perdure.pods (
  pod_id uuid primary key,               -- ours, minted before the pod is created
  pool text not null,
  kube_uid uuid unique,                  -- the pod's on a cluster, once it is known
  revision text not null default '',     -- of the pool's template that it was made from (L10)
  state text not null check (state in ('starting', 'idle', 'leased', 'retiring')),
  reuse boolean not null default false,
  gateway text not null default '',
  connection bigint not null default 0,  -- the newest that it has said hello on
  run_id uuid,
  since timestamptz not null,
  seen_at timestamptz not null
) with (fillfactor = 70);
create index pods_pool on perdure.pods (pool);

-- The ledger of effects (E). Key, class and policy are decided in domain/idempotency.py and domain/ledger.py.
create table perdure.ledger (
  run_id uuid not null,
  key text not null,
  tool text not null,
  effect text not null check (effect in ('external', 'memory', 'local', 'read_only')),
  state text not null check (state in ('PREPARED', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED', 'UNKNOWN')),
  policy text not null check (policy in ('query', 'retry-same-key', 'ask', 'fail', 'assume-not-done')),
  fingerprint text not null,
  occurrence int not null default 0,
  step text,
  effect_group text,
  attempts int not null default 1,
  timeout_seconds double precision not null, -- of one execution, and how many more there may be (null: as many as the run says): the
  max_retries int,                           -- call's own, kept for the one who resolves it without having begun it
  token uuid,
  past_tokens uuid[] not null default '{}',
  epoch int not null,
  holder uuid,
  safe_at timestamptz,                   -- from then on the old executor cannot act any more: intent + tool timeout + lease
  executor_ended boolean not null default false, -- it said itself that the call is over
  request bytea,
  response bytea,
  provider_ref text,
  error jsonb,
  settled_seq bigint,                    -- a journaled step or a restored checkpoint covers it (E6)
  seq bigint not null,                   -- of the intent
  done_seq bigint,
  primary key (run_id, key)
);

-- Pods that were seen terminated: an effect that one of them left UNKNOWN cannot happen by it any more.
create table perdure.terminated_pods (pod_id uuid primary key, at timestamptz not null);

-- The session: history of slices. The session at a checkpoint is each slice's last replacement and the chunks after it, up to that sequence.
create table perdure.slices (
  run_id uuid not null,
  name text not null,
  seq bigint not null,
  append boolean not null,
  version int not null,
  value bytea not null,
  primary key (run_id, name, seq)
);

create table perdure.checkpoints (
  run_id uuid not null,
  seq bigint not null,
  type text not null check (type in ('step', 'phase', 'pre_side_effect')),
  cursor bytea,
  covers_seq bigint not null default 0,
  epoch int not null,
  primary key (run_id, seq)
);

-- Budgets over a tree (B2), reserved in chunks on the root.
create table perdure.budgets (
  root_id uuid not null,
  kind text not null check (kind in ('steps', 'tool_calls', 'children', 'tokens', 'cost')),
  maximum numeric not null,
  reserved numeric not null default 0,
  used numeric not null default 0,
  primary key (root_id, kind)
);

-- Durable questions (B4).
create table perdure.questions (
  run_id uuid not null,
  question_id text not null,
  kind text not null,
  text text not null,
  choices jsonb not null default '[]',
  fallback text,
  due_at timestamptz,
  asked_seq bigint not null,
  shown_hash text,
  answer jsonb,
  answered_by text,
  answered_at timestamptz,
  primary key (run_id, question_id)
);

-- Triggers (T). The row outlives the object: what has fired, and from where intervals count, is remembered when it comes again.
create table perdure.triggers (
  trigger_key text primary key,          -- namespace/name
  uid uuid,                              -- of the object, also of one that is gone
  generation bigint not null default 0,
  spec jsonb not null,
  source text not null check (source in ('schedule', 'interval', 'at', 'webhook', 'manual')),
  suspended boolean not null default false,
  deleted boolean not null default false,
  anchor_at timestamptz not null,        -- intervals count from here; never moves
  next_at timestamptz,                   -- the first instant that has not been looked at
  fired_at timestamptz,                  -- the scheduled instant that fired last
  revision bigint not null default 1     -- of all but next_at and fired_at: what was worked out from an earlier one is not applied
);
create index triggers_due on perdure.triggers (next_at) where next_at is not null and not suspended and not deleted;

-- Firings, each under the key that makes it unique. Rows are never deleted while their key may come again. What a trigger's deletion closed
-- hands its key to the next event that has it, and keeps `superseded:<its id>:<key>`.
create table perdure.deliveries (
  delivery_id uuid primary key,          -- UUIDv7
  trigger_key text not null,
  source text not null check (source in ('schedule', 'interval', 'at', 'webhook', 'manual')),
  dedup_key text not null unique,
  state text not null check (state in ('PENDING', 'CLAIMED', 'DONE', 'FAILED', 'DEAD')),
  fire_at timestamptz not null,          -- the scheduled instant, or when it came in
  not_before timestamptz not null,       -- PENDING: back-off, infinity while the trigger is suspended; CLAIMED: when the claim is over
  attempts int not null default 0,
  claim_epoch int not null default 0,
  claimed_by text not null default '',
  payload bytea,                         -- JSON; gone once it is a run's input or nobody's
  detail jsonb not null default '{}',    -- by whom, what was skipped before it
  decision jsonb,                        -- what was decided, in the commit that did it
  message text not null default '',      -- what went wrong last, or why there is no run
  run_id uuid,
  owner_uid uuid,                        -- the trigger's object when the run was made: its resource's owner
  followed text check (followed in ('active', 'ended')), -- its run has not ended, or has and still has a resource; null: nothing to do any more
  superseded_by uuid,                    -- the delivery because of which this one has no run
  created_at timestamptz not null,
  closed_at timestamptz
);
create index deliveries_due on perdure.deliveries (not_before) where state in ('PENDING', 'CLAIMED');
create index deliveries_open on perdure.deliveries (trigger_key, state) where state in ('PENDING', 'CLAIMED', 'DEAD');
create index deliveries_followed on perdure.deliveries (trigger_key, followed) where followed is not null;
create index deliveries_trigger on perdure.deliveries (trigger_key, delivery_id);
create unique index deliveries_run on perdure.deliveries (run_id) where run_id is not null;

-- Leadership is a row with a term.
create table perdure.leaders (role text primary key, holder text not null, term bigint not null, renewed_at timestamptz not null);

-- What an operation gives back: the run's row as it shall be, and the answer to the caller.
create type perdure.op_result as (r perdure.runs, answer jsonb);
