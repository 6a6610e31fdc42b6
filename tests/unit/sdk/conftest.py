"""``real_time``: one attempt of an agent on an ordinary event loop, against the record of a simulation. For what needs real threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from perdure import Agent, protocol
from perdure.sdk.transport import Listener
from perdure.testing import Simulation
from perdure.testing.record import RunRecord


class Exits(list[int]):
    """Instead of ending the process."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    def leave(self, code: int) -> None:
        self.append(code)
        self.left.set()


class Direct:
    """A transport without a connection."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        self.listener = listener

    async def call(self, body: bytes) -> bytes:
        await asyncio.sleep(0)
        return self.record.perform(self.record.epoch, str(uuid4()), protocol.decode_operation(body))

    async def context(self) -> bytes:
        return self.record.lease()

    async def close(self) -> None: ...


RealTime = Callable[..., RunRecord]


@pytest.fixture
def real_time() -> RealTime:
    def run(agent: Agent[..., Any], input: object = None, *, record: RunRecord | None = None, exits: Exits | None = None) -> RunRecord:
        record = record or Simulation(agent, input).record
        transport = Direct(record)

        async def main() -> None:
            context = await transport.context()
            async with asyncio.timeout(30):
                await agent.attempt(context, transport, exits if exits is not None else Exits())

        asyncio.run(main())
        return record

    return run
