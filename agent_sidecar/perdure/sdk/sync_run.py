"""``SyncRun``: the run as a synchronous agent sees it. Every operation blocks its thread until it is done."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar, overload

from perdure.sdk.children import Child, ChildResult, JoinMode
from perdure.sdk.conditions import Condition, Signal, Waited
from perdure.sdk.durations import Duration
from perdure.sdk.execution import Execution
from perdure.sdk.run import CheckpointType, Run, RunFacts

T = TypeVar("T")


class SyncRun(RunFacts):
    """Documentation of each operation: :class:`perdure.Run`."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution)
        self._run = Run(execution)

    def block_on(self, awaitable: Awaitable[T]) -> T:
        """Awaits anything asynchronous of this SDK, for instance ``gather`` of asynchronous steps."""

        async def work() -> T:
            return await awaitable

        return self._execution.threads.block_on(work)

    def sleep(self, duration: Duration, *, key: str | None = None) -> None:
        self.block_on(self._run.sleep(duration, key=key))

    def sleep_until(self, due: datetime, *, key: str | None = None) -> None:
        self.block_on(self._run.sleep_until(due, key=key))

    @overload
    def wait_signal(
        self, name: str, *, timeout: Duration | None = None, key: str | None = None, hold: Duration | None = None
    ) -> Signal[Any]: ...
    @overload
    def wait_signal(
        self, name: str, kind: type[T], *, timeout: Duration | None = None, key: str | None = None, hold: Duration | None = None
    ) -> Signal[T]: ...
    def wait_signal(
        self, name: str, kind: Any = Any, *, timeout: Duration | None = None, key: str | None = None, hold: Duration | None = None
    ) -> Signal[Any]:
        return self.block_on(self._run.wait_signal(name, kind, timeout=timeout, key=key, hold=hold))

    def wait(
        self,
        *conditions: Condition,
        mode: Literal["any", "all"] = "any",
        timeout: Duration | None = None,
        name: str | None = None,
        key: str | None = None,
        hold: Duration | None = None,
    ) -> Waited:
        return self.block_on(self._run.wait(*conditions, mode=mode, timeout=timeout, name=name, key=key, hold=hold))

    def spawn(
        self,
        *,
        pool: str = "",
        input: object = None,  # the name that a run's spec has for it
        objective: str = "",
        summary: str = "",
        spec: Mapping[str, Any] | None = None,
        policy: Literal["cancel", "detach", "fail_parent"] = "cancel",
        recording: Literal["Resource", "StoreOnly"] = "Resource",
        result: type[T] | Any = Any,
        key: str | None = None,
    ) -> Child[T]:
        """Starts the child at once; ``run.join([child])`` waits for it."""
        started = self._run.spawn(
            pool=pool,
            input=input,
            objective=objective,
            summary=summary,
            spec=spec,
            policy=policy,
            recording=recording,
            result=result,
            key=key,
        )
        return self.block_on(started)

    def join(
        self, children: Iterable[Child[T]], *, mode: JoinMode = "all", timeout: Duration | None = None, key: str | None = None
    ) -> list[ChildResult[T]]:
        return self.block_on(self._run.join(children, mode=mode, timeout=timeout, key=key))

    def checkpoint(self, *, type: CheckpointType = "step", cursor: object = None) -> None:  # the protocol's name
        self.block_on(self._run.checkpoint(type=type, cursor=cursor))

    def append(self, kind: str, data: object = None, *, expected_seq: int | None = None) -> int:
        return self.block_on(self._run.append(kind, data, expected_seq=expected_seq))
