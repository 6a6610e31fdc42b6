"""Triggers on the bare store: each gateway's scheduler and router as an object whose rounds a test calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg
from tests.harness.cluster import POOL

from perdure_operator.domain.ids import uuid7
from perdure_operator.domain.trigger import Firing, Source, event_key
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.services.delivery_router import DeliveryRouter
from perdure_operator.services.trigger_plan import parse_spec, plan
from perdure_operator.services.trigger_scheduler import TriggerScheduler
from perdure_operator.store.store import Store
from perdure_operator.store.triggers import Emitted, Triggers

DAILY: dict[str, Any] = {"schedule": {"cron": "0 7 * * *", "timeZone": "Europe/Berlin"}}
MANUAL: dict[str, Any] = {"manual": {}}


def spec(source: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    template = fields.pop("template", {"spec": {"agent": {"poolRef": {"name": "p"}}}})
    return {"source": dict(source), "runTemplate": template, **fields}


def every(seconds: int) -> dict[str, Any]:
    return {"interval": {"seconds": seconds}}


class GatewayPart:
    """What of one gateway has to do with triggers."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._pools: dict[str, AgentPoolSpec] = {}
        self.made = 0
        self.scheduler = TriggerScheduler(Triggers(store), fired=lambda: None)
        self.deliveries = Triggers(store)
        self.router = DeliveryRouter(self.deliveries, name, lambda: self._pools, self._refresh, made=self._made)

    async def round(self) -> int:
        """One tick, and all that it brought. Gives how many deliveries were claimed."""
        await self.scheduler.tick()
        claimed = 0
        while found := await self.router.route_due():
            claimed += found
        return claimed

    async def _refresh(self) -> None:
        self._pools = {name: AgentPoolSpec.model_validate(spec) for name, spec in (await self._store.pools()).items()}

    def _made(self) -> None:
        self.made += 1


@dataclass
class Bench:
    store: Store
    pg: asyncpg.Connection
    triggers: Triggers = field(init=False)
    gateway: GatewayPart = field(init=False)

    def __post_init__(self) -> None:
        self.triggers = Triggers(self.store)
        self.gateway = GatewayPart(self.store, "a")

    async def setup(self) -> Bench:
        await self.store.upsert_pool("default", "p", POOL, None)
        return self

    async def set_clock(self, at: datetime) -> None:
        await self.pg.execute("update perdure.clock set shift = $1::timestamptz - clock_timestamp()", at)

    async def now(self) -> datetime:
        return await self.triggers.now()

    async def put(
        self, name: str, source: Mapping[str, Any], *, uid: UUID | None = None, created: datetime | None = None, **fields: Any
    ) -> UUID:
        """As the operator writes it: now, or of an object that was created earlier. Gives the object's uid."""
        key, now, uid = f"default/{name}", await self.now(), uid or uuid4()
        row = await self.triggers.get(key)
        generation = row.generation + 1 if row else 1
        planned = plan(key, parse_spec(spec(source, **fields)), row, now, uid=uid, generation=generation, created=created or now, told=None)
        assert await self.triggers.put(planned)
        return uid

    async def emit(self, name: str, *, id: str | None = None, payload: bytes | None = None) -> Emitted:
        delivery = uuid7()
        key = f"default/{name}"
        return await self.triggers.emit(
            Firing(key, Source.MANUAL, event_key(Source.MANUAL, key, id or str(delivery)), payload=payload), delivery
        )

    async def round(self) -> int:
        return await self.gateway.round()

    async def runs(self) -> list[str]:
        """Names of all runs, the oldest first."""
        return [row[0] for row in await self.pg.fetch("select name from perdure.runs order by run_id")]

    async def states(self) -> list[str]:
        """Of all deliveries, the oldest first."""
        return [row[0] for row in await self.pg.fetch("select state from perdure.deliveries order by delivery_id")]

    async def deliveries(self) -> list[asyncpg.Record]:
        return list(await self.pg.fetch("select * from perdure.deliveries order by fire_at, delivery_id"))

    async def run(self, name: str) -> asyncpg.Record:
        row = await self.pg.fetchrow(
            "select r.*, s.labels, s.input, s.spec from perdure.runs r join perdure.run_specs s using (run_id) where name = $1", name
        )
        assert row is not None, name
        return row
