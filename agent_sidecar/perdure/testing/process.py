"""One attempt as a process that can be killed: its own event loop, and the transport between it and the record.

A killed or suspended process just stops: its tasks are kept and never resumed, so no ``finally`` runs, as after ``os._exit``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn
from uuid import UUID

from perdure import protocol
from perdure.sdk.agents import Agent
from perdure.sdk.execution import Execution
from perdure.sdk.transport import Listener
from perdure.testing.loop import VirtualLoop
from perdure.testing.record import RunRecord

Fault = Literal["before", "after", "lost"]
"""What happens to a commit: the process dies before it; after it, before the answer; or only the answer is lost, and it is sent again."""

KILLED: Final = 137

# Loops with tasks that were stopped or are to be: kept for good, or the collector would run their `finally` blocks.
_GRAVEYARD: set[VirtualLoop] = set()


class Process:
    """``fault_of`` is asked at each commit what is to happen to it."""

    def __init__(
        self,
        agent: Agent[..., Any],
        record: RunRecord,
        fault_of: Callable[[RunRecord, protocol.Operation], Fault | None],
        executed: Callable[[RunRecord, str], None],
    ) -> None:
        self.record = record
        self.exit_code: int | None = None
        self.receipts: dict[str, bytes] = {}
        self._fault_of = fault_of
        self._executed = executed
        self._execution: Execution | None = None
        self._listener: Listener | None = None
        self._requests = 0
        self.context_data = record.lease()
        self.epoch = record.epoch
        self.loop = VirtualLoop(record.clock, self._threads)
        _GRAVEYARD.add(self.loop)
        self._task = self.loop.create_task(agent.attempt(self.context_data, self, self, observe=self._observe))
        self._task.add_done_callback(lambda _: self.loop.stop())

    def turn(self) -> None:
        """Goes on as far as it can without time passing."""
        self.loop.turn()
        if self._task.done() and self.exit_code is None:
            self.exit_code = self._task.result()
        if self.exit_code is not None:
            self._bury()

    def kill(self) -> None:
        """Ends it from outside, between two turns."""
        self.exit_code = KILLED
        self._bury()

    def push(self, poke: protocol.Poke) -> None:
        if self._listener is not None:
            self.loop.call_soon(self._listener.on_poke, poke)

    # ------------------------------------------------------------------------------------------- Exits

    def leave(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
        self.loop.stop()

    # ------------------------------------------------------------------------------------------- Transport

    async def context(self) -> bytes:
        return self.context_data

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    async def call(self, body: bytes) -> bytes:
        operation = protocol.decode_operation(body)
        self._requests += 1
        req = str(UUID(int=self.epoch << 64 | self._requests))
        await asyncio.sleep(0)
        if self.exit_code is not None:
            await self._never()
        if isinstance(operation, protocol.ActivityEnd) and operation.state == "succeeded":
            self.receipts[operation.key] = bytes(operation.response)
        fault = self._fault_of(self.record, operation)
        if fault == "before":
            await self._die()
        answer = self.record.perform(self.epoch, req, operation)
        if fault == "after":
            await self._die()
        if fault == "lost":
            await asyncio.sleep(0)
            answer = self.record.perform(self.epoch, req, protocol.decode_operation(body))
            if self._listener is not None:
                self._listener.on_reconnected()
        return answer

    async def close(self) -> None: ...

    # ------------------------------------------------------------------------------------------- ends

    async def _die(self) -> NoReturn:
        self.leave(KILLED)
        await self._never()

    async def _never(self) -> NoReturn:
        while True:
            await self.loop.create_future()

    def _bury(self) -> None:
        for task in self.loop.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        if not self.loop.tasks:
            _GRAVEYARD.discard(self.loop)
        self.loop.close()

    def _observe(self, execution: Execution) -> None:
        self._execution = execution
        execution.probe = lambda key: self._executed(self.record, key)

    def _threads(self) -> int:
        return self._execution.threads.running if self._execution is not None else 0
