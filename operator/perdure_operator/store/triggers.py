"""Triggers and their deliveries in the store; ``sql/90_triggers.sql`` says what each call means. Every call is one commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from perdure_operator.domain.errors import DeliveryNotFound
from perdure_operator.domain.ids import uuid7
from perdure_operator.domain.trigger import Firing, Source
from perdure_operator.store.payload import encode
from perdure_operator.store.resources import Tracked
from perdure_operator.store.store import NewRun, Store

_json = msgspec.json.Encoder(enc_hook=str)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TriggerRow:
    """A trigger as the store knows it. ``now``: the store's clock."""

    key: str
    uid: UUID | None
    generation: int
    spec: Json
    source: Source
    suspended: bool
    deleted: bool
    anchor_at: datetime
    next_at: datetime | None
    fired_at: datetime | None
    revision: int
    now: datetime


@dataclass(frozen=True, slots=True)
class Planned:
    """What a trigger's row shall say. ``replan``: ``next_at`` is new, else the row keeps its own. ``seen``: the revision it builds on.
    ``fired_at``: of a new row; only firing moves that of one that is there."""

    key: str
    uid: UUID | None
    generation: int
    spec: Json
    source: Source
    suspended: bool
    anchor_at: datetime
    replan: bool
    next_at: datetime | None
    seen: int
    fired_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """``trigger``: as it was seen. ``firings``: of its calendar, each with ``at``. ``next_at``: where it stands afterwards."""

    trigger: TriggerRow
    firings: Sequence[Firing]
    next_at: datetime | None


@dataclass(frozen=True, slots=True)
class Emitted:
    """``duplicate``: there was a delivery under this key already, and this is it."""

    delivery: UUID
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that this process decides, if it does so before somebody else claims it again. ``attempts``: the number of this try."""

    delivery: UUID
    claim: int
    attempts: int
    trigger: str
    source: Source
    fire_at: datetime
    now: datetime
    payload: bytes | None
    detail: Json
    spec: Json


@dataclass(frozen=True, slots=True)
class Rules:
    """``forbid``: no run while another is active. ``resource``: the run gets a custom resource. ``decision``: to be kept with the run."""

    forbid: bool
    resource: bool
    deadline: timedelta | None
    decision: Json


@dataclass(frozen=True, slots=True)
class Summary:
    """``gave_up``: the last delivery that was decided, if it died."""

    next_at: datetime | None
    fired_at: datetime | None
    active: int
    pending: int
    dead: int
    last: Json | None
    gave_up: Json | None


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    delivery_id: UUID
    dedup_key: str
    source: str
    state: str
    fire_at: datetime
    attempts: int
    message: str
    run: str | None
    superseded_by: UUID | None
    created_at: datetime


class Triggers:
    """Works on the connections of a :class:`Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -------------------------------------------------------------------------------------------------------- triggers

    async def now(self) -> datetime:
        """The store's clock."""
        async with self._store.connection() as connection:
            now: datetime = await connection.fetchval("select perdure.now()")
        return now

    async def get(self, key: str) -> TriggerRow | None:
        """A deleted one too."""
        async with self._store.connection() as connection:
            row = await connection.fetchrow("select *, perdure.now() as now from perdure.triggers where trigger_key = $1", key)
        return _trigger(row) if row else None

    async def living(self) -> list[tuple[str, UUID | None]]:
        """Key and uid of every trigger whose object is believed to exist."""
        async with self._store.connection() as connection:
            return [(r[0], r[1]) for r in await connection.fetch("select trigger_key, uid from perdure.triggers where not deleted")]

    async def put(self, plan: Planned) -> bool:
        """False: the row has changed since it was seen."""
        async with self._store.connection() as connection:
            return bool(
                await connection.fetchval(
                    "select perdure.put_trigger($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
                    plan.key,
                    plan.uid,
                    plan.generation,
                    _json.encode(plan.spec).decode(),
                    plan.source,
                    plan.suspended,
                    plan.anchor_at,
                    plan.replan,
                    plan.next_at,
                    plan.seen,
                    plan.fired_at,
                )
            )

    async def hold(self, row: TriggerRow) -> bool:
        """Suspends it until its object is written anew, of whatever generation. False: the row has changed since it was seen."""
        return await self.put(
            Planned(row.key, row.uid, 0, row.spec, row.source, True, row.anchor_at, replan=False, next_at=None, seen=row.revision)
        )

    async def delete(self, key: str, uid: UUID | None) -> bool:
        """False: there is none with this uid."""
        async with self._store.connection() as connection:
            return bool(await connection.fetchval("select perdure.delete_trigger($1, $2)", key, uid))

    async def summary(self, key: str) -> Summary | None:
        """What is true of it now, its runs looked after."""
        async with self._store.connection() as connection:
            await connection.execute("select perdure.follow_runs($1)", key)
            row = await connection.fetchrow("select * from perdure.trigger_summary($1)", key)
        if row is None:
            return None
        return Summary(
            row["next_at"], row["fired_at"], row["active"], row["pending"], row["dead"],
            *(msgspec.json.decode(found) if (found := row[name]) else None for name in ("last", "gave_up")),
        )  # fmt: skip

    async def outdated(self, key: str, succeeded: int, failed: int) -> list[Tracked]:
        """Resources of ended runs beyond so many."""
        async with self._store.connection() as connection:
            rows = await connection.fetch("select * from perdure.outdated_runs($1, $2, $3)", key, succeeded, failed)
        return [Tracked(*row.values()) for row in rows]

    # --------------------------------------------------------------------------------------------------------- firings

    async def due(self, limit: int) -> list[TriggerRow]:
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "with clock as materialized (select perdure.now() as now) "
                "select t.*, (select now from clock) as now from perdure.triggers t "
                "where t.next_at <= (select now from clock) and not t.suspended and not t.deleted order by t.next_at limit $1",
                limit,
            )
        return [_trigger(row) for row in rows]

    async def fire(self, ticks: Sequence[Tick]) -> int:
        """Stores the firings of those triggers that nobody else has moved on, and moves them on. Gives how many were new."""
        body = [
            {
                "trigger_key": tick.trigger.key,
                "revision": tick.trigger.revision,
                "seen_at": tick.trigger.next_at,
                "next_at": tick.next_at,
                "firings": [
                    {"id": uuid7(), "source": f.source, "dedup_key": f.dedup_key, "at": f.at, "detail": _detail(f)} for f in tick.firings
                ],
            }
            for tick in ticks
        ]
        async with self._store.connection() as connection:
            return int(await connection.fetchval("select perdure.fire($1)", _json.encode(body).decode()))

    async def emit(self, firing: Firing, delivery: UUID) -> Emitted:
        """Stores a firing of now under the id ``delivery``, or finds the one that has its key; one that a deletion of the trigger closed
        gives its key up. Raises TriggerNotFound."""
        async with self._store.connection() as connection:
            [row] = await connection.fetch(
                "select * from perdure.emit($1, $2, $3, $4, $5, $6)",
                delivery,
                firing.trigger,
                firing.source,
                firing.dedup_key,
                firing.payload,
                _json.encode(_detail(firing)).decode(),
            )
        return Emitted(row["delivery_id"], row["duplicate"])

    # ------------------------------------------------------------------------------------------------------ deliveries

    async def claim(self, by: str, limit: int, seconds: float) -> list[Claimed]:
        """Deliveries that are to be decided within so many seconds; after that they are anybody's again."""
        async with self._store.connection() as connection:
            rows = await connection.fetch("select * from perdure.claim_deliveries($1, $2, $3)", by, limit, seconds)
        return [
            Claimed(
                row["delivery_id"], row["claim_epoch"], row["attempts"], row["trigger_key"], Source(row["source"]), row["fire_at"],
                row["now"], row["payload"], msgspec.json.decode(row["detail"]), msgspec.json.decode(row["spec"]),
            )
            for row in rows
        ]  # fmt: skip

    async def release(self, by: str, tried: UUID | None) -> int:
        """What ``by`` has claimed and not decided may be claimed at once, and it costs nothing; but ``tried`` was being decided."""
        async with self._store.connection() as connection:
            return int(await connection.fetchval("select perdure.release_deliveries($1, $2)", by, tried))

    async def route(self, claimed: Claimed, rules: Rules, run: NewRun) -> str:
        """Decides, and makes the run in the same commit. The answers are explained in the SQL."""
        stored, blob = encode(run.run_id, run.input)
        body = {
            "forbid": rules.forbid,
            "resource": rules.resource,
            "deadlineSeconds": rules.deadline.total_seconds() if rules.deadline is not None else None,
            "decision": rules.decision,
        }
        async with self._store.connection() as connection:
            return str(
                await connection.fetchval(
                    "select perdure.route_delivery($1, $2, $3, $4, $5, $6, $7)",
                    claimed.delivery,
                    claimed.claim,
                    _json.encode(body).decode(),
                    _json.encode(run.columns).decode(),
                    stored,
                    blob.hash if blob else None,
                    blob.data if blob else None,
                )
            )

    async def failed(self, claimed: Claimed, message: str, again_seconds: float | None) -> None:
        """This attempt came to nothing; without another one the delivery is dead."""
        async with self._store.connection() as connection:
            await connection.execute(
                "select perdure.fail_delivery($1, $2, $3, $4)", claimed.delivery, claimed.claim, message[:1000], again_seconds
            )

    async def deliveries(self, key: str, *, state: str | None, before: UUID | None, limit: int) -> list[DeliveryRow]:
        """The youngest first."""
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "select d.delivery_id, d.dedup_key, d.source, d.state, d.fire_at, d.attempts, d.message, r.name, d.superseded_by, "
                "d.created_at "
                "from perdure.deliveries d left join perdure.runs r using (run_id) "
                "where d.trigger_key = $1 and ($2::text is null or d.state = $2) and ($3::uuid is null or d.delivery_id < $3) "
                "order by d.delivery_id desc limit $4",
                key,
                state,
                before,
                limit,
            )
        return [DeliveryRow(*row.values()) for row in rows]

    async def redrive(self, key: str, delivery: UUID) -> None:
        """A dead delivery is tried anew. Raises DeliveryNotFound."""
        async with self._store.connection() as connection:
            found = await connection.fetchval(
                "update perdure.deliveries "
                "set state = 'PENDING', attempts = 0, claims = 0, not_before = (select perdure.now()), closed_at = null "
                "where trigger_key = $1 and delivery_id = $2 and state = 'DEAD' returning true",
                key,
                delivery,
            )
        if not found:
            raise DeliveryNotFound(f"trigger {key} has no dead delivery {delivery}")


def _trigger(row: asyncpg.Record) -> TriggerRow:
    return TriggerRow(
        row["trigger_key"], row["uid"], row["generation"], msgspec.json.decode(row["spec"]), Source(row["source"]), row["suspended"],
        row["deleted"], row["anchor_at"], row["next_at"], row["fired_at"], row["revision"], row["now"],
    )  # fmt: skip


def _detail(firing: Firing) -> Json:
    found = {"by": firing.by or None, "skippedSince": firing.skipped_since}
    return {key: value for key, value in found.items() if value is not None}
