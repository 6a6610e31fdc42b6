"""Connections that are of no use: whose statement was given up, so that nobody knows their state, and that are never answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from perdure_operator.domain.errors import Unavailable
from perdure_operator.store.store import CONNECT_SECONDS, Store


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


class Way:
    """What lies between a store and its database. ``silent``: connections are taken, and nothing comes of them, ever."""

    def __init__(self, database: str, folder: Path) -> None:
        parts = urlsplit(database)
        query = parse_qs(parts.query)
        [host], [port] = query["host"], query["port"]
        self._real, self._own = f"{host}/.s.PGSQL.{port}", str(folder / f".s.PGSQL.{port}")
        self.dsn = parts._replace(query=f"host={folder}&port={port}").geturl()
        self.silent = False
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    @asynccontextmanager
    async def there(self) -> AsyncIterator[Way]:
        server = await asyncio.start_unix_server(self._connected, self._own)
        try:
            yield self
        finally:
            self.cut()
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        if self.silent:
            return
        real_reader, real_writer = await asyncio.open_unix_connection(self._real)
        self._open.add(real_writer)
        await asyncio.gather(_copy(reader, real_writer), _copy(real_reader, writer), return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()


async def test_a_connection_that_is_never_answered_keeps_nobody_for_long(database: str, tmp_path: Path) -> None:
    """The database moves: what was begun in between went to where it was."""
    async with Way(database, tmp_path).there() as way:
        store = await Store.connect(way.dsn, connections=1)
        try:
            await store.pools()
            way.silent = True
            way.cut()
            lost = asyncio.create_task(store.pools())
            await asyncio.sleep(0.3)
            way.silent = False
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await lost
            await store.pools()
            assert time.monotonic() - began < CONNECT_SECONDS + 1
        finally:
            await store.close()


async def test_the_first_connection_may_take_its_time(database: str, tmp_path: Path) -> None:
    async with Way(database, tmp_path).there() as way:
        way.silent = True
        connecting = asyncio.create_task(Store.connect(way.dsn, connections=1))
        await asyncio.sleep(CONNECT_SECONDS / 2)
        way.silent = False
        store = await asyncio.wait_for(connecting, 2 * CONNECT_SECONDS + 2)
        await store.pools()
        await store.close()
