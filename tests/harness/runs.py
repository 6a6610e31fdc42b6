"""Runs on the bare store, without a gateway: for races that need the exact order of two commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from tests.harness.cluster import POOL

from perdure_operator.domain.ids import uuid7
from perdure_operator.store.operations import Control, Fence, JournalStep, Outcome
from perdure_operator.store.store import NewRun, Store

GATEWAY = "test"
DEFAULTS: dict[str, Any] = {
    "namespace": "default",
    "pool": "default/p",
    "priority": 0,
    "max_retries": 3,
    "backoff_seconds": 0,
    "max_backoff_seconds": 120,
    "max_losses": 10,
    "max_tool_retries": 5,
    "grace_seconds": 1,
    "spec": {},
}


@dataclass(frozen=True)
class Held:
    """A run on a pod."""

    run: UUID
    fence: Fence

    @property
    def lease(self) -> dict[str, Any]:
        """The lease as the body of ``expire`` names it."""
        return {"leaseEpoch": self.fence.epoch, "reason": "test"}


def columns(**fields: Any) -> dict[str, Any]:
    run = uuid7()
    return {**DEFAULTS, "run_id": run, "name": f"run-{run}", **fields}


async def pending(store: Store, **fields: Any) -> UUID:
    """A new run."""
    new = NewRun(columns(**fields), b"null")
    [created] = await store.create_runs([new])
    assert created.code == "ok"
    return new.run_id


async def idle_pod(store: Store, *, gateway: str = GATEWAY, reuse: bool = False) -> UUID:
    await store.upsert_pool("default", "p", POOL, None)
    pod = uuid4()
    status = await store.pod_hello(pod, "default/p", gateway, reuse=reuse, run=None, epoch=None)
    assert status.status == "idle"
    return pod


async def lease_next(store: Store) -> Held:
    """A new pod takes what the dispatcher gives it."""
    pod = await idle_pod(store)
    [grant] = await store.dispatch(GATEWAY, [pod])
    return Held(grant.run, Fence(grant.epoch, pod))


async def running(store: Store, **fields: Any) -> Held:
    """A new run that a pod holds; nothing else may be queued."""
    run = await pending(store, **fields)
    held = await lease_next(store)
    assert held.run == run
    return held


async def apply(store: Store, operation: Control, *, wait: bool = True) -> Outcome:
    [outcome] = await store.control([operation], wait=wait)
    return outcome


def step(held: Held, key: str, output: bytes = b"1", request: UUID | None = None) -> JournalStep:
    return JournalStep(held.run, held.fence, request or uuid4(), key, "s", "succeeded", output)


def work(held: Held, operation: str, /, **body: Any) -> Control:
    """A worker's operation."""
    return Control(held.run, operation, body, held.fence, uuid4(), payload=body.pop("payload", None))


def wait_for(held: Held, key: str, *on: dict[str, Any], mode: str = "any", suspend: bool = True, timeout: float | None = None) -> Control:
    return work(held, "wait", key=key, name="", mode=mode, on=list(on), suspend=suspend, timeoutSeconds=timeout)


def signal(run: UUID, name: str, id: str, payload: bytes = b"null") -> Control:
    return Control(run, "signal", {"name": name, "id": id}, payload=payload, request=uuid4())


def settle(run: UUID) -> Control:
    return Control(run, "settle", {})


def verb(run: UUID, name: str) -> Control:
    return Control(run, name, {"by": "tester"}, request=uuid4())


def on_signal(name: str) -> dict[str, Any]:
    return {"kind": "signal", "name": name}


def on_child(run: UUID) -> dict[str, Any]:
    return {"kind": "child_done", "name": str(run)}


def spawn(held: Held, key: str, policy: str = "cancel", **fields: Any) -> tuple[Control, UUID]:
    """The operation, and the id that the child will have."""
    child = columns(parent_policy=policy, **fields)
    return work(held, "spawn", key=key, fingerprint=None, run=child, payload=b"null"), child["run_id"]
