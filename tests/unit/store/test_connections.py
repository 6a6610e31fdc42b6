"""A connection whose statement was given up is not used again: nobody knows in what state it is."""

from __future__ import annotations

import asyncio
import random

from perdure_operator.store.store import Store


async def test_cancelled_statements_leave_nothing_behind(database: str) -> None:
    store = await Store.connect(database, connections=1)
    dice = random.Random(7)
    try:
        for n in range(400):
            # Each is new to the server, so that it is cancelled while it is prepared, too.
            task = asyncio.create_task(_ask(store, f"select {n}, pg_sleep(0.001)"))
            await asyncio.sleep(dice.random() * 0.004)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with store.connection() as connection, connection.transaction(isolation="repeatable_read"):
                assert await connection.fetchval("select 1") == 1
    finally:
        await store.close()


async def _ask(store: Store, query: str) -> None:
    async with store.connection() as connection:
        await connection.fetch(query)
