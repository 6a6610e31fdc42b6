"""The operator's side of the store: custom resources and their runs, the pods of the fleet, and who leads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal
from uuid import UUID

import msgspec

from perdure_operator.store.payload import encode
from perdure_operator.store.reads import Reader, Row
from perdure_operator.store.store import NewRun, Store

_json = msgspec.json.Encoder(enc_hook=str)

Decision = Literal["known", "bound", "created", "adopted", "wait", "name-taken", "key-taken"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a resource is to the store; the words are explained in ``sql/80_resources.sql``. ``run`` None: look again."""

    decision: Decision
    run: UUID | None
    state: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """The run of a resource. ``generation``: that of the spec that it was told."""

    run: UUID
    generation: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Due:
    """A resource whose status is to be written, under its own name, with the row that it is made of, no older than ``read_at``."""

    run: UUID
    uid: UUID
    name: str
    generation: int
    row: Row
    read_at: datetime


@dataclass(frozen=True, slots=True)
class Owner:
    """A resource that takes those below it along when it is deleted."""

    kind: Literal["AgentRun", "Trigger"]
    name: str
    uid: UUID


@dataclass(frozen=True, slots=True)
class Unmade:
    """A run whose resource is to be made. ``owner``: the resource with which this one is to go, that of the run that spawned it (if there
    is one still, and the child is not detached) or of its trigger."""

    run: UUID
    namespace: str
    name: str
    spec: dict[str, Any]
    labels: dict[str, str]
    annotations: dict[str, str]
    input: bytes
    owner: Owner | None


@dataclass(frozen=True, slots=True)
class Tracked:
    """A resource that the store believes to exist. ``active``: its run has not ended."""

    run: UUID
    uid: UUID
    namespace: str
    name: str
    active: bool


@dataclass(frozen=True, slots=True)
class PodRow:
    """``charged``: it has given a run back, and it is not known whether somebody has told it to."""

    pod_id: UUID
    pool: str
    state: str
    kube_uid: UUID | None
    revision: str
    age_seconds: float
    charged: bool


class Resources:
    """Works on the connections of a :class:`Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # ------------------------------------------------------------------------------------------------------- resources

    async def admit(self, uid: UUID, generation: int, run: NewRun, *, bound: UUID | None = None) -> Admitted:
        """Finds or makes the run of a resource. ``run``: the one to make; ``bound``: the run that the resource's label names."""
        stored, blob = encode(run.run_id, run.input)
        async with self._store.connection() as connection:
            [row] = await connection.fetch(
                "select * from perdure.admit_resource($1, $2, $3, $4, $5, $6, $7)",
                uid,
                generation,
                bound,
                _json.encode(run.columns).decode(),
                stored,
                blob.hash if blob else None,
                blob.data if blob else None,
            )
        return Admitted(row["decision"], row["run_id"], row["state"])

    async def find(self, uid: UUID) -> Found | None:
        async with self._store.connection() as connection:
            row = await connection.fetchrow(
                "select run_id, generation, perdure.terminal(state) as ended "
                "from perdure.resources join perdure.runs using (run_id) where uid = $1",
                uid,
            )
        return Found(*row.values()) if row else None

    async def gone(self, uid: UUID) -> None:
        """The resource is deleted, or is being deleted, and its run has been told."""
        async with self._store.connection() as connection:
            await connection.execute("update perdure.resources set gone = true where uid = $1", uid)

    async def children(self, run: UUID) -> list[Tracked]:
        """Those of a run's children that have a resource."""
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "select run_id, uid, namespace, c.name, not perdure.terminal(state) as active "
                "from perdure.resources c join perdure.runs using (run_id) where parent_id = $1 and uid is not null and not gone",
                run,
            )
        return [Tracked(*row.values()) for row in rows]

    async def tracked(self) -> list[Tracked]:
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "select run_id, uid, namespace, c.name, not perdure.terminal(state) as active "
                "from perdure.resources c join perdure.runs using (run_id) where uid is not null and not gone"
            )
        return [Tracked(*row.values()) for row in rows]

    async def due(self, limit: int, *, progress_seconds: float, wake_seconds: float) -> list[Due]:
        """Resources whose status says less than the store knows. Progress is told so often; a run that was woken may run within so long."""
        async with self._store.connection() as connection:
            found = await connection.fetch("select * from perdure.due_projections($1, $2, $3)", limit, progress_seconds, wake_seconds)
            rows = await Reader(connection).runs_by_id([row["run_id"] for row in found])
        return [
            Due(row["run_id"], row["uid"], row["name"], row["generation"], rows[row["run_id"]], row["read_at"])
            for row in found
            if row["run_id"] in rows
        ]

    async def projected(self, done: Sequence[Due]) -> None:
        """The statuses of these resources, which were due at once, say what was read of them."""
        async with self._store.connection() as connection:
            await connection.execute(
                "select perdure.projected($1, $2, $3, $4)",
                [one.uid for one in done],
                [one.row["last_seq"] for one in done],
                done[0].read_at if done else None,
                [one.generation for one in done],
            )

    async def unmade(self, limit: int, *, besides: Sequence[str] = ()) -> list[Unmade]:
        """``besides``: namespaces in which none can be made now; they do not use up the limit."""
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "select c.run_id, r.namespace, r.name, s.spec, s.labels, s.input, p.uid as parent_uid, p.name as parent_name, "
                "d.owner_uid as trigger_uid, d.trigger_key, d.decision -> 'annotations' as annotations "
                "from perdure.resources c join perdure.runs r using (run_id) join perdure.run_specs s using (run_id) "
                # What has an owner is deleted with it: a child that is to outlive its parent has none.
                "left join perdure.resources p on p.run_id = r.parent_id and not p.gone and r.parent_policy <> 'detach' "
                "left join perdure.deliveries d on d.run_id = c.run_id "
                "where c.uid is null and not c.gone and r.namespace <> all ($2) order by c.run_id limit $1",
                limit,
                list(besides),
            )
            reader = Reader(connection)
            return [
                Unmade(
                    row["run_id"],
                    row["namespace"],
                    row["name"],
                    msgspec.json.decode(row["spec"]),
                    msgspec.json.decode(row["labels"]),
                    msgspec.json.decode(row["annotations"]) if row["annotations"] else {},
                    await reader.payload(row["input"]),
                    _owner(row),
                )
                for row in rows
            ]

    async def made(self, run: UUID, uid: UUID) -> None:
        async with self._store.connection() as connection:
            await connection.execute("update perdure.resources set uid = $2, generation = 1 where run_id = $1 and uid is null", run, uid)

    async def not_made(self, run: UUID) -> None:
        """It cannot have a resource (the name is taken by somebody's, the cluster refuses it): it stays a row of the store."""
        async with self._store.connection() as connection:
            await connection.execute("update perdure.resources set gone = true where run_id = $1 and uid is null", run)

    # ------------------------------------------------------------------------------------------------------------ fleet

    async def register_pod(self, pod_id: UUID, pool: str, revision: str, *, term: int) -> bool:
        """A place for a pod that is about to be created. False when the caller does not lead any more."""
        async with self._store.connection() as connection:
            return bool(
                await connection.fetchval(
                    "insert into perdure.pods (pod_id, pool, state, revision, since, seen_at) "
                    "select $1, $2, 'starting', $3, (select perdure.now()), (select perdure.now()) "
                    "where exists (select 1 from perdure.leaders where role = 'operator' and term = $4 for share) returning true",
                    pod_id,
                    pool,
                    revision,
                    term,
                )
            )

    async def bind_pod(self, pod_id: UUID, kube_uid: UUID) -> bool:
        """False: there is no such place, or it is another pod's."""
        async with self._store.connection() as connection:
            return bool(
                await connection.fetchval(
                    "update perdure.pods set kube_uid = $2 where pod_id = $1 and (kube_uid is null or kube_uid = $2) returning true",
                    pod_id,
                    kube_uid,
                )
            )

    async def never_asked(self, pod_id: UUID) -> bool:
        """Whether this pod is known, and its agent has not asked for a run yet."""
        async with self._store.connection() as connection:
            return bool(await connection.fetchval("select state = 'starting' from perdure.pods where pod_id = $1", pod_id))

    async def pods(self, revisions: Mapping[str, str] = MappingProxyType({}), besides: Iterable[UUID] = ()) -> list[PodRow]:
        """The pods about which something may have to be done: all but those that are at work, or idle at the revision of their pool in
        ``revisions``. Those in ``besides`` too, whatever they do."""
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "select p.pod_id, p.pool, p.state, p.kube_uid, p.revision, "
                "extract(epoch from (select perdure.now()) - p.since)::float8 as age, p.charged_run is not null as charged "
                "from perdure.pods p left join unnest($1::text[], $2::text[]) r(pool, revision) using (pool) "
                "where p.state in ('starting', 'retiring') or p.kube_uid is null "
                "or p.state = 'idle' and p.revision is distinct from r.revision or p.pod_id = any ($3)",
                list(revisions),
                list(revisions.values()),
                list(besides),
            )
        return [PodRow(*row.values()) for row in rows]

    async def retire(self, pods: Sequence[UUID]) -> None:
        """These take no run any more; one that has a run keeps it. One commit a pod."""
        async with self._store.connection() as connection:
            for pod in pods:
                await connection.execute("select perdure.retire_pod($1)", pod)

    async def confirm_loss(self, pod_id: UUID) -> None:
        """Nobody has taken it away when it gave its run back: that stays a loss."""
        async with self._store.connection() as connection:
            await connection.execute("update perdure.pods set charged_run = null where pod_id = $1", pod_id)

    async def drop_pool(self, namespace: str, name: str) -> bool:
        """Whether there was one."""
        async with self._store.connection() as connection:
            row = await connection.fetchrow("delete from perdure.pools where pool = $1 returning pool", f"{namespace}/{name}")
        return row is not None

    async def retire_pods_of(self, namespace: str, name: str) -> None:
        """Those without a run: they are being deleted with the pool that was, and are nothing to one that takes its name."""
        async with self._store.connection() as connection:
            pool = f"{namespace}/{name}"
            pods = await connection.fetch("select pod_id from perdure.pods where pool = $1 and state in ('starting', 'idle')", pool)
        await self.retire([row["pod_id"] for row in pods])

    async def pool_is_used(self, namespace: str, name: str) -> bool:
        """Whether a run that has not ended is of this pool, which is that of an inline template."""
        async with self._store.connection() as connection:
            return bool(
                await connection.fetchval(
                    "select exists (select from perdure.runs where pool = $1 and pool like '%/inline-%' "
                    "and state in ('Pending', 'Running', 'Suspended'))",
                    f"{namespace}/{name}",
                )
            )

    async def pool_changed(self, namespace: str, name: str) -> None:
        """There is a pool of this name now, or none any more: the resources of runs that are queued for it say so. One commit a page, so
        that a dispatcher finds all but one page of the queue meanwhile."""
        after: tuple[datetime | None, UUID | None] = (None, None)
        async with self._store.connection() as connection:
            while row := await connection.fetchrow("select * from perdure.pool_changed($1, $2, $3)", f"{namespace}/{name}", *after):
                after = (row["after_at"], row["after_run"])

    # ------------------------------------------------------------------------------------------------------- leadership

    async def lead(self, role: str, holder: str, seconds: float) -> int | None:
        """The term in which ``holder`` leads from now on for so many seconds; None when somebody else does."""
        async with self._store.connection() as connection:
            term = await connection.fetchval("select perdure.lead($1, $2, $3)", role, holder, seconds)
        return int(term) if term is not None else None

    async def resign(self, role: str, holder: str) -> None:
        async with self._store.connection() as connection:
            await connection.execute("update perdure.leaders set renewed_at = '-infinity' where role = $1 and holder = $2", role, holder)


def _owner(row: Row) -> Owner | None:
    if row["parent_uid"] is not None:
        return Owner("AgentRun", row["parent_name"], row["parent_uid"])
    if row["trigger_uid"] is not None:
        return Owner("Trigger", row["trigger_key"].partition("/")[2], row["trigger_uid"])
    return None
