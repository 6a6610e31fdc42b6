"""Pods that are reused by a fork per run: a secret a run, a parent that takes runs and tells of ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sidecar_harness import PATIENCE, RUN, Gateway, Pod, Sidecar, running

from perdure import protocol
from perdure.protocol import Beat, Idle, Lease, LeaseLost, Op, Retire

FORK = {"PERDURE_POD_REUSE": "ForkPerRun"}


def grants_again(gateway: Gateway) -> None:
    """A gateway that gives the pod the next epoch of the run as soon as it is idle."""

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Idle) and not gateway.store.held:
            gateway.store.epoch += 1
            gateway.store.held = True
            gateway.lease.epoch = gateway.store.epoch
            await pod.send(gateway.lease)
        else:
            await gateway.behave(pod, frame)

    gateway.react = react


async def take(sidecar: Sidecar) -> str:
    status, answer = await asyncio.wait_for(sidecar.get("/v1/next"), PATIENCE)
    assert status == 200, answer
    secret: str = answer["secret"]
    return secret


async def take_first(sidecar: Sidecar, gateway: Gateway) -> str:
    """The first run of the pod. Whether its parent asks before the sidecar is connected is chance, and so is an Idle before the lease."""
    secret = await take(sidecar)
    gateway.pod.received[1:] = []
    return secret


async def idle(sidecar: Sidecar, *, clean: bool = True, exit_code: int | None = 0) -> tuple[int, Any]:
    return await asyncio.wait_for(sidecar.post("idle", {"clean": clean, "exitCode": exit_code}), PATIENCE)


async def test_runs_one_after_the_other_each_with_a_secret_of_its_own(tmp_path: Path) -> None:
    gateway = Gateway()
    grants_again(gateway)
    async with running(tmp_path, gateway, **FORK) as sidecar:
        first = await take_first(sidecar, gateway)
        assert gateway.pod.hello.reuse
        async with sidecar.session(secret=first) as agent:
            await agent.step("one")
            await agent.call("finish", outcome="succeeded")
        assert not gateway.pod.of(Idle), "not before the parent has said so"
        assert await idle(sidecar) == (200, {"retiring": False})
        second = await take(sidecar)
        assert second != first
        assert (await sidecar.get("/v1/run", secret=second))[1]["runId"] == RUN
        status, refused = await sidecar.post("events", {"kind": "x"}, secret=first)
        assert (status, refused["type"]) == (401, "urn:perdure:unauthorized")
        assert (await sidecar.post("events", {"kind": "x"}, secret=second))[0] == 200
        assert [op.epoch for op in gateway.store.ops] == [1, 1, 2]
        assert sidecar.process.returncode is None


@pytest.mark.parametrize("secret", [None, "wrong", ""])
async def test_without_the_runs_secret_nothing_is_served(tmp_path: Path, secret: str | None) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        await take(sidecar)
        assert (await sidecar.get("/v1/run", secret=secret))[0] == 401
        assert (await sidecar.get("/v1/stream", secret=secret))[0] == 401
        assert (await sidecar.get("/v1/session", secret=secret))[0] == 401
        assert (await sidecar.post("activities/end", {"key": "k", "token": "t", "state": "succeeded"}, secret=secret))[0] == 401
        assert not gateway.store.ops
        assert (await sidecar.get("/healthz"))[0] == 200


async def test_a_session_of_an_earlier_run_can_do_nothing_to_the_next(tmp_path: Path) -> None:
    gateway = Gateway()
    grants_again(gateway)
    async with running(tmp_path, gateway, **FORK) as sidecar:
        first = await take_first(sidecar, gateway)
        async with sidecar.session(secret=first) as old:
            await old.call("finish", outcome="succeeded")
            await idle(sidecar)
            second = await take(sidecar)
            async with asyncio.timeout(PATIENCE):
                await old.closed.wait()
        async with sidecar.session(secret=second) as agent:
            await agent.step("one")
        await gateway.until(lambda: gateway.store.kinds() == ["finish", "step.end", "finish"])
        assert gateway.store.ops[-1].epoch == 2


async def test_a_child_that_died_with_its_run_open_gives_it_back_before_the_pod_is_idle(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.swallow()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        secret = await take_first(sidecar, gateway)
        await sidecar.get("/v1/run", secret=secret)
        told = asyncio.create_task(idle(sidecar, exit_code=139))
        await gateway.until(lambda: gateway.pod.of(Op))
        beats = len(gateway.pod.of(Beat))
        await gateway.until(lambda: len(gateway.pod.of(Beat)) > beats + 1)
        assert not gateway.pod.of(Idle), "the run is not given back before the gateway says so"
        (finish,) = gateway.pod.of(Op)
        await gateway.pod.send(gateway.store.commit(finish))
        assert await told == (200, {"retiring": False})
        await gateway.until(lambda: gateway.pod.of(Idle))
        (body,) = gateway.store.bodies()
        assert (body["outcome"], body["error"]["type"]) == ("retry", "AgentDisconnected")
        assert "139" in body["error"]["message"]


async def test_a_parent_that_asks_for_the_next_run_has_no_child(tmp_path: Path) -> None:
    """It was restarted: the run that it had taken is given back."""
    gateway = Gateway()
    grants_again(gateway)
    async with running(tmp_path, gateway, **FORK) as sidecar:
        first = await take_first(sidecar, gateway)
        second = await take(sidecar)
        assert first != second
        assert gateway.store.kinds() == ["finish"]


async def test_an_unclean_end_retires_the_pod(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        secret = await take_first(sidecar, gateway)
        await sidecar.post("finish", {"outcome": "succeeded"}, secret=secret)
        assert await idle(sidecar, clean=False) == (200, {"retiring": True})
        status, refused = await sidecar.get("/v1/next")
        assert (status, refused["type"]) == (410, "urn:perdure:retiring")
        assert await sidecar.exit_code() == 0
        assert not gateway.pod.of(Idle)


async def test_an_unclean_end_without_a_run_retires_the_pod_too(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.store.held = False
    async with running(tmp_path, gateway, **FORK) as sidecar:
        assert await idle(sidecar, clean=False) == (200, {"retiring": True})
        assert await sidecar.exit_code() == 0


async def test_a_retired_pod_still_answers_the_parent_when_the_child_has_gone(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        secret = await take_first(sidecar, gateway)
        async with sidecar.session(secret=secret) as agent:
            await gateway.pod.send(Retire(reason="scale-down"))
            assert "retires" in (await agent.pushed())["lost"]
        assert await idle(sidecar, exit_code=75) == (200, {"retiring": True})
        assert (await sidecar.get("/v1/next"))[0] == 410
        assert await sidecar.exit_code() == 0


async def test_a_lost_run_ends_the_child_and_not_the_pod(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        secret = await take_first(sidecar, gateway)
        async with sidecar.session(secret=secret) as agent:
            await gateway.pod.send(LeaseLost(run=RUN, epoch=1, reason="superseded"))
            assert await agent.pushed() == {"lost": "superseded"}
        await idle(sidecar, exit_code=75)
        await gateway.until(lambda: gateway.pod.of(Idle))
        await gateway.pod.send(Lease(run=RUN, epoch=2, context=b"{}"))
        await take(sidecar)
        assert not gateway.store.ops, "nothing to give back"


async def test_a_child_that_does_not_end_after_its_run_retires_the_pod(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.lease.grace_seconds = 0.2
    async with running(tmp_path, gateway, **FORK) as sidecar:
        secret = await take_first(sidecar, gateway)
        await sidecar.post("finish", {"outcome": "succeeded"}, secret=secret)
        assert await sidecar.exit_code() == 0


async def test_a_pod_that_is_idle_is_ready_when_it_connects_again(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        secret = await take_first(sidecar, gateway)
        await sidecar.post("finish", {"outcome": "succeeded"}, secret=secret)
        gateway.pod.cut()
        await gateway.until(lambda: len(gateway.pods) == 2)
        assert gateway.pod.hello.run == RUN, "not idle yet: it could be given a run"
        await idle(sidecar)
        await gateway.until(lambda: gateway.pod.of(Idle))
        gateway.pod.cut()
        await gateway.until(lambda: len(gateway.pods) == 3)
        assert gateway.pod.hello.run is None
        assert gateway.pod.hello.ready


async def test_a_pod_takes_no_run_before_its_agent_asks_for_one(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        await gateway.until(lambda: gateway.pods and gateway.pod.of(Beat))
        assert not gateway.pod.hello.ready
        assert not gateway.pod.of(Idle)
        await take(sidecar)
        assert len(gateway.pod.of(Idle)) == 1


async def test_the_parents_paths_are_the_parents(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK, PERDURE_PARENT="parental", PERDURE_PORT="0") as sidecar:
        status, refused = await sidecar.get("/v1/next")
        assert (status, refused["type"]) == (403, "urn:perdure:parent-only")
        assert (await sidecar.post("idle", {"clean": True}))[0] == 403
        async with sidecar.agent.get(f"http://127.0.0.1:{sidecar.port}/healthz") as over_unix:
            assert over_unix.status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.port)
        writer.write(b"GET /v1/next HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer parental\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 403")
        writer.close()
        assert (await sidecar.get("/v1/next", secret="parental"))[0] == 200


async def test_a_single_use_pod_has_no_parents_paths(tmp_path: Path) -> None:
    async with running(tmp_path, Gateway()) as sidecar:
        assert (await sidecar.get("/v1/next"))[0] == 404
        assert (await sidecar.post("idle", {"clean": True}))[0] == 404
