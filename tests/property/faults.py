"""A store whose calls fail on purpose: never sent, killed or cancelled on the way, or committed without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from random import Random

import asyncpg

from perdure_operator.domain.errors import Unavailable
from perdure_operator.store.store import Store


class Fault(Enum):
    BEFORE = "before"
    AFTER = "after"
    KILL = "kill"
    CANCEL = "cancel"


class Saboteur:
    """A connection that kills others, one at a time."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection, self._lock = connection, asyncio.Lock()

    async def strike(self, pid: int, fault: Fault, delay: float) -> None:
        await asyncio.sleep(delay)
        async with self._lock:
            await self._connection.execute(f"select pg_{'terminate' if fault is Fault.KILL else 'cancel'}_backend($1)", pid)


class FaultyStore(Store):
    """``rate``: the probability that a call fails."""

    random: Random
    saboteur: Saboteur
    rate: float = 0.0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy]:
        fault = self.random.choice(tuple(Fault)) if self.random.random() < self.rate else None
        if fault is Fault.BEFORE:
            raise Unavailable("simulated: never sent")
        kill: asyncio.Task[None] | None = None
        async with super().connection() as connection:
            if fault in (Fault.KILL, Fault.CANCEL):
                kill = asyncio.create_task(self.saboteur.strike(connection.get_server_pid(), fault, self.random.random() * 0.004))
            try:
                yield connection
            finally:
                if kill is not None:
                    await kill
        if fault is Fault.AFTER:
            raise Unavailable("simulated: the answer was lost")
