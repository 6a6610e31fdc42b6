-- How often a delivery was claimed since a try of it last came to an end; `attempts` counts only those that did, and the claims that are open now
-- were counted there when they began.
alter table perdure.deliveries add column claims int not null default 0;
update perdure.deliveries set attempts = greatest(attempts - 1, 0) where state = 'CLAIMED';
create index deliveries_claimed on perdure.deliveries (claimed_by) where state = 'CLAIMED';
