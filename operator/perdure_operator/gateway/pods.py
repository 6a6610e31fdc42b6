"""The pods connected to this gateway: one msgpack WebSocket each, on which an idle pod waits and a pod at work sends its operations.

A pod's operations are answered in the order in which their commits come back; the sidecar matches them by id. Frames to a pod go
through one sender task, so a slow pod delays nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec
import structlog
from aiohttp import WSMsgType, web

from perdure import protocol as wire
from perdure_operator.domain.errors import (
    CorruptPayload,
    DeadlineExceeded,
    InvalidInput,
    LeaseTooLarge,
    NotRunning,
    PerdureError,
    PoolNotFound,
    RunFinished,
    RunNotFound,
    StaleFence,
    from_code,
)
from perdure_operator.domain.lease import weight
from perdure_operator.domain.payload import check_json
from perdure_operator.domain.run import State
from perdure_operator.gateway import delivery, translate
from perdure_operator.gateway.auth import PodIdentity
from perdure_operator.observability import metrics
from perdure_operator.services.why import UNDELIVERABLE
from perdure_operator.store.context import LEAN, WHOLE, Portion
from perdure_operator.store.ids import parse_uuid
from perdure_operator.store.operations import Control, Fence, Operation, Outcome
from perdure_operator.store.payload import Payloads
from perdure_operator.store.store import Store

if TYPE_CHECKING:
    from perdure_operator.gateway.batching import Batcher
    from perdure_operator.gateway.pools import Pools

log = structlog.get_logger(__name__)

HELLO_SECONDS = 10.0
MAX_OPEN_OPERATIONS = 4096
MAX_QUEUED_BYTES = 8 * 1024 * 1024
"""From so many bytes that a pod has not taken on, nothing more is read from the store for it."""
_OF_THE_RUN = (LeaseTooLarge, CorruptPayload, msgspec.MsgspecError, RecursionError)
"""Why a lease cannot be delivered, when the reason lies in the run: no other pod and no other time would change it."""
_FENCED_OUT = (StaleFence.code, RunFinished.code, NotRunning.code, RunNotFound.code, DeadlineExceeded.code)
_STEPS = metrics.OPERATIONS.labels("step.end", "ok")


class Pod:
    """One connected pod. ``fetches``: its agent takes marks in place of what is large."""

    def __init__(self, identity: PodIdentity, socket: web.WebSocketResponse) -> None:
        self.id = identity.pod_id
        self.pool = identity.pool
        self.reuse = False
        self.fetches = False
        self.connection = 0
        self.held: translate.Held | None = None
        self.last: Fence | None = None
        self._open = 0
        self._room = asyncio.Event()
        self.heard = asyncio.get_running_loop().time()
        self._socket = socket
        self._frames: list[bytes] = []
        self._more = asyncio.Event()
        self._queued = 0
        self._taken = asyncio.Event()
        self._gone = False
        self._reading = asyncio.Lock()

    def send(self, frame: wire.FromGateway) -> None:
        self.send_encoded(wire.encode_frame(frame))

    def send_encoded(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._queued += len(frame)
        self._more.set()

    def opened(self) -> None:
        self._open += 1

    def answered(self) -> None:
        self._open -= 1
        if self._open < MAX_OPEN_OPERATIONS:
            self._room.set()

    async def room(self) -> None:
        """Returns when fewer operations are open than one pod may have: until then nothing more is read from it."""
        while self._open >= MAX_OPEN_OPERATIONS:
            self._room.clear()
            await self._room.wait()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """For what is read and sent to it at its own wish: one after the other, each when it has taken enough of what was sent before. The
        turn is kept until the answer is queued, or many would find room at once. False: it went away."""
        async with self._reading:
            while self._queued >= MAX_QUEUED_BYTES and not self._gone:
                self._taken.clear()
                await self._taken.wait()
            yield not self._gone

    def gone(self) -> None:
        """Nothing more is read for it."""
        self._gone = True
        self._taken.set()

    @property
    def portion(self) -> Portion:
        """How much of its run it is told at once."""
        return LEAN if self.fetches else WHOLE

    async def pump(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            frames, self._frames = self._frames, []
            for frame in frames:
                await self._socket.send_bytes(frame)  # which returns when the pod has taken most of it
                self._queued -= len(frame)
                if self._queued < MAX_QUEUED_BYTES:
                    self._taken.set()
            frames.clear()
            frame = b""  # or the last ones, which may be large, are kept until the next come

    async def last_words(self) -> None:
        """Sends what is left, for a second at most."""
        frames, self._frames = self._frames, []
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1):
                for frame in frames:
                    await self._socket.send_bytes(frame)

    async def close(self) -> None:
        """Whatever it has asked and not heard it asks again, of whom it connects to next."""
        await self._socket.close(code=1001)


class Hub:
    """All connected pods, and what happens on their sockets. ``kick`` asks the dispatcher to look now."""

    def __init__(self, store: Store, gateway: str, pools: Pools, *, lease_seconds: float, kick: Callable[[], None]) -> None:
        self._store = store
        self._gateway = gateway
        self._pools = pools
        self._lease_seconds = lease_seconds
        self._kick = kick
        self.batcher: Batcher | None = None
        self.pods: dict[UUID, Pod] = {}
        self._by_run: dict[UUID, Pod] = {}
        self._idle: dict[UUID, Pod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Pod] = set()
        self._bringing: Counter[UUID] = Counter()
        """Runs whose lease is being read for its pod, by the number of connections for which it is; for these there was news meanwhile:"""
        self._unheard: set[UUID] = set()
        self._closing = False
        # What is read at once is what a gateway holds. A run that is read whole may be large, so one after the other.
        self._readings = {False: asyncio.Semaphore(8), True: asyncio.Semaphore(1)}
        self._windows = asyncio.Semaphore(4)

    # ------------------------------------------------------------------------------------------------ what others ask

    def idle_pods(self) -> list[UUID]:
        return list(self._idle)

    def idle_by_pool(self) -> dict[str, list[UUID]]:
        pools: dict[str, list[UUID]] = {}
        for pod in self._idle.values():
            pools.setdefault(pod.pool, []).append(pod.id)
        return pools

    def waits(self, pod: Pod) -> bool:
        """As far as this gateway knows, it is idle."""
        return self._idle.get(pod.id) is pod

    def not_idle(self, pod: Pod) -> None:
        """From now on nothing is leased to this connection."""
        if self._idle.get(pod.id) is pod:
            del self._idle[pod.id]

    def holder(self, run: UUID) -> Pod | None:
        return self._by_run.get(run)

    def hearer(self, run: UUID, epoch: int) -> Pod | None:
        """Who holds this lease here and can be told news of it. The store takes for told what it gave this gateway. Where the lease is
        being read for a connection of its holder, the reading may be older than the news: it is asked for again when the lease is there."""
        if run in self._bringing:
            self._unheard.add(run)
        pod = self._by_run.get(run)
        return pod if pod is not None and pod.held is not None and pod.held.fence.epoch == epoch else None

    def leases(self, *, heard_since: float = 0.0) -> list[tuple[UUID, Fence]]:
        """Leases held by pods connected here that have sent a frame since that time of the event loop."""
        return [(pod.held.run, pod.held.fence) for pod in self.pods.values() if pod.held and pod.heard >= heard_since]

    def granted(self, run: UUID, epoch: int, pod_id: UUID, path: str) -> None:
        """A lease was committed for one of our pods: take it out of the idle ones and bring it the run."""
        metrics.LEASES.labels(path).inc()
        pod = self.pods.get(pod_id)
        if pod is None:
            return  # it went; the lease is delivered when it connects again, here or elsewhere, or expires
        self.not_idle(pod)
        self._later(self._deliver(pod, run, epoch))

    async def close(self) -> None:
        """Sends all pods to other gateways, at once: while they are here nobody keeps their leases alive once this process's loops end."""
        self._closing = True
        self._idle.clear()
        await asyncio.gather(*(pod.close() for pod in list(self._connections)))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lost(self, run: UUID, fence: Fence, reason: str) -> None:
        """The lease is over. Tells its holder, if that still believes in it, and nobody else: any pod can name any run."""
        pod = self.pods.get(fence.holder)
        if pod is not None and pod.held is not None and pod.held.run == run and pod.held.fence == fence:
            self._release(pod)
            pod.send(wire.LeaseLost(run=str(run), epoch=fence.epoch, reason=reason))

    # ------------------------------------------------------------------------------------------------------ one socket

    async def serve(self, identity: PodIdentity, socket: web.WebSocketResponse) -> None:
        """From hello to the end of the connection."""
        pod = Pod(identity, socket)
        self._connections.add(pod)
        pump = asyncio.create_task(pod.pump())
        try:
            if self._closing:
                return
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await socket.receive()
            frame = wire.decode_from_pod(hello.data) if hello.type is WSMsgType.BINARY else None
            if not isinstance(frame, wire.Hello):
                raise InvalidInput("the first frame must be hello")
            if await self._hello(pod, frame):
                clock = asyncio.get_running_loop().time
                async for message in socket:
                    pod.heard = clock()
                    if message.type is WSMsgType.BINARY:
                        await self._receive(pod, wire.decode_from_pod(message.data))
                        await pod.room()
                    elif message.type is WSMsgType.ERROR:
                        break
        except (msgspec.DecodeError, InvalidInput, TimeoutError) as error:
            log.warning("a pod spoke wrongly", pod=str(pod.id), error=str(error))
            pod.send(wire.Retire(reason=f"protocol error: {error}"))
        except PerdureError as error:  # the store is away: the pod connects again
            log.warning("a pod could not be served", pod=str(pod.id), error=str(error))
        finally:
            self._connections.discard(pod)
            if self.pods.get(pod.id) is pod:
                del self.pods[pod.id]
                if pod.held is not None and self._by_run.get(pod.held.run) is pod:
                    del self._by_run[pod.held.run]
            self.not_idle(pod)
            pod.gone()
            pump.cancel()
            await pod.last_words()

    async def _hello(self, pod: Pod, hello: wire.Hello) -> bool:
        if hello.protocol != wire.PROTOCOL_VERSION:
            pod.send(wire.Retire(reason=f"this gateway speaks protocol {wire.PROTOCOL_VERSION}, not {hello.protocol}"))
            return False
        pod.reuse, pod.fetches, pod.connection = hello.reuse, hello.fetch, hello.connection
        believed = _uuid(hello.run) if hello.run else None
        if not 0 <= (hello.epoch or 0) <= translate.MAX_INT:
            raise InvalidInput(f"{hello.epoch} is no epoch")
        if hello.ended_run is not None and hello.ended_epoch is not None:
            await self._store.processes_ended(pod.id, _ended(hello.ended_run, hello.ended_epoch))
        status = await self._store.pod_hello(
            pod.id,
            pod.pool,
            self._gateway,
            reuse=hello.reuse,
            ready=hello.ready,
            nth=hello.connection,
            run=believed,
            epoch=hello.epoch,
        )
        if status.status == "superseded" or self._closing:
            return False
        if status.run is not None and self.batcher is not None:
            self.batcher.connected(status.run)
        before = self.pods.get(pod.id)
        self.pods[pod.id] = pod
        if before is not None:
            self._later(before.close())  # its peer may be long gone, and closing waits for it
        pod.send(wire.Welcome(pod=str(pod.id), pool=pod.pool, heartbeat_seconds=self._lease_seconds / 4, lease_seconds=self._lease_seconds))
        if status.status == "leased" and status.run is not None and status.epoch is not None:
            metrics.LEASES.labels("redelivered").inc()
            # Before the next frame is read: resent operations must find the run that the pod holds.
            await self._deliver(pod, status.run, status.epoch, known=believed == status.run)
        elif status.status == "lost" and hello.run is not None and hello.epoch is not None:
            pod.last = Fence(hello.epoch, pod.id)
            pod.send(wire.LeaseLost(run=hello.run, epoch=hello.epoch, reason="another epoch has begun"))
        elif status.status == "idle":
            self._becomes_idle(pod)
        elif status.status == "retire":
            pod.send(wire.Retire(reason="this pod has done its work"))
        return True

    def _becomes_idle(self, pod: Pod) -> None:
        self._idle[pod.id] = pod
        self._kick()

    async def _deliver(self, pod: Pod, run: UUID, epoch: int, *, known: bool = False) -> None:
        """``known``: the pod has said that it holds this run."""
        self._bringing[run] += 1
        try:
            await self._bring(pod, run, epoch, known)
        except _OF_THE_RUN as error:
            await self.undeliverable(pod, run, epoch, error)
        except PerdureError as error:
            # The lease stands without having been heard: it is delivered on the next hello, or it expires.
            log.warning("a lease could not be delivered", run=str(run), error=str(error))
            await pod.close()
        finally:
            self._bringing[run] -= 1
            if not self._bringing[run]:
                del self._bringing[run]
                self._unheard.discard(run)

    async def _bring(self, pod: Pod, run: UUID, epoch: int, known: bool) -> None:
        """Raises PerdureError."""
        async with self._readings[pod.portion.whole]:
            context = await self._store.context(run, pod.portion)
            if self.pods.get(pod.id) is not pod:
                return
            frame = delivery.lease(context, fetches=pod.fetches)
        # The state as well: a run that was suspended or has ended since keeps its epoch until the next lease.
        if context.run.epoch != epoch or context.state != State.RUNNING:
            if known:  # it cleans up first, and says itself when it is idle
                pod.last = Fence(epoch, pod.id)
                pod.send(wire.LeaseLost(run=str(run), epoch=epoch, reason=f"the run is {context.state}"))
            else:
                await self.restore(pod)
            return
        if context.fallback is not None and self.batcher is not None:
            log.error("a session was broken; fell back", run=str(run), to_seq=context.fallback)
            self.batcher.submit(
                Control(run, "note", {"kind": "checkpoint.corrupt", "data": {"fellBackTo": context.fallback}}), lambda _: None
            )
        pod.held = delivery.held(context, pod.id)
        pod.last = pod.held.fence
        self._by_run[run] = pod
        pod.send_encoded(frame)
        if context.run.cancel_requested or context.run.pause:
            poke = wire.Poke(cancel=context.run.cancel_requested, pause=context.run.pause)
            pod.send(wire.Push(run=str(run), epoch=epoch, poke=wire.encode_json(poke)))
        if run in self._unheard:
            await self._store.tell_again(self._gateway, run)

    async def undeliverable(self, pod: Pod, run: UUID, epoch: int, error: Exception) -> None:
        """What its holder must be told cannot be told, and could not be next time: an attempt is lost, with the reason in the run's log;
        when that has happened often enough the run is parked."""
        log.warning("a lease cannot be delivered", run=str(run), epoch=epoch, error=str(error))
        assert self.batcher is not None
        body = {"leaseEpoch": epoch, "reason": UNDELIVERABLE, "weight": weight(UNDELIVERABLE), "message": str(error)[:2000]}
        try:
            await self.batcher.apply(Control(run, "expire", body))
        except PerdureError as refused:
            log.warning("it could not be given back", run=str(run), error=str(refused))
            await pod.close()
            return
        if self.pods.get(pod.id) is not pod:
            return
        if pod.held is not None and pod.held.run == run and pod.held.fence.epoch == epoch:
            self.lost(run, pod.held.fence, UNDELIVERABLE)
        elif pod.reuse:
            await self.restore(pod)
        else:
            pod.send(wire.Retire(reason="its run could not be delivered"))

    async def restore(self, pod: Pod) -> None:
        """It was leased a run, never heard of it, and the run has gone on elsewhere: it waits still. Raises PerdureError."""
        if await self._store.pod_idle(pod.id, self._gateway, pod.connection) and self.pods.get(pod.id) is pod:
            self._becomes_idle(pod)

    def _release(self, pod: Pod) -> None:
        if pod.held is not None and self._by_run.get(pod.held.run) is pod:
            del self._by_run[pod.held.run]
        pod.held = None

    async def _receive(self, pod: Pod, frame: wire.FromPod) -> None:
        if isinstance(frame, wire.Op):
            await self._operation(pod, frame)
        elif isinstance(frame, wire.Idle):
            pod.fetches = frame.fetch
            ended = None if frame.run is None or frame.epoch is None else _ended(frame.run, frame.epoch)
            if await self._store.pod_idle(pod.id, self._gateway, pod.connection, ended=ended):
                self._release(pod)
                self._becomes_idle(pod)
            else:
                pod.send(wire.Retire(reason="this pod was retired"))
        elif isinstance(frame, wire.Hello):
            raise InvalidInput("hello is the first frame only")
        # A Beat says no more than any frame does: the pod is there (pod.heard, heartbeats.py).

    async def _operation(self, pod: Pod, frame: wire.Op) -> None:
        kind = "?"
        try:
            body = _decode(frame.body)
            kind = str(body.__struct_config__.tag)
            held = self._fence(pod, frame, body)
            if isinstance(body, wire.StepBegin):
                pod.send(wire.Answer(id=frame.id, body=await self._step_begin(held, body)))
                return
            if isinstance(body, wire.Fetch):
                pod.opened()
                self._later(self._fetch(pod, frame, held.run, body))
                return
            operation = await self._translated(held, _request_id(frame.req), body)
        except PerdureError as error:
            self._refuse(pod, frame, kind, error)
            return
        if isinstance(operation, translate.Denied):
            pod.send(wire.Answer(id=frame.id, body=wire.encode_json(operation.answer)))
            return
        pod.opened()
        assert self.batcher is not None
        self.batcher.submit(operation, lambda result: self._done(pod, frame, operation, result))

    async def _translated(self, held: translate.Held, request: UUID, body: wire.Operation) -> Operation | translate.Denied:
        try:
            return translate.operation(held, request, body, self._pools, self._lease_seconds)
        except PoolNotFound:
            await self._pools.refresh()  # it may have been made a moment ago, at another gateway
            return translate.operation(held, request, body, self._pools, self._lease_seconds)

    def _fence(self, pod: Pod, frame: wire.Op, body: wire.Operation) -> translate.Held:
        """The held run; for a late receipt also one that this pod held before."""
        if not 0 <= frame.epoch <= translate.MAX_INT:
            raise StaleFence(f"there is no epoch {frame.epoch}")
        held = pod.held
        if held is not None and held.run_id == frame.run and held.fence.epoch == frame.epoch:
            return held
        if isinstance(body, wire.Spawn | wire.ActivityBegin | wire.StepBegin | wire.Fetch):
            raise StaleFence(f"this pod does not hold run {frame.run} at epoch {frame.epoch}")
        # Not the lease that we know, but it may be a resend of what was committed, or a late receipt: the store decides under the lock.
        return translate.Held(_uuid(frame.run), frame.run, "", "", pod.pool, Fence(frame.epoch, pod.id), {})

    async def _step_begin(self, held: translate.Held, body: wire.StepBegin) -> bytes:
        key = body.key or f"step:{body.name}#0"
        entry = await self._store.journaled(held.run, key)
        if entry is None:
            return wire.encode_json(wire.StepDecision(decision="execute", key=key))
        if entry.state == "failed":
            return wire.encode_json(
                wire.StepDecision(decision="failed", key=key, error=wire.ErrorInfo(**(entry.error or {"type": "Failed"})))
            )
        return wire.encode_json(wire.StepDecision(decision="done", key=key, output=msgspec.Raw(entry.output)))

    async def _fetch(self, pod: Pod, frame: wire.Op, run: UUID, body: wire.Fetch) -> None:
        """It counts as open while it waits, so a pod that takes nothing is not read from in the end."""
        try:
            async with pod.turn() as there:
                if not there:
                    return
                async with self._windows:
                    answer = await delivery.fetch(self._store, run, body)
                metrics.OPERATIONS.labels("fetch", "ok").inc()
                pod.send(wire.Answer(id=frame.id, body=answer))
        except PerdureError as error:
            self._refuse(pod, frame, "fetch", error)
        finally:
            pod.answered()

    def _done(self, pod: Pod, frame: wire.Op, operation: Operation, result: Outcome | PerdureError) -> None:
        pod.answered()
        if isinstance(result, Outcome) and result.code != "ok":
            result = from_code(result.code, result.detail)
        if isinstance(result, PerdureError):
            self._refuse(pod, frame, operation.kind if isinstance(operation, Control) else "step.end", result)
            if result.code in _FENCED_OUT and operation.fence is not None:
                if result.code == DeadlineExceeded.code and self.batcher is not None:
                    self.batcher.submit(Control(operation.run, "settle", {}), lambda _: None)
                self.lost(operation.run, operation.fence, result.code)
            return
        if not isinstance(operation, Control):
            _STEPS.inc()
            pod.send(wire.Answer(id=frame.id, body=wire.encode_json(result.answer)))
            if result.nearly_full and self.batcher is not None:
                self.batcher.submit(Control(operation.run, "settle", {}), lambda _: None)  # which says so in its log
            return
        metrics.OPERATIONS.labels(operation.kind, "ok").inc()
        # The answer to a resend may come when the run has long been running elsewhere.
        holds = pod.held is not None and pod.held.run == operation.run and pod.held.fence == operation.fence
        released = (operation.kind != "activity.end" and (result.state != "Running" or not holds)) or result.leased is not None
        if released:
            self._release(pod)
        wanted = translate.stored(result.answer)
        if any(payload is not None and payload[:1] != b"\x00" for payload in wanted):
            self._later(self._answer_with_blobs(pod, frame, operation.kind, result, released))
        else:
            body = translate.answer(operation.kind, result.answer, Payloads())
            pod.send(wire.Answer(id=frame.id, body=body, released=released))

    async def _answer_with_blobs(self, pod: Pod, frame: wire.Op, kind: str, result: Outcome, released: bool) -> None:
        try:
            if kind in ("wait", "suspend"):
                payloads = await self._store.outcomes(result.answer.get("outcomes", {}).values(), pod.portion)
            else:
                payloads = await self._store.payloads(translate.stored(result.answer))
        except PerdureError as error:
            self._refuse(pod, frame, kind, error)  # retryable: the resend gets the stored answer
            return
        pod.send(wire.Answer(id=frame.id, body=translate.answer(kind, result.answer, payloads), released=released))

    def _refuse(self, pod: Pod, frame: wire.Op, kind: str, error: PerdureError) -> None:
        metrics.OPERATIONS.labels(kind, error.code).inc()
        pod.send(wire.Refusal(id=frame.id, problem=translate.problem(error)))


def _decode(body: bytes) -> wire.Operation:
    # The one gate for all that an agent sends, its payloads included; these are at most three levels down.
    check_json(body, "the operation", limit=wire.MAX_FRAME_BYTES, depth=wire.MAX_PAYLOAD_DEPTH + 3)
    try:
        return wire.decode_operation(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"the operation is not understood: {error}") from error


def _uuid(value: str) -> UUID:
    try:
        return UUID(value)
    except ValueError:
        raise InvalidInput(f"{value!r} is not a run id") from None


def _ended(run: str, epoch: int) -> tuple[UUID, int]:
    """A lease of which nothing is left, as a pod says."""
    if not 0 <= epoch <= translate.MAX_INT:
        raise InvalidInput(f"{epoch} is no epoch")
    return _uuid(run), epoch


def _request_id(req: str) -> UUID:
    try:
        return parse_uuid(req)
    except ValueError:
        return uuid5(NAMESPACE_OID, req)
