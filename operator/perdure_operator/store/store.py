"""The Postgres adapter: one object that a gateway, an operator or the local mode holds.

It owns the connection pool and nothing else; every method is one SQL function or query of this package, one round trip and at most one
commit. What may change a run goes through ``journal`` and ``control`` (``sql/60_batch.sql``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import UUID

import asyncpg
import msgspec
import stamina

from perdure_operator.domain.lease import taken_away, weight
from perdure_operator.store import batch, reads, verify
from perdure_operator.store.context import WHOLE, Context, JournalRow, Portion, journaled, load, outcomes
from perdure_operator.store.errors import translated
from perdure_operator.store.operations import UNLIMITED, Control, JournalStep, Limits, Outcome
from perdure_operator.store.payload import Payloads, encode
from perdure_operator.store.specs import PoolSpecs

ACQUIRE_SECONDS = 10.0
CONNECT_SECONDS = 3.0
"""Of a lease (15 s) there must be enough left when a connection has to be made twice: one that is begun while the database moves to another
pod goes to the old one, and is never answered."""
FIRST_TRIES = 5
_json = msgspec.json.Encoder(enc_hook=str)


@dataclass(frozen=True, slots=True)
class NewRun:
    """A validated run to create: ``columns`` by the names of ``perdure.runs`` and ``perdure.run_specs``; ``input`` is JSON."""

    columns: dict[str, Any]
    input: bytes

    @property
    def run_id(self) -> UUID:
        return UUID(str(self.columns["run_id"]))


@dataclass(frozen=True, slots=True)
class Created:
    """``code``: ok, or existing (same idempotency key)."""

    code: str
    run: UUID


@dataclass(frozen=True, slots=True)
class Grant:
    run: UUID
    epoch: int
    pod: UUID


@dataclass(frozen=True, slots=True)
class PodStatus:
    """``status``: starting, idle, leased (deliver run and epoch), lost (what it believed in is over), retire, superseded (it has connected
    again since), free (it was leased a run that has gone on without it)."""

    status: str
    run: UUID | None = None
    epoch: int | None = None
    pod: UUID | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    run: UUID
    epoch: int
    pod: UUID


@dataclass(frozen=True, slots=True)
class Alive:
    """``silent_seconds``: how long it was not renewed; 0 unless somebody else was at it just now."""

    run: UUID
    cancel: bool
    pause: bool
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class News:
    """Something that the holder of a lease must hear. ``outcomes``: decided waits of this epoch, payloads in stored form."""

    run: UUID
    epoch: int
    cancel: bool
    pause: bool
    outcomes: dict[str, Any]
    signals: list[str]


@dataclass(frozen=True, slots=True)
class SilentLease:
    """``live``: how many leases there are in all."""

    run: UUID
    epoch: int
    pod: UUID
    silent_seconds: float
    live: int


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What a pool has and needs. Counts are of runs (``runnable``) and pods; ``retiring`` are pods that should go, ``lost`` those
    among them whose last run was taken from them. ``trouble``: why its pods do not start, as far as the store was told."""

    pool: str
    spec: dict[str, Any]
    runnable: int
    idle: int
    starting: int
    leased: int
    retiring: list[UUID]
    trouble: dict[str, Any] | None = None
    lost: list[UUID] = field(default_factory=list)


async def _nothing_to_reset(_: asyncpg.Connection) -> None:
    """Connections carry no session state (PgBouncer must work), so giving one back costs no round trip."""


async def _undo_losses(connection: asyncpg.pool.PoolConnectionProxy, pods: Sequence[UUID]) -> None:
    """Of the losses that were counted before anybody knew that these pods are being taken away."""
    query = "select charged_run, pod_id from perdure.pods where pod_id = any ($1) and charged_run is not null"
    if charged := await connection.fetch(query, list(pods)):
        undone = [Control(row["charged_run"], "undo_loss", {"pod": str(row["pod_id"])}) for row in charged]
        await batch.control(connection, undone, wait=True)


class Store:
    def __init__(self, pool: asyncpg.Pool, limits: Limits = UNLIMITED) -> None:
        self._pool = pool
        self._specs = PoolSpecs()
        self.limits = limits

    @classmethod
    async def connect(cls, dsn: str, *, connections: int = 8, prepared_statements: bool = True, limits: Limits = UNLIMITED) -> Self:
        """``prepared_statements`` False for a PgBouncer older than 1.21 in transaction mode. ``limits``: of what workers write through this
        adapter. Raises Unavailable."""

        # The first one may take its time: nobody needs this process yet, and if it gave up it would only be started again.
        @stamina.retry(on=TimeoutError, attempts=FIRST_TRIES, timeout=None)
        async def opened() -> asyncpg.Pool:
            return await asyncpg.create_pool(
                dsn,
                min_size=1,
                max_size=connections,
                timeout=CONNECT_SECONDS,
                command_timeout=30,
                max_inactive_connection_lifetime=60,
                statement_cache_size=100 if prepared_statements else 0,
                server_settings={"application_name": "perdure"},
                reset=_nothing_to_reset,
            )

        with translated():
            return cls(await opened(), limits)

    async def close(self) -> None:
        """Lets statements in flight end, for two seconds."""
        try:
            async with asyncio.timeout(2):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy]:
        with translated():
            # Not the pool's own timeout: that makes a task for every use, half the cost of a small statement.
            async with asyncio.timeout(ACQUIRE_SECONDS):
                connection = await self._pool.acquire()
            try:
                yield connection
            except (asyncio.CancelledError, TimeoutError):
                # Its statement did not end in an answer: nobody knows in what state it is, and nothing resets it.
                connection.terminate()
                raise
            finally:
                await self._pool.release(connection)

    # ------------------------------------------------------------------------------------------------ changing runs

    async def journal(self, steps: Sequence[JournalStep], *, wait: bool = False) -> list[Outcome]:
        async with self.connection() as connection:
            return await batch.journal(connection, steps, wait=wait, limits=self.limits)

    async def control(
        self, operations: Sequence[Control], *, wait: bool = False, idle: Sequence[UUID] = (), gateway: str = ""
    ) -> list[Outcome]:
        """``idle``: pods connected to ``gateway`` that the direct path may use."""
        async with self.connection() as connection:
            return await batch.control(connection, operations, wait=wait, idle=idle, gateway=gateway, limits=self.limits)

    async def create_runs(self, runs: Sequence[NewRun]) -> list[Created]:
        """All or none, in one commit. Raises NameTaken."""
        inputs, blobs = [], []
        for n, run in enumerate(runs, 1):
            stored, blob = encode(run.run_id, run.input)
            inputs.append(stored)
            if blob is not None:
                blobs.append((n, blob.hash, blob.data))
        async with self.connection() as connection:
            rows = await connection.fetch(
                "select * from perdure.create_runs($1, $2, $3, $4, $5) order by ord",
                [_json.encode(run.columns).decode() for run in runs],
                inputs,
                *([b[i] for b in blobs] for i in range(3)),
            )
        return [Created(row["code"], row["run_id"]) for row in rows]

    # ------------------------------------------------------------------------------------------------ leases and pods

    async def runnable_pools(self, pools: Sequence[str]) -> list[str]:
        """Those of the pools in which a run could be leased now: an index probe each."""
        async with self.connection() as connection:
            return [row[0] for row in await connection.fetch("select * from perdure.runnable_pools($1)", list(pools))]

    async def dispatch(self, gateway: str, pods: Sequence[UUID]) -> list[Grant]:
        async with self.connection() as connection:
            rows = await connection.fetch("select * from perdure.dispatch($1, $2)", gateway, list(pods))
        return [Grant(row["run_id"], row["epoch"], row["pod_id"]) for row in rows]

    async def heartbeat(self, gateway: str, beats: Sequence[Beat], idle: Sequence[UUID]) -> list[Alive]:
        """The leases among ``beats`` that are live; what does not come back is lost."""
        async with self.connection() as connection:
            rows = await connection.fetch(
                "select * from perdure.heartbeat($1, $2, $3, $4, $5)",
                gateway,
                [b.run for b in beats],
                [b.epoch for b in beats],
                [b.pod for b in beats],
                list(idle),
            )
        return [Alive(row["run_id"], row["cancel"], row["pause"], row["silent_seconds"]) for row in rows]

    async def renew(self, beat: Beat) -> None:
        """As ``heartbeat``, of one lease, waiting a moment for others who are at it."""
        async with self.connection() as connection:
            await connection.execute("select perdure.renew($1, $2, $3)", beat.run, beat.epoch, beat.pod)

    async def tell_again(self, gateway: str, run: UUID | None = None) -> None:
        """Who holds a lease at this gateway, or that of this run, may not have heard the last news: it is news again."""
        async with self.connection() as connection:
            await connection.execute("select perdure.tell_again($1, $2)", gateway, run)

    async def news(self, gateway: str) -> list[News]:
        async with self.connection() as connection:
            rows = await connection.fetch("select * from perdure.news($1)", gateway)
        return [
            News(
                row["run_id"],
                row["epoch"],
                row["cancel"],
                row["pause"],
                msgspec.json.decode(row["outcomes"]) if row["outcomes"] else {},
                list(row["signals"]),
            )
            for row in rows
        ]

    async def pod_hello(
        self,
        pod: UUID,
        pool: str,
        gateway: str,
        *,
        reuse: bool,
        ready: bool = True,
        nth: int = 0,
        run: UUID | None = None,
        epoch: int | None = None,
    ) -> PodStatus:
        """``ready`` False: the pod is given no run before ``pod_idle``. ``nth``: which of its connections this is; earlier ones are void.
        ``run``, ``epoch``: the lease that it believes in."""
        async with self.connection() as connection:
            [row] = await connection.fetch(
                "select * from perdure.pod_hello($1, $2, $3, $4, $5, $6, $7, $8)", pod, pool, gateway, reuse, ready, nth, run, epoch
            )
            if row["status"] == "leased":
                await connection.execute("select perdure.lease_moves($1, $2, $3)", pod, gateway, nth)
        status = row["status"] if row["status"] in ("leased", "starting", "idle", "lost", "superseded") else "retire"
        return PodStatus(status, row["run_id"], row["epoch"])

    async def pod_idle(self, pod: UUID, gateway: str, nth: int = 0, *, ended: tuple[UUID, int] | None = None) -> bool:
        """A reusing pod has cleaned up. ``ended``: run and epoch of which no process is left, as it says itself. False: it must retire."""
        run, epoch = ended or (None, None)
        async with self.connection() as connection:
            status = await connection.fetchval("select perdure.pod_idle($1, $2, $3, $4, $5)", pod, gateway, nth, run, epoch)
        return bool(status == "idle")

    async def processes_ended(self, pod: UUID, lease: tuple[UUID, int]) -> None:
        """No process is left of this run and epoch, as the pod says that held it."""
        async with self.connection() as connection:
            await connection.execute("select perdure.executors_gone('processes-ended', (select perdure.now()), $1, $2, $3)", pod, *lease)

    async def worker_pod(self, kube_uid: str) -> tuple[UUID, str] | None:
        """Our id and the pool of a pod of the cluster, if it is one of ours."""
        async with self.connection() as connection:
            row = await connection.fetchrow("select pod_id, pool from perdure.pods where kube_uid = $1::text::uuid", kube_uid)
        return (row["pod_id"], row["pool"]) if row else None

    async def register_pod(self, pod: UUID, pool: str) -> None:
        async with self.connection() as connection:
            await connection.execute(
                "insert into perdure.pods (pod_id, pool, state, since, seen_at) "
                "values ($1, $2, 'starting', (select perdure.now()), (select perdure.now())) on conflict do nothing",
                pod,
                pool,
            )

    async def pod_gone(self, pod: UUID, reason: str, *, proven: bool = True) -> list[UUID]:
        """The pod is gone: its row goes and its lease ends at once. Gives the runs that lost their worker. ``proven``: its containers were
        seen terminated, so nothing that it began can still happen."""
        async with self.connection() as connection:
            if taken_away(reason):
                await _undo_losses(connection, [pod])
            rows = await connection.fetch("select * from perdure.pod_gone($1, $2)", pod, proven)
            if rows:
                body = {"reason": reason, "weight": weight(reason)}
                await batch.control(
                    connection,
                    [Control(row["run_id"], "expire", body | {"leaseEpoch": row["epoch"]}) for row in rows],
                    wait=True,
                )
        return [row["run_id"] for row in rows]

    async def take_away(self, pods: Sequence[UUID]) -> None:
        """Somebody is ending these pods: that they fall silent is no failure of their runs, and they get no other. One commit a pod."""
        async with self.connection() as connection:
            for pod in pods:
                await connection.execute("select perdure.take_pod_away($1)", pod)
            await _undo_losses(connection, pods)

    async def retire_idle(self, pool: str, count: int) -> list[UUID]:
        async with self.connection() as connection:
            return [row[0] for row in await connection.fetch("select * from perdure.retire_idle($1, $2)", pool, count)]

    async def fates(self, pods: Sequence[UUID]) -> list[PodStatus]:
        """Of pods that wait for a run: which should retire, and which have been leased one without hearing of it (leased, free)."""
        async with self.connection() as connection:
            rows = await connection.fetch(
                "select p.pod_id, l.run_id, l.epoch, case when l.run_id is not null then 'leased' when p.state = 'retiring' then 'retire' "
                "else 'free' end as status from perdure.pods p left join perdure.leases l on l.holder = p.pod_id "
                "where p.pod_id = any ($1) and (l.run_id is not null or p.state = 'retiring' or p.state = 'leased' and p.run_id is null)",
                list(pods),
            )
        return [PodStatus(row["status"], row["run_id"], row["epoch"], row["pod_id"]) for row in rows]

    async def known_pods(self) -> list[UUID]:
        """All pods that have a row."""
        async with self.connection() as connection:
            return [row[0] for row in await connection.fetch("select pod_id from perdure.pods")]

    async def retire_silent_pods(self, silent_seconds: float) -> int:
        """Pods without a lease that no gateway has heard of for so long: they count as capacity no more. Not those that still start."""
        async with self.connection() as connection:
            return int(await connection.fetchval("select perdure.retire_silent_pods($1)", silent_seconds))

    # ------------------------------------------------------------------------------------------------------------ pools

    async def upsert_pool(self, namespace: str, name: str, spec: dict[str, Any], max_running: int | None) -> bool:
        """Whether there was none of this name before."""
        async with self.connection() as connection:
            inserted = await connection.fetchval(
                "insert into perdure.pools (pool, namespace, name, spec, max_running, updated_at) "
                "values ($1, $2, $3, $4, $5, (select perdure.now())) on conflict (pool) do update set "
                "spec = excluded.spec, max_running = excluded.max_running, updated_at = excluded.updated_at "
                "returning xmax = 0",
                f"{namespace}/{name}",
                namespace,
                name,
                _json.encode(spec).decode(),
                max_running,
            )
        return bool(inserted)

    async def pools(self) -> dict[str, dict[str, Any]]:
        """Spec of every pool, by namespace/name."""
        async with self.connection() as connection:
            rows = await connection.fetch("select pool, spec from perdure.pools order by pool")
        return {row["pool"]: msgspec.json.decode(row["spec"]) for row in rows}

    async def pool_demand(self, pool: str | None = None, *, most: int | None = None) -> list[PoolDemand]:
        """Of this pool, or of all. ``most``: no more runs are counted in a pool."""
        async with self.connection() as connection:
            query = "select * from perdure.pool_demand($1, $2, $3)"
            rows = await connection.fetch(query, pool, self._specs.since, most)
            if not self._specs.learn(rows, all_pools=pool is None):
                rows = await connection.fetch(query, pool, None, most)
                self._specs.learn(rows, all_pools=pool is None)
        return [
            PoolDemand(
                row["pool"],
                self._specs[row["pool"]],
                row["runnable"],
                row["idle"],
                row["starting"],
                row["leased"],
                row["retiring"],
                {k: v for k, v in msgspec.json.decode(row["trouble"]).items() if k != "since"} if row["trouble"] else None,
                list(row["lost"]),
            )
            for row in rows
        ]

    async def tell_trouble(self, pool: str, trouble: dict[str, Any] | None) -> None:
        """Why the pods of this pool do not start; None: they do."""
        async with self.connection() as connection:
            await connection.execute("select perdure.tell_trouble($1, $2)", pool, _json.encode(trouble).decode() if trouble else None)

    # --------------------------------------------------------------------------------------------------------- services

    async def due_runs(self, limit: int = 256) -> list[UUID]:
        async with self.connection() as connection:
            return [row[0] for row in await connection.fetch("select * from perdure.due_runs($1)", limit)]

    async def unapplied_runs(self, limit: int = 256) -> list[UUID]:
        async with self.connection() as connection:
            return [row[0] for row in await connection.fetch("select * from perdure.unapplied_runs($1)", limit)]

    async def missed_wakes(
        self, older_seconds: float, within_seconds: float, *, besides: Sequence[UUID] = (), limit: int = 100
    ) -> list[UUID]:
        """Suspended runs that should have been woken, among those to which something happened between so many seconds ago."""
        async with self.connection() as connection:
            query = "select * from perdure.missed_wakes($1, $2, $3, $4)"
            return [row[0] for row in await connection.fetch(query, older_seconds, within_seconds, besides, limit)]

    async def silent_leases(self, lease_seconds: float) -> list[SilentLease]:
        async with self.connection() as connection:
            rows = await connection.fetch("select * from perdure.silent_leases($1)", lease_seconds)
        return [SilentLease(row["run_id"], row["epoch"], row["holder"], row["silent_seconds"], row["live"]) for row in rows]

    async def lease_silence(self, lease_seconds: float) -> tuple[int, int]:
        """How many leases there are, and how many of them are silent."""
        async with self.connection() as connection:
            row = await connection.fetchrow("select * from perdure.lease_silence($1)", lease_seconds)
        assert row is not None
        return row["live"], row["silent"]

    # ------------------------------------------------------------------------------------------------------------ reads

    async def context(self, run: UUID, portion: Portion = WHOLE) -> Context:
        """All that the next worker of this run needs, or so much of it. Raises RunNotFound, CorruptPayload, LeaseTooLarge."""
        async with self.connection() as connection:
            return await load(connection, run, portion)

    async def outcomes(self, raw: Iterable[dict[str, Any]], portion: Portion) -> Payloads:
        """The payloads of outcomes of waits, as many as come along. Raises CorruptPayload, LeaseTooLarge."""
        async with self.connection() as connection:
            return await outcomes(connection, raw, portion)

    @asynccontextmanager
    async def windows(self) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy]:
        """For the readings of windows.py."""
        async with self.connection() as connection:
            yield connection

    async def journaled(self, run: UUID, key: str) -> JournalRow | None:
        """What the journal holds under a step's key."""
        async with self.connection() as connection:
            return await journaled(connection, run, key)

    async def payloads(self, stored: Sequence[bytes | None]) -> Payloads:
        async with self.connection() as connection:
            return await Payloads.of(connection, stored)

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[reads.Reader]:
        """Queries for people and programs; see reads.py."""
        async with self.connection() as connection:
            yield reads.Reader(connection)

    async def violations(
        self, *, runs: Sequence[UUID] | None = None, since_seconds: float | None = None, progress: verify.Progress | None = None
    ) -> AsyncIterator[verify.Violation]:
        """The same as it is found, of the whole store or of a part; see verify.py."""
        async with self.connection() as connection:
            async for violation in verify.check(connection, runs=runs, since_seconds=since_seconds, progress=progress):
                yield violation

    async def verify(self) -> list[verify.Violation]:
        """The invariants, each as a query, over the whole store. Empty: all hold."""
        async with self.connection() as connection:
            return [violation async for violation in verify.check(connection)]
