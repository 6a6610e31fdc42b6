"""The real store and the oracle side by side: every operation goes to both, and whatever they answer or hold must be the same.

Time stands still: ``perdure.now()`` of the test's own database gives a fixed instant plus ``perdure.clock.shift``, so nothing depends on
how fast the machine is. The oracle's random part of a backoff is asked from the database once a run.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeVar
from uuid import UUID

import asyncpg
import msgspec
import pytest

from perdure_operator.domain.errors import NameTaken
from perdure_operator.store.memory import Oracle, Run, Wait
from perdure_operator.store.operations import Control, JournalStep, Limits, Outcome
from perdure_operator.store.payload import Payloads
from perdure_operator.store.store import Beat, NewRun, Store

T = TypeVar("T")
START = datetime(2030, 1, 1, tzinfo=UTC)
GATEWAYS = ("g0", "g1")

STOPPED_CLOCK = """
create or replace function perdure.now() returns timestamptz language sql volatile as
$$ select '2030-01-01 00:00:00+00'::timestamptz + shift from perdure.clock $$
"""
_TABLES = (
    "runs run_specs events requests blobs journal waits wait_conditions wakeups leases pods ledger slices checkpoints pools tenants "
    "executors"
)
_EMPTY = "truncate " + ", ".join(f"perdure.{table}" for table in _TABLES.split())
_JITTER = "select (hashtext($1::uuid::text || n) & 2147483647) % 1000 / 999.0 from generate_series(1, 20) n"
_RUNS = """
select r.run_id::text, r.state, r.reason, r.epoch, r.holder::text, r.attempt, r.failures, r.losses, r.steps, r.last_seq,
  r.error ->> 'type' as error_type, r.cancel_requested, r.paused, r.wake_due, r.runnable_at, r.rank, r.deadline_at,
  r.cancel_due_at, r.active_ms,
  r.active_since, r.raw_bytes, r.stored_bytes, r.size_told,
  (select array_agg(e.kind order by e.seq) from perdure.events e where e.run_id = r.run_id) as log,
  (select array_agg(x ->> 'kind' order by n) from jsonb_array_elements(r.reasons) with ordinality a(x, n)) as reasons,
  (select jsonb_object_agg(j.key, jsonb_build_array(j.kind, j.state, j.seq)) from perdure.journal j where j.run_id = r.run_id) as journal,
  (select jsonb_object_agg(w.key, w.state) from perdure.waits w where w.run_id = r.run_id) as waits,
  (select jsonb_agg(jsonb_build_array(w.kind, w.name, w.id, w.seq, w.bound_key)) from perdure.wakeups w
   where w.run_id = r.run_id) as wakeups,
  (select jsonb_object_agg(l.key, jsonb_build_array(l.state, l.attempts, l.token, l.policy, l.executor_ended, l.response is not null,
                                                    l.absent_at is not null, l.asked_at is not null, extract(epoch from l.safe_at)))
   from perdure.ledger l where l.run_id = r.run_id) as ledger,
  (select jsonb_object_agg(x.epoch, jsonb_build_array(x.pod_id, x.gone_at is not null)) from perdure.executors x
   where x.run_id = r.run_id) as executors,
  (select jsonb_agg(jsonb_build_array(s.seq, s.name, s.append) order by s.seq, s.name) from perdure.slices s
   where s.run_id = r.run_id) as slices,
  (select jsonb_object_agg(p.pod_id, jsonb_build_array(p.state, p.run_id, p.gateway)) from perdure.pods p) as pods
from perdure.runs r
"""


class Twin:
    """``store`` on a database of the test's own; ``oracle``; and the loop that the store's connections live in."""

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.store = self.wait(self._prepare(dsn))
        self.jitters: dict[UUID, list[float]] = {}
        self.reset()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.store.close())
        self._loop.close()

    async def _prepare(self, dsn: str) -> Store:
        connection = await asyncpg.connect(dsn)
        await connection.execute(STOPPED_CLOCK)
        await connection.close()
        return await Store.connect(dsn, connections=1)

    async def execute(self, sql: str, *arguments: Any) -> None:
        async with self.store.connection() as connection:
            await connection.execute(sql, *arguments)

    def reset(self) -> None:
        """Both empty, at the start of time."""
        self.oracle = Oracle(START, lambda run, n: self.jitters[run][n - 1])
        self.limit(Limits())
        self.wait(self.execute(_EMPTY))
        self.move_to(START)

    def move_to(self, now: datetime) -> None:
        self.oracle.now = now
        self.wait(self.execute("update perdure.clock set shift = $1", now - START))

    def pass_time(self, seconds: float) -> None:
        self.move_to(self.oracle.now + timedelta(seconds=seconds))

    # ------------------------------------------------------------------------------------------------------ operations

    def pool(self, name: str, limit: int | None) -> None:
        self.wait(self.store.upsert_pool("ns", name, {}, limit))
        self.oracle.pools[f"ns/{name}"] = limit

    def tenant(self, namespace: str, weight: float, limit: int | None) -> None:
        self.wait(
            self.execute("insert into perdure.tenants (namespace, weight, max_running) values ($1, $2, $3)", namespace, weight, limit)
        )
        self.oracle.tenants[namespace] = (weight, limit)

    def limit(self, limits: Limits) -> None:
        """How much runs may write from now on."""
        self.store.limits = self.oracle.limits = limits

    def know(self, run: UUID) -> None:
        """Learns the jitter of a run that is about to be created."""

        async def ask() -> list[float]:
            async with self.store.connection() as connection:
                return [float(row[0]) for row in await connection.fetch(_JITTER, run)]

        self.jitters[run] = self.wait(ask())

    def create(self, columns: dict[str, Any]) -> UUID | None:
        self.know(UUID(columns["run_id"]))
        new = NewRun(columns, b'{"in": 1}')
        try:
            code, run = self.oracle.create(new.columns, new.input)
        except NameTaken:
            with pytest.raises(NameTaken):
                self.wait(self.store.create_runs([new]))
            return None
        [created] = self.wait(self.store.create_runs([new]))
        assert (created.code, created.run) == (code, run)
        return run

    def control(self, operations: Sequence[Control], idle: Sequence[UUID] = (), gateway: str = "") -> list[Outcome]:
        """One batch for the store, one after the other for the oracle. Gives what both answered."""
        found = self.wait(self.store.control(operations, wait=True, idle=idle, gateway=gateway))
        for op, outcome in zip(operations, found, strict=True):
            expected = self.oracle.control(op, idle, gateway)
            found_plain, expected_plain = self._plain(op, outcome), self._plain(op, expected)
            assert found_plain == expected_plain, f"{op.kind} {op.body} {op.fence}: the store {found_plain}, the oracle {expected_plain}"
        return found

    def journal(self, steps: Sequence[JournalStep]) -> list[Outcome]:
        found = self.wait(self.store.journal(steps, wait=True))
        for place, outcome in enumerate(found):
            if outcome.code == "busy":  # too near to a limit for a batch: alone, as the gateway's slow lane does it
                [found[place]] = self.wait(self.store.journal([steps[place]], wait=True))
        for step, outcome in zip(steps, found, strict=True):
            expected = self.oracle.journal(step)
            assert (outcome.code, outcome.answer) == (expected.code, expected.answer), step
        return found

    def dispatch(self, gateway: str, *pods: UUID) -> list[UUID]:
        """All pods at once for the store, one after the other for the oracle. Gives the runs that were leased."""
        grants = self.wait(self.store.dispatch(gateway, pods))
        for grant in grants:
            run = self.oracle.dispatch(gateway, grant.pod)
            assert run is not None
            assert (grant.run, grant.epoch) == (run.id, run.epoch)
        for pod in {*pods} - {grant.pod for grant in grants}:
            assert self.oracle.dispatch(gateway, pod) is None
        return [grant.run for grant in grants]

    def hello(self, pod: UUID, pool: str, gateway: str, *, reuse: bool, believes: tuple[UUID, int] | None, ready: bool = True) -> None:
        run, epoch = believes or (None, None)
        status = self.wait(self.store.pod_hello(pod, pool, gateway, reuse=reuse, ready=ready, run=run, epoch=epoch))
        assert (status.status, status.run) == self.oracle.hello(pod, pool, gateway, reuse=reuse, ready=ready, believes=believes)

    def idle(self, pod: UUID, gateway: str, ended: tuple[UUID, int] | None = None) -> None:
        assert self.wait(self.store.pod_idle(pod, gateway, ended=ended)) == self.oracle.idle(pod, gateway, ended)

    def gone(self, pod: UUID, reason: str, *, proven: bool = True) -> None:
        assert self.wait(self.store.pod_gone(pod, reason, proven=proven)) == self.oracle.gone(pod, reason, proven=proven)

    def take_away(self, pod: UUID) -> None:
        self.wait(self.store.take_away([pod]))
        self.oracle.take_away(pod)

    def beat(self, run: UUID, epoch: int, pod: UUID) -> None:
        alive = self.wait(self.store.heartbeat("g0", [Beat(run, epoch, pod)], []))
        assert bool(alive) == self.oracle.beat(run, epoch, pod)

    def settle_everything(self) -> None:
        """What the background services do, until nothing is due. That must end: what stays due would be a busy loop."""
        for _ in range(len(self.oracle.runs) + 2):
            due = [*self.wait(self.store.due_runs()), *self.wait(self.store.unapplied_runs())]
            if not due:
                return
            self.control([Control(run, "settle", {}) for run in dict.fromkeys(due)])
        raise AssertionError(f"still due after it was settled: {due}")

    # ------------------------------------------------------------------------------------------------------- comparing

    def _plain(self, op: Control, outcome: Outcome) -> Any:
        """An outcome as comparable values; the store's payloads are looked up, the oracle's are raw already."""
        answer = dict(outcome.answer)
        if op.kind in ("wait", "suspend"):
            outcomes = {key: (o["status"], [self._fired(f) for f in o["fired"]]) for key, o in answer.get("outcomes", {}).items()}
            answer = {"status": answer.get("status"), "outcomes": outcomes}
        elif op.kind in ("activity.begin", "activity.resolve"):
            answer = {key: value for key, value in answer.items() if value is not None and key != "message"}
            answer["retryAfterSeconds"] = round(answer.get("retryAfterSeconds", 0), 3)
            answer["response"] = self._payload(answer.get("response"))
        return outcome.code, answer, str(outcome.state) if outcome.state else None, outcome.leased, outcome.epoch

    def _fired(self, fired: Any) -> Any:
        if isinstance(fired, tuple):
            return fired
        data, payload = fired.get("data") or {}, self._payload(fired.get("payload"))
        return fired["index"], fired["kind"], fired.get("id", ""), float(fired.get("lateSeconds", 0)), payload, data.get("status", "")

    def _payload(self, stored: str | bytes | None) -> bytes | None:
        if not isinstance(stored, str):
            return stored
        payloads: Payloads = self.wait(self.store.payloads([b64decode(stored)]))
        return payloads.get(b64decode(stored))

    def compare(self) -> None:
        """Everything that both hold."""
        rows = self.wait(self._read())
        assert {row["run_id"] for row in rows} == {str(run) for run in self.oracle.runs}
        for row in rows:
            run = self.oracle.runs[UUID(row["run_id"])]
            found, expected = _of_row(row), _of_run(run)
            assert found == expected, {key: (found[key], expected[key]) for key in found if found[key] != expected[key]}
        pods = {str(id_): [pod.state, str(pod.run) if pod.run else None, pod.gateway] for id_, pod in self.oracle.pods.items()}
        assert not rows or msgspec.json.decode(rows[0]["pods"] or "{}") == pods

    async def _read(self) -> list[asyncpg.Record]:
        async with self.store.connection() as connection:
            return list(await connection.fetch(_RUNS))

    def verify(self) -> None:
        assert self.wait(self.store.verify()) == []


_SAME = (
    "reason error_type epoch attempt failures losses steps cancel_requested paused wake_due deadline_at active_since log reasons "
    "raw_bytes stored_bytes size_told"
).split()


def _of_row(row: asyncpg.Record) -> dict[str, Any]:
    found = {name: row[name] for name in _SAME} | {"state": row["state"], "holder": row["holder"], "last_seq": row["last_seq"]}
    found |= {
        "reasons": row["reasons"] or [],
        "runnable_at": round(row["runnable_at"].timestamp(), 3),
        "rank": round(row["rank"], 3),
        "cancel_due": row["cancel_due_at"],
        "active": row["active_ms"],
    }
    for name, empty in (("journal", {}), ("waits", {}), ("ledger", {}), ("executors", {}), ("wakeups", []), ("slices", [])):
        found[name] = msgspec.json.decode(row[name]) if row[name] else empty
    found["wakeups"].sort(key=str)
    for entry in found["ledger"].values():
        entry[-1] = round(entry[-1], 3)
    return found


def _of_run(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in _SAME} | {
        "state": str(run.state),
        "reason": str(run.reason),
        "holder": str(run.holder) if run.holder else None,
        "last_seq": len(run.log),
        "runnable_at": round(run.runnable_at.timestamp(), 3),
        "rank": round(run.rank, 3),
        "cancel_due": run.cancel_due,
        "active": round(run.active_used.total_seconds() * 1000),
        "journal": {key: [kind, state, seq] for key, (kind, state, seq, _) in run.journal.items()},
        "waits": {key: wait.state for key, wait in run.waits.items()},
        "wakeups": sorted(([w.kind, w.name, w.id, w.seq, w.bound] for w in run.wakeups), key=str),
        "ledger": {
            key: [
                e.state,
                e.attempts,
                e.token,
                e.policy,
                e.executor_ended,
                e.response is not None,
                e.absent,
                e.asked,
                round(e.safe_at.timestamp(), 3),
            ]
            for key, e in run.ledger.items()
        },
        "executors": {str(epoch): [str(x.pod), x.gone] for epoch, x in run.executors.items()},
        "slices": sorted([seq, piece.name, piece.append] for seq, piece in run.slices),
    }


def open_waits(run: Run) -> list[Wait]:
    return [wait for wait in run.waits.values() if wait.state == "open"]
