"""Operations of one run commit in the order in which they were sent, whatever gets in their way: locks, slow lanes, lost connections."""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import dataclass, field

import asyncpg
import msgspec
import pytest
from tests.harness.api import Refused
from tests.harness.cluster import Cluster
from tests.harness.gateways import PATIENCE
from tests.harness.pods import FakePod, answer
from tests.harness.postgres import locked, waiters

from perdure import protocol as wire


@dataclass
class Script:
    """Numbered operations of one run, sent as a sidecar would: resent in order, under the same request ids, until each is answered."""

    bodies: list[wire.Body]
    requests: list[str] = field(init=False)
    seqs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = [str(uuid.uuid4()) for _ in self.bodies]

    def send(self, pod: FakePod) -> dict[int, asyncio.Future[wire.Answer | wire.Refusal]]:
        return {n: pod.ask(self.bodies[n], req=self.requests[n]) for n in range(len(self.bodies)) if n not in self.seqs}

    async def collect(self, sent: dict[int, asyncio.Future[wire.Answer | wire.Refusal]]) -> None:
        """Takes what was answered. Refusals that are worth a retry leave their operation unanswered."""
        for n, frame in zip(sent, await asyncio.gather(*sent.values(), return_exceptions=True), strict=True):
            if isinstance(frame, wire.Refusal):
                assert frame.problem.retryable, frame.problem
            elif isinstance(frame, wire.Answer):
                self.seqs[n] = answer(wire.Recorded, frame).seq

    async def check(self, pg: asyncpg.Connection, run: str | None) -> None:
        assert list(self.seqs) == list(range(len(self.bodies)))
        order = [self.seqs[n] for n in range(len(self.bodies))]
        assert order == sorted(set(order))
        written = await pg.fetch(
            "select seq, kind, data ->> 'key' as key from perdure.events where run_id = $1::text::uuid and "
            "(kind like 'step.%' or kind like 'agent.%') order by seq",
            run,
        )
        assert [row["seq"] for row in written] == order
        for body, row in zip(self.bodies, written, strict=True):
            assert row["key" if isinstance(body, wire.StepEnd) else "kind"] == _name(body)


def _name(body: wire.Body) -> str:
    return body.key if isinstance(body, wire.StepEnd) else f"agent.{body.kind}"  # type: ignore[attr-defined]


def step(n: int) -> wire.StepEnd:
    return wire.StepEnd(key=f"step:s#{n}", name="s", output=msgspec.Raw(str(n).encode()))


def script(seed: int, length: int) -> Script:
    """Steps and events mixed: they travel in different lanes."""
    rng = random.Random(seed)
    return Script([step(n) if rng.random() < 0.7 else wire.EventAppend(kind=f"e{n}") for n in range(length)])


async def contend(dsn: str, run: str, done: asyncio.Event, rng: random.Random) -> None:
    """Takes the run's row again and again, for moments."""
    while not done.is_set():
        async with locked(dsn, run):
            await asyncio.sleep(rng.random() * 0.02)
        await asyncio.sleep(rng.random() * 0.01)


async def test_under_contention(cluster: Cluster) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    assert pod.run is not None
    work, done = script(seed, 250), asyncio.Event()
    contender = asyncio.create_task(contend(cluster.dsn, pod.run, done, random.Random(seed)))
    await work.collect(work.send(pod))
    done.set()
    await contender
    await work.check(cluster.pg, pod.run)
    assert await gateway.metric("perdure_slow_lane_total") > 0


async def test_over_two_gateways_with_reconnects(cluster: Cluster) -> None:
    """Each cut leaves operations queued at the gateway that was left, which go on committing while the other one gets the resends."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    gateways = await cluster.start("a", "b")
    await cluster.api(gateways[0]).create()
    pod = await cluster.holder(gateways[0])
    assert pod.run is not None
    work, done = script(seed, 200), asyncio.Event()
    contender = asyncio.create_task(contend(cluster.dsn, pod.run, done, rng))
    for cut in range(1, 6):
        sent = work.send(pod)
        await asyncio.wait(list(sent.values())[: 10 + rng.randrange(20)])
        await pod.cut()
        await work.collect(sent)
        await pod.connect(gateways[cut % 2])
        await pod.next(wire.Lease)
    await work.collect(work.send(pod))
    done.set()
    await contender
    await work.check(cluster.pg, pod.run)


async def test_a_lock_held_too_long_refuses_all_that_wait_behind_it(cluster: Cluster) -> None:
    """The slow lane gives up on the first; were the second committed then, the resend of the first would come too late."""
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    assert pod.run is not None
    work = Script([step(0), wire.EventAppend(kind="e1"), step(2)])
    async with locked(cluster.dsn, pod.run):
        sent = work.send(pod)
        await waiters(cluster.dsn, 1)
        frame = await sent[0]
        assert isinstance(frame, wire.Refusal)
        assert frame.problem.type in ("urn:perdure:busy", "urn:perdure:unavailable")
    await work.collect(sent)
    assert work.seqs == {}, "a later operation was committed before an earlier one"
    await work.collect(work.send(pod))
    await work.check(cluster.pg, pod.run)


async def test_a_known_step_behind_a_new_one_on_a_locked_run(cluster: Cluster) -> None:
    """The known one can be answered without the lock, the new one cannot: neither may be lost or answered twice."""
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    assert pod.run is not None
    known = await pod.step("step:known#0")
    async with locked(cluster.dsn, pod.run):
        gateway.freeze()
        new, old = pod.ask(step(1)), pod.ask(wire.StepEnd(key="step:known#0", name="s"))
        await pod.flushed()
        gateway.thaw()
        await waiters(cluster.dsn, 1)
    recorded = [answer(wire.Recorded, await asyncio.wait_for(future, 5)) for future in (new, old)]
    assert [(r.seq, r.existing) for r in recorded] == [(known.seq + 1, False), (known.seq, True)]
    assert (await pod.step("step:after#0")).seq == known.seq + 2


async def test_operations_on_the_heels_of_a_hello(cluster: Cluster) -> None:
    """A sidecar resends without waiting for its lease to be delivered again."""
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    for n in range(20):
        await pod.cut()
        await pod.connect(gateway)
        assert (await pod.step(f"step:s#{n}")).existing is False


async def test_a_lease_is_delivered_again_before_anything_is_answered(cluster: Cluster) -> None:
    """The gateway's beat would find it too, a quarter of a lease later: here that is beyond the test's patience, and until then the resend
    of a call would be refused."""
    gateways = await cluster.start("a", "b", lease_seconds=4 * (PATIENCE + 10))
    run = await cluster.api(gateways[0]).create()
    pod = await cluster.holder(gateways[0])
    body, request = wire.ActivityBegin(tool="send_mail"), str(uuid.uuid4())
    granted = await pod.get(wire.ActivityDecision, body, req=request)
    assert granted.decision == "execute"
    for gateway in gateways:
        await pod.cut()
        await pod.connect(gateway)
        resent = await pod.get(wire.ActivityDecision, body, req=request)
        assert pod.heard(wire.Lease) == 1
        assert resent == granted
        context = await pod.lease()
        assert (context.run_id, context.epoch) == (run, 1)
    assert await pod.finish() == "Succeeded"


async def test_a_refused_operation_does_not_hold_up_the_next(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    bad = pod.ask(wire.EventAppend(kind="x", expected_seq=1000))
    good = await pod.step("step:s#0")
    assert good.seq == 3
    with pytest.raises(Refused, match="concurrent-append"):
        answer(wire.Recorded, await bad)


async def test_many_runs_do_not_wait_for_the_one_that_is_locked(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create_many([f"r{n}" for n in range(5)])
    pods = [await cluster.holder(gateway) for _ in range(5)]
    assert pods[0].run is not None
    async with locked(cluster.dsn, pods[0].run):
        stuck = pods[0].ask(step(0))
        for n in range(20):
            await asyncio.gather(*(pod.step(f"step:s#{n}") for pod in pods[1:]))
        assert not stuck.done()
    assert isinstance(await stuck, wire.Answer)


async def test_nothing_younger_overtakes_a_refused_operation(cluster: Cluster) -> None:
    """A worker may send on before it has read the refusal: what it sends is refused too, until the refused operation has come back."""
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    assert pod.run is not None
    work = Script([step(0), step(1)])
    async with locked(cluster.dsn, pod.run):
        first = pod.ask(work.bodies[0], req=work.requests[0])
        await waiters(cluster.dsn, 1)
        assert isinstance(await first, wire.Refusal)
    early = await pod.ask(work.bodies[1], req=work.requests[1])
    assert isinstance(early, wire.Refusal)
    assert early.problem.retryable
    await work.collect(work.send(pod))
    await work.check(cluster.pg, pod.run)


async def test_operations_of_one_run_share_commits(cluster: Cluster) -> None:
    gateway, api = await cluster.one()
    await api.create()
    pod = await cluster.holder(gateway)
    work = Script([wire.EventAppend(kind=f"e{n}") for n in range(64)])
    gateway.freeze()
    sent = work.send(pod)
    await pod.flushed()
    gateway.thaw()
    await work.collect(sent)
    await work.check(cluster.pg, pod.run)
    assert await gateway.metric("perdure_commit_seconds_count") < len(work.bodies) / 4
