"""A worker's write needs the run's present epoch and its present holder, both (L3): an old lease writes nothing, not even that of the same
pod, and a stranger writes nothing under the right epoch."""

from __future__ import annotations

from uuid import uuid4

import pytest
from tests.harness import runs
from tests.harness.runs import GATEWAY, Held

from perdure_operator.store.operations import Control, Fence
from perdure_operator.store.store import Beat, Store

CONTROLS: dict[str, dict[str, object]] = {
    "wait": {"key": "w", "name": "", "mode": "any", "on": [runs.on_signal("x")], "suspend": True, "timeoutSeconds": None},
    "event": {"kind": "agent.x"},
    "checkpoint": {"type": "phase", "coversSeq": 1},
    "finish": {"outcome": "succeeded"},
    "activity.begin": {
        "key": "k", "tool": "t", "effect": "external", "policy": "ask", "fingerprint": "f", "occurrence": 0, "token": str(uuid4()),
        "timeoutSeconds": 1, "leaseSeconds": 1,
    },
}  # fmt: skip


@pytest.fixture
async def twice(store: Store) -> tuple[Held, Held]:
    """The same pod holds the same run for the second time: its first lease and its present one."""
    run = await runs.pending(store)
    pod = await runs.idle_pod(store, reuse=True)
    [grant] = await store.dispatch(GATEWAY, [pod])
    first = Held(run, Fence(grant.epoch, pod))
    assert (await runs.apply(store, runs.wait_for(first, "wait:go#0", runs.on_signal("go")))).state == "Suspended"
    assert await store.pod_idle(pod, GATEWAY)
    assert (await runs.apply(store, runs.signal(run, "go", "1"))).state == "Pending"
    [grant] = await store.dispatch(GATEWAY, [pod])
    return first, Held(run, Fence(grant.epoch, pod))


async def _log(store: Store, run: Held) -> int:
    return (await store.context(run.run)).run.last_seq


@pytest.mark.parametrize("kind", CONTROLS)
async def test_a_control_operation_of_an_old_lease_or_of_a_stranger(store: Store, twice: tuple[Held, Held], kind: str) -> None:
    first, present = twice
    assert first.fence.holder == present.fence.holder
    before = await _log(store, present)
    for fence in (first.fence, Fence(present.fence.epoch, uuid4()), Fence(present.fence.epoch + 1, present.fence.holder)):
        outcome = await runs.apply(store, Control(present.run, kind, dict(CONTROLS[kind]), fence, uuid4(), b"1"))
        assert outcome.code == "lease-lost", fence
    assert await _log(store, present) == before
    assert (await runs.apply(store, Control(present.run, kind, dict(CONTROLS[kind]), present.fence, uuid4(), b"1"))).code == "ok"


async def test_a_step_of_an_old_lease_or_of_a_stranger(store: Store, twice: tuple[Held, Held]) -> None:
    first, present = twice
    strangers = [first, Held(present.run, Fence(present.fence.epoch, uuid4())), Held(present.run, Fence(present.fence.epoch + 1, uuid4()))]
    outcomes = await store.journal([runs.step(held, f"step:{n}#0") for n, held in enumerate([*strangers, present])], wait=True)
    assert [outcome.code for outcome in outcomes] == ["lease-lost", "lease-lost", "lease-lost", "ok"]
    assert [row.key for row in (await store.context(present.run)).journal if row.kind == "step"] == ["step:3#0"]


async def test_an_old_lease_is_not_kept_alive(store: Store, twice: tuple[Held, Held]) -> None:
    first, present = twice
    beats = [(held.run, held.fence.epoch, held.fence.holder) for held in (first, Held(present.run, Fence(present.fence.epoch, uuid4())))]
    assert await store.heartbeat(GATEWAY, [Beat(*beat) for beat in beats], []) == []
    [alive] = await store.heartbeat(GATEWAY, [Beat(present.run, present.fence.epoch, present.fence.holder)], [])
    assert alive.run == present.run
