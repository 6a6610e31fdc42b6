"""Group commit: operations of many runs, queued here, go to Postgres as one call and one commit.

Rules (with ``store/sql/60_batch.sql``): a run's operations are in at most one batch at a time and in the order they came, so a later
one never commits before an earlier one. Step outcomes travel in batches of their own, set-based. A run that somebody else has locked
goes to the slow lane, where one operation at a time waits for the lock. An unexpected error reruns the batch one by one, so a bad
operation harms only itself. A lost answer is tried again with the same request ids. When that takes too long (``unavailable``), or the
slow lane does not get the lock (``busy``), the operation and all that queue behind it for the same run are refused, and the caller
resends them in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from uuid import UUID

import structlog

from perdure_operator.domain.errors import Busy, PerdureError, StoreError, Unavailable
from perdure_operator.observability import metrics
from perdure_operator.store.operations import Control, Fence, JournalStep, Operation, Outcome
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)

JOURNAL_BATCH = 256
CONTROL_BATCH = 64
STEPS_OF_ONE_RUN = 64
CONTROLS_OF_ONE_RUN = 16
WORKERS_PER_LANE = 2
GIVE_UP_SECONDS = 20.0
OWED_SECONDS = 30.0
"""A client that has not sent a refused operation again by then has given it up."""

Done = Callable[[Outcome | PerdureError], None]


@dataclass(slots=True)
class _Entry:
    operation: Operation
    done: Done
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Owed:
    """Operations of a lease that were refused, in order: none that is younger may be committed before they have come back."""

    fence: Fence
    requests: deque[UUID]
    until: float


def _next_steps(queue: deque[_Entry]) -> Iterator[_Entry]:
    """No key twice: they are journaled in one statement."""
    keys: set[str] = set()
    for entry in islice(queue, STEPS_OF_ONE_RUN):
        if not isinstance(entry.operation, JournalStep) or entry.operation.key in keys:
            return
        keys.add(entry.operation.key)
        yield entry


def _next_controls(queue: deque[_Entry]) -> Iterator[_Entry]:
    return takewhile(lambda entry: isinstance(entry.operation, Control), islice(queue, CONTROLS_OF_ONE_RUN))


class _Lane:
    """Runs whose next operation is of this lane's kind and that are in no batch."""

    def __init__(self) -> None:
        self.ready: deque[UUID] = deque()
        self.wakeup = asyncio.Event()

    def add(self, run: UUID) -> None:
        self.ready.append(run)
        self.wakeup.set()


class Batcher:
    """One a gateway. ``idle`` gives the pods that the direct path may lease; ``observe`` hears every control outcome after its commit."""

    def __init__(self, store: Store, gateway: str, idle: Callable[[], Sequence[UUID]], observe: Callable[[Control, Outcome], None]) -> None:
        self._store = store
        self._gateway = gateway
        self._idle = idle
        self._observe = observe
        self._queues: dict[UUID, deque[_Entry]] = {}
        self._journal = _Lane()
        self._control = _Lane()
        self._slow_slots = asyncio.Semaphore(4)
        self._slow: set[asyncio.Task[None]] = set()
        self._owed: dict[UUID, _Owed] = {}

    async def run(self) -> None:
        """The workers; ends only by cancellation or by a bug, which then ends the gateway."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS_PER_LANE):
                group.create_task(self._work(self._journal, JOURNAL_BATCH))
                group.create_task(self._work(self._control, CONTROL_BATCH))

    def submit(self, operation: Operation, done: Done) -> None:
        """Queues; ``done`` is called once, in the event loop, after the commit (or the refusal)."""
        if self._out_of_turn(operation):
            done(Unavailable("an earlier operation of this run was refused and has not been sent again yet"))
            return
        queue = self._queues.get(operation.run)
        if queue is None:
            self._queues[operation.run] = deque((_Entry(operation, done),))
            self._lane(operation).add(operation.run)
        else:
            queue.append(_Entry(operation, done))

    async def apply(self, operation: Operation) -> Outcome:
        """Queues and waits. Raises the typed error of a refusal."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def done(result: Outcome | PerdureError) -> None:
            if not future.done():
                if isinstance(result, PerdureError):
                    future.set_exception(result)
                else:
                    future.set_result(result)

        self.submit(operation, done)
        return await future

    def _lane(self, operation: Operation) -> _Lane:
        return self._journal if isinstance(operation, JournalStep) else self._control

    def _take(self, lane: _Lane, limit: int) -> list[_Entry]:
        """Takes ready runs out of the lane: of each its next operations of the lane's kind."""
        batch: list[_Entry] = []
        next_ones = _next_steps if lane is self._journal else _next_controls
        while lane.ready and len(batch) < limit:
            batch += next_ones(self._queues[lane.ready.popleft()])
        return batch

    async def _work(self, lane: _Lane, limit: int) -> None:
        while True:
            batch = self._take(lane, limit)
            if not batch:
                lane.wakeup.clear()
                await lane.wakeup.wait()
                continue
            await self._commit(batch)

    async def _commit(self, batch: list[_Entry]) -> None:
        started = time.monotonic()
        try:
            outcomes: list[Outcome | PerdureError] = list(await self._until_answered(batch))
        except Unavailable as error:
            for run in dict.fromkeys(entry.operation.run for entry in batch):
                self._abandon(run, error)
            return
        except PerdureError as error:
            if len(batch) == 1:
                outcomes = [error]
            else:
                log.warning("batch aborted, running its operations one by one", error=str(error), operations=len(batch))
                metrics.BATCH_REPLAYS.inc()
                outcomes = await self._one_by_one(batch)
        metrics.COMMIT_SECONDS.observe(time.monotonic() - started)
        metrics.BATCH_SIZE.observe(len(batch))
        done: dict[UUID, int] = {}
        stopped: dict[UUID, PerdureError | None] = {}
        for entry, outcome in zip(batch, outcomes, strict=True):
            run = entry.operation.run
            if run in stopped:
                continue  # whatever it is, it comes after the one that is not decided
            if isinstance(outcome, Outcome) and outcome.code == Busy.code:
                stopped[run] = None
            elif isinstance(outcome, Busy | Unavailable):
                stopped[run] = outcome
            else:
                done[run] = done.get(run, 0) + 1
                self._finish(entry, outcome)
        for run in done | stopped:
            self._advance(run, done.get(run, 0), stopped.get(run), locked=run in stopped)

    async def _until_answered(self, batch: list[_Entry], *, wait: bool = False) -> list[Outcome]:
        pause = 0.05
        while True:
            try:
                return await self._call([entry.operation for entry in batch], wait=wait)
            except Unavailable:
                if time.monotonic() - batch[0].since > GIVE_UP_SECONDS:
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
            except PerdureError:
                raise
            except Exception as error:
                # E.g. what the driver cannot encode. The worker must live: it serves all other runs too.
                raise StoreError(f"{type(error).__name__}: {error}") from error

    async def _call(self, operations: list[Operation], *, wait: bool) -> list[Outcome]:
        if isinstance(operations[0], JournalStep):
            return await self._store.journal([op for op in operations if isinstance(op, JournalStep)], wait=wait)
        controls = [op for op in operations if isinstance(op, Control)]
        return await self._store.control(controls, wait=wait, idle=self._idle(), gateway=self._gateway)

    async def _one_by_one(self, batch: list[_Entry]) -> list[Outcome | PerdureError]:
        outcomes: list[Outcome | PerdureError] = []
        stopped: dict[UUID, PerdureError] = {}
        for entry in batch:
            run = entry.operation.run
            try:
                if run in stopped:
                    raise stopped[run]
                outcomes += await self._until_answered([entry], wait=True)
            except (Busy, Unavailable) as error:
                stopped[run] = error
                outcomes.append(error)
            except PerdureError as error:
                if isinstance(error, StoreError):
                    log.error("operation failed", error=str(error), run=str(run))
                outcomes.append(error)
        return outcomes

    def _finish(self, entry: _Entry, outcome: Outcome | PerdureError) -> None:
        if isinstance(outcome, Outcome) and isinstance(entry.operation, Control):
            self._observe(entry.operation, outcome)
        try:
            entry.done(outcome)
        except Exception:
            log.exception("the receiver of an outcome failed", run=str(entry.operation.run))

    def _advance(self, run: UUID, done: int, error: PerdureError | None = None, *, locked: bool = False) -> None:
        """Drops what is done from a run's queue; with more to do the run is ready again, goes to the slow lane, or is given up."""
        queue = self._queues[run]
        for _ in range(done):
            queue.popleft()
        if error is not None:
            self._abandon(run, error)
        elif locked:
            task = asyncio.create_task(self._slow_lane(run))
            self._slow.add(task)
            task.add_done_callback(self._slow.discard)
        elif queue:
            self._lane(queue[0].operation).add(run)
        else:
            del self._queues[run]

    async def _slow_lane(self, run: UUID) -> None:
        """The next operation of a run that somebody else has locked: waits for the lock, alone."""
        metrics.SLOW_LANE.inc()
        entry = self._queues[run][0]
        async with self._slow_slots:
            try:
                outcome: Outcome | PerdureError = (await self._until_answered([entry], wait=True))[0]
            except (Busy, Unavailable) as error:
                self._abandon(run, error)
                return
            except PerdureError as error:
                outcome = error
        self._finish(entry, outcome)
        self._advance(run, 1)

    def _abandon(self, run: UUID, error: PerdureError) -> None:
        """The run's next operation is not committed, or nobody knows: all that wait behind it are refused too, to keep the order, and what
        the worker sends next has to wait until these have come back."""
        entries = self._queues.pop(run)
        worker = [entry.operation for entry in entries if entry.operation.fence is not None and entry.operation.request is not None]
        if worker and worker[0].fence is not None:
            requests = deque(operation.request for operation in worker if operation.request is not None)
            self._owed[run] = _Owed(worker[0].fence, requests, time.monotonic() + OWED_SECONDS)
        for entry in entries:
            self._finish(entry, error)

    def _out_of_turn(self, operation: Operation) -> bool:
        """Whether an operation of the same lease was refused before this one and is still to be sent again."""
        owed = self._owed.get(operation.run)
        if owed is None or operation.fence is None:
            return False
        if operation.fence != owed.fence or time.monotonic() > owed.until:
            del self._owed[operation.run]
            return False
        if operation.request != owed.requests[0]:
            return True
        owed.requests.popleft()
        if not owed.requests:
            del self._owed[operation.run]
        return False

    def connected(self, run: UUID) -> None:
        """The run's holder has connected anew: from here on it sends what is unanswered in order, to whichever gateway."""
        self._owed.pop(run, None)
