-- What a run has written: bytes of JSON, and bytes as they are stored. `size_told`: its log says that it comes near to what it may write.
alter table perdure.runs
  add column raw_bytes bigint not null default 0,
  add column stored_bytes bigint not null default 0,
  add column size_told boolean not null default false;
