-- When something that a resource's status tells of changed beside its run: the pool that it waits for came, or went. A status that was read
-- before says the old.
alter table perdure.resources add column asked_at timestamptz;
