-- When something that a resource's status tells of changed beside its run: the pool that it waits for came, or went. A status that was read
-- before says the old.
alter table perdure.resources add column asked_at timestamptz;
-- The run that this pod has given back because it was told to end, while nobody had said that it is being taken away: a loss was counted.
-- Null again once it is known that nobody took it away, or with the next run that the pod gets.
-- `charged_seq`: the run's loss_seq then, which tells one series of losses without progress from the next.
alter table perdure.pods add column charged_run uuid, add column charged_seq bigint;
-- Whether a pool of an inline template is needed still. Of other pools nobody asks: their runs pay nothing for it.
create index runs_of_templates on perdure.runs (pool) where pool like '%/inline-%' and state in ('Pending', 'Running', 'Suspended');
