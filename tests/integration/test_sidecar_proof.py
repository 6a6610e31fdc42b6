"""What a pod says of processes that have ended: proof for what a run left unknown, so never more than is certain (E5)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.integration.sidecar_harness import RUN, Gateway, Op, Pod, running
from tests.integration.test_sidecar_fork import FORK, idle, take, take_first

from perdure import protocol
from perdure.protocol import Answer, Idle


def grants_calls(gateway: Gateway) -> None:
    """Answers activity.begin as a gateway does."""

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and b'"activity.begin"' in frame.body:
            gateway.store.commit(frame)
            await pod.send(Answer(id=frame.id, body=b'{"decision":"execute","key":"k","token":"t"}'))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react


async def test_a_run_whose_processes_were_all_ended_is_named(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        await take_first(sidecar, gateway)
        await idle(sidecar, exit_code=137)
        await gateway.until(lambda: gateway.pod.of(Idle))
        [said] = gateway.pod.of(Idle)
        assert (said.run, said.epoch) == (RUN, 1)
        gateway.pod.cut()
        await gateway.until(lambda: len(gateway.pods) == 2)
        hello = gateway.pod.hello
        assert (hello.run, hello.ended_run, hello.ended_epoch) == (None, RUN, 1), "again: the first time may not have been heard"


async def test_a_parent_that_only_asks_for_the_next_run_proves_nothing(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, **FORK) as sidecar:
        await take_first(sidecar, gateway)
        asked = asyncio.create_task(take(sidecar))
        await gateway.until(lambda: gateway.pod.of(Idle))
        [said] = gateway.pod.of(Idle)
        assert (said.run, said.epoch) == (None, None)
        asked.cancel()


@pytest.mark.parametrize("clean", [True, False])
async def test_a_call_is_over_when_all_of_its_run_is(tmp_path: Path, clean: bool) -> None:
    gateway = Gateway()
    grants_calls(gateway)
    async with running(tmp_path, gateway, **FORK) as sidecar:
        secret = await take_first(sidecar, gateway)
        await sidecar.post("activities/begin", {"tool": "pay"}, secret=secret)
        await idle(sidecar, clean=clean, exit_code=137)
        assert _still_running(gateway) == (not clean)


async def test_a_call_of_an_agent_that_has_only_gone_silent_may_go_on(tmp_path: Path) -> None:
    gateway = Gateway()
    grants_calls(gateway)
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await agent.call("activity.begin", tool="pay")
        await gateway.until(lambda: "finish" in gateway.store.kinds())
        assert _still_running(gateway)


def _still_running(gateway: Gateway) -> bool:
    [end] = [body for body in gateway.store.bodies() if body.get("op") == "activity.end"]
    return bool(end.get("stillRunning", False))
