-- Of the pool's template that the last attempt ran on (L10); null until a pod says one. Earlier attempts: their event run.leased.
alter table perdure.runs add column revision text;
