-- Who may still act for effects of which nobody knows whether they happened (E5): a lease that left one, known by its run and its epoch,
-- and the pod that held it. A pod may hold many runs one after the other, so the proof that an executor is gone is that of a lease, not of
-- a pod. A row stays as long as such an effect refers to it.
create table perdure.executors (
  run_id uuid not null,
  epoch int not null,
  pod_id uuid not null,
  lost_at timestamptz not null,          -- when it was given up
  gone_at timestamptz,                   -- when it was proven that none of its processes is left; null: it may still act
  proof text check (proof in ('pod-ended', 'processes-ended')),
  primary key (run_id, epoch),
  check ((gone_at is null) = (proof is null))
);
create index executors_pod on perdure.executors (pod_id) where gone_at is null;

-- The provider does not have it. That counts only if the executor is gone, so nobody but a person can say more.
alter table perdure.ledger add column absent_at timestamptz;

-- Since when somebody has been sent to ask the provider, knowing that the executor is gone: an answer to an earlier question says nothing
-- of what the executor did after it.
alter table perdure.ledger add column asked_at timestamptz;

-- Its last lease was ended without a word from it. What it still does nobody waits for.
alter table perdure.pods add column lost boolean not null default false;

-- What perdure.terminated_pods has proven until now. Nothing is written there any more.
insert into perdure.executors (run_id, epoch, pod_id, lost_at, gone_at, proof)
select distinct on (l.run_id, l.epoch) l.run_id, l.epoch, l.holder, coalesce(t.at, clock_now.now), t.at,
       case when t.at is not null then 'pod-ended' end
from perdure.ledger l cross join (select clock_timestamp() + shift as now from perdure.clock) clock_now
left join perdure.terminated_pods t on t.pod_id = l.holder
where l.state = 'UNKNOWN' and not l.executor_ended and l.holder is not null;
