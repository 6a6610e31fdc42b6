"""What the sidecar does when the lease ends: by the gateway's word, by the agent's end, by a hang, a pause, a cancel."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sidecar_harness import PATIENCE, RUN, Gateway, Pod, problem, running

from perdure import protocol
from perdure.protocol import Answer, Beat, Hello, Idle, Lease, LeaseLost, Op, Refusal, Retire, Welcome
from perdure.sidecar.supervisor import NEWS_SECONDS


def lease(gateway: Gateway, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(gateway.lease, name, value)


async def finishes(gateway: Gateway) -> dict[str, Any]:
    """The finish that the sidecar sends."""
    await gateway.until(lambda: "finish" in gateway.store.kinds())
    return gateway.store.bodies()[gateway.store.kinds().index("finish")]


# ---------------------------------------------------------------------------------------------------- lost


async def test_a_lost_lease_stops_the_agent_and_takes_receipts_as_evidence_only(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("first")
        gateway.store.epoch = 2
        await gateway.pod.send(LeaseLost(run=RUN, epoch=1, reason="superseded"))
        assert await agent.pushed() == {"lost": "superseded"}
        refused = (await agent.step("second"))["problem"]
        assert (refused["type"], refused["status"]) == ("urn:perdure:lease-lost", 409)
        assert (await sidecar.post("events", {"kind": "x"}))[0] == 409
        receipt = await agent.call("activity.end", key="k", token="t", state="succeeded")
        assert "answer" in receipt
        assert gateway.store.kinds() == ["step.end", "activity.end"]
        assert (gateway.store.ops[-1].run, gateway.store.ops[-1].epoch) == (RUN, 1)
        await agent.socket.close()
        assert await sidecar.exit_code() == 0


async def test_where_a_kubelet_ends_it_a_sidecar_waits_for_that(tmp_path: Path) -> None:
    """One that ended by itself while its agent's container is there would be started again."""
    gateway = Gateway()
    async with running(tmp_path, gateway, PERDURE_AWAIT_SIGTERM="true") as sidecar, sidecar.session() as agent:
        await agent.step("first")
        await gateway.pod.send(Retire(reason="not needed"))
        assert "lost" in await agent.pushed()
        await agent.socket.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sidecar.process.wait(), 1.0)
        sidecar.terminate()
        assert await sidecar.exit_code() == 0


async def test_a_welcome_without_the_lease_is_its_loss(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("first")

        async def welcome_only(pod: Pod, frame: protocol.FromPod) -> None:
            if isinstance(frame, Hello):
                await pod.send(Welcome(pod="pod", pool="pool", heartbeat_seconds=0.1, lease_seconds=0.2))

        gateway.react = welcome_only
        gateway.pod.cut()
        assert "not deliver" in (await agent.pushed())["lost"]
        assert (await agent.step("second"))["problem"]["type"] == "urn:perdure:lease-lost"


async def test_another_lease_is_the_loss_of_the_first(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await gateway.pod.send(Lease(run=RUN, epoch=2, context=b"{}"))
        assert "another lease" in (await agent.pushed())["lost"]


async def test_a_retired_pod_stops_its_agent_and_ends(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await gateway.pod.send(Retire(reason="scale-down"))
            assert await agent.pushed() == {"lost": "the pod retires: scale-down"}
        assert await sidecar.exit_code() == 0


async def test_an_idle_pod_that_retires_tells_who_waits_for_a_run(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.store.held = False
    async with running(tmp_path, gateway) as sidecar:
        waiting = asyncio.create_task(sidecar.get("/v1/run"))
        await gateway.until(lambda: gateway.pods and gateway.pod.of(Beat))
        assert (await sidecar.get("/v1/run?timeout=0.01"))[0] == 204
        status, refused = await sidecar.post("events", {"kind": "x"})
        assert (status, refused["type"], refused["retryable"]) == (409, "urn:perdure:no-run", True)
        await gateway.pod.send(Retire(reason="scale-down"))
        status, refused = await asyncio.wait_for(waiting, PATIENCE)
        assert (status, refused["type"]) == (410, "urn:perdure:retiring")
        assert await sidecar.exit_code() == 0


# ---------------------------------------------------------------------------------------------------- the agent's end


async def test_a_finished_run_ends_the_pod_when_the_agent_has_gone(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            assert (await agent.call("finish", outcome="succeeded"))["answer"] == {"state": "Pending"}
            refused = (await agent.step("late"))["problem"]
            assert refused["type"] == "urn:perdure:run-released"
            assert (await sidecar.get("/v1/run"))[0] == 410
            assert sidecar.process.returncode is None, "it waits for the agent to go"
        assert await sidecar.exit_code() == 0
        assert gateway.store.kinds() == ["finish"], "and reports no disconnect"


@pytest.mark.parametrize("how", ["wait", "suspend"])
async def test_a_suspended_run_ends_the_pod(tmp_path: Path, how: str) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            body: dict[str, Any] = {"waits": ["w"]} if how == "suspend" else {"key": "w", "on": [{"kind": "signal"}], "suspend": True}
            assert (await agent.call(how, **body))["answer"] == {"status": "suspended"}
        assert await sidecar.exit_code() == 0
        assert gateway.store.kinds() == [how]


async def test_an_agent_that_drops_its_session_gives_the_run_back(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await agent.step("first")
            assert agent.socket._response.connection is not None
            agent.socket._response.connection.transport.abort()  # as when the process is killed: no close frame
            finish = await finishes(gateway)
        assert (finish["outcome"], finish["error"]["type"]) == ("retry", "AgentDisconnected")
        assert await sidecar.exit_code() == 0


async def test_an_agent_that_is_back_in_a_moment_keeps_its_run(tmp_path: Path) -> None:
    """The store is not told before it can know that the pod is being deleted."""
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await agent.step("first")
        async with sidecar.session() as agent:
            await agent.step("second")
            await asyncio.sleep(NEWS_SECONDS)
            await agent.step("third")
            assert gateway.store.kinds() == ["step.end"] * 3
        gone = asyncio.get_running_loop().time()
        assert (await finishes(gateway))["outcome"] == "retry"
        assert asyncio.get_running_loop().time() - gone >= NEWS_SECONDS * 0.9
        assert await sidecar.exit_code() == 0


async def test_an_agent_that_drops_with_an_activity_open_leaves_it_unknown(tmp_path: Path) -> None:
    gateway = Gateway()

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and b"activity.begin" in frame.body:
            token = json.loads(frame.body)["tool"]
            gateway.store.commit(frame)
            await pod.send(Answer(id=frame.id, body=json.dumps({"decision": "execute", "key": f"k-{token}", "token": token}).encode()))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await agent.call("activity.begin", tool="done")
            await agent.call("activity.begin", tool="open")
            await agent.call("activity.end", key="k-done", token="done", state="succeeded")
        await finishes(gateway)
        closed = [body for body in gateway.store.bodies() if body["op"] == "activity.end"][1:]
        assert [(body["key"], body["token"], body["state"]) for body in closed] == [("k-open", "open", "unknown")]
        assert gateway.store.kinds()[-2:] == ["activity.end", "finish"]


async def test_the_end_of_the_agent_while_the_gateway_is_away_is_told_when_it_is_back(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await agent.step("first")
            port = int(gateway.url.rpartition(":")[2])
            await gateway.stop()
        await gateway.start(port)
        assert (await finishes(gateway))["outcome"] == "retry"
        assert await sidecar.exit_code() == 0


async def test_a_refusal_that_may_pass_does_not_keep_the_run_from_being_given_back(tmp_path: Path) -> None:
    gateway = Gateway()
    refused: list[str] = []

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and b"finish" in frame.body and len(refused) < 2:
            refused.append(frame.req)
            await pod.send(Refusal(id=frame.id, problem=problem("store-unavailable", 503, retryable=True)))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session():
            pass
        await finishes(gateway)
        assert [op.req for op in gateway.store.ops] == refused[:1]
        assert len(set(refused)) == 1, "the same request id each time"


# ---------------------------------------------------------------------------------------------------- hangs


async def test_an_agent_whose_loop_hangs_is_released_as_stalled(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, stall_timeout_seconds=0.4)
    async with running(tmp_path, gateway) as sidecar, sidecar.session(hang=True) as agent:
        await agent.step("first")
        finish = await finishes(gateway)
        assert (finish["outcome"], finish["error"]["type"]) == ("stalled", "AgentStalled")
        assert await agent.pushed() == {"lost": "stalled"}
        async with asyncio.timeout(PATIENCE):
            await agent.closed.wait()
        assert await sidecar.exit_code() == 0
        ages = [beat.agent for beat in gateway.pod.of(Beat) if beat.agent is not None]
        assert max(ages) > 0.2, "the gateway was told how long the agent was silent"


async def test_an_agent_that_answers_pings_is_never_stalled(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, stall_timeout_seconds=0.4)
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await gateway.until(lambda: len(gateway.pod.of(Beat)) > 12)
        assert agent.pings > 8
        assert not gateway.store.ops
        assert all(beat.agent is not None and beat.agent < 0.4 for beat in gateway.pod.of(Beat)[3:])


async def test_operations_alone_keep_a_hanging_agent_from_being_stalled(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, stall_timeout_seconds=0.4)
    async with running(tmp_path, gateway) as sidecar, sidecar.session(hang=True) as agent:
        for n in range(5):
            beats = len(gateway.pod.of(Beat))
            await gateway.until(lambda beats=beats: len(gateway.pod.of(Beat)) > beats + 1)
            await agent.step(str(n))
        assert set(gateway.store.kinds()) == {"step.end"}


async def test_a_child_that_never_asks_for_its_run_is_stalled(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, stall_timeout_seconds=0.3)
    async with running(tmp_path, gateway, PERDURE_POD_REUSE="ForkPerRun") as sidecar:
        assert (await sidecar.get("/v1/next"))[0] == 200
        assert (await finishes(gateway))["outcome"] == "stalled"


async def test_an_agent_of_plain_requests_is_not_stalled(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, stall_timeout_seconds=0.2)
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        await gateway.until(lambda: len(gateway.pod.of(Beat)) > 6)
        assert not gateway.store.ops
        assert gateway.pod.of(Beat)[-1].agent is None


# ---------------------------------------------------------------------------------------------------- pause and cancel


async def test_a_pause_waits_for_the_next_acknowledgement(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("before")
        await gateway.push(pause=True)
        assert await agent.pushed() == {"push": {"pause": True}}
        beats = len(gateway.pod.of(Beat))
        await gateway.until(lambda: len(gateway.pod.of(Beat)) > beats + 2)
        assert gateway.store.kinds() == ["step.end"]
        assert "answer" in await agent.step("after")
        assert await agent.pushed() == {"lost": "paused"}
        assert gateway.store.kinds() == ["step.end", "step.end", "finish"]
        assert gateway.store.bodies()[-1]["outcome"] == "paused"
        assert await sidecar.exit_code() == 0


async def test_a_pause_is_obeyed_at_once_when_only_a_wait_is_open(tmp_path: Path) -> None:
    gateway = Gateway()

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and b'"wait"' in frame.body:
            gateway.store.commit(frame)
            await pod.send(Answer(id=frame.id, body=b'{"status":"open"}'))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.call("wait", key="w", on=[{"kind": "signal", "name": "go"}])
        await gateway.push(pause=True)
        assert await agent.pushed() == {"push": {"pause": True}}
        assert await agent.pushed() == {"lost": "paused"}


async def test_a_pause_spares_an_open_activity_until_the_grace_is_over(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, grace_seconds=1.0)

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and b"activity.begin" in frame.body:
            gateway.store.commit(frame)
            await pod.send(Answer(id=frame.id, body=b'{"decision":"execute","key":"k","token":"t"}'))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.call("activity.begin", tool="mail")
        await gateway.push(pause=True)
        await agent.step("beside")
        assert "finish" not in gateway.store.kinds()
        await agent.call("activity.end", key="k", token="t", state="succeeded")
        await finishes(gateway)
        assert gateway.store.kinds() == ["activity.begin", "step.end", "activity.end", "finish"]


async def test_a_pause_is_enforced_after_the_grace(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, grace_seconds=0.2)
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await gateway.push(pause=True)
        assert (await finishes(gateway))["outcome"] == "paused"
        assert await agent.pushed() == {"push": {"pause": True}}
        assert await agent.pushed() == {"lost": "paused"}


async def test_a_refused_pause_lets_the_agent_go_on(tmp_path: Path) -> None:
    gateway = Gateway()

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and b'"paused"' in frame.body:
            await pod.send(Refusal(id=frame.id, problem=problem("not-paused")))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await gateway.push(pause=True)
        await agent.step("first")
        await gateway.until(lambda: any(b'"paused"' in op.body for op in gateway.pod.of(Op)))
        async with asyncio.timeout(PATIENCE):
            while "answer" not in await agent.step("second"):
                pass
        assert agent.pushes.qsize() == 1, "told of the pause, not of a loss"


async def test_a_cancel_is_the_agents_to_obey_within_the_grace(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await gateway.push(cancel=True)
            assert await agent.pushed() == {"push": {"cancel": True}}
            assert "answer" in await agent.step("tidy up")
            await agent.call("finish", outcome="cancelled")
        assert await sidecar.exit_code() == 0
        assert gateway.store.kinds() == ["step.end", "finish"]


async def test_a_cancel_that_is_not_obeyed_is_enforced_after_the_grace(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, grace_seconds=0.2)
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await gateway.push(cancel=True)
        assert (await finishes(gateway))["outcome"] == "cancelled"
        assert await agent.pushed() == {"push": {"cancel": True}}
        assert await agent.pushed() == {"lost": "cancelled"}
        async with asyncio.timeout(PATIENCE):
            await agent.closed.wait()
        assert await sidecar.exit_code() == 0


async def test_an_agent_that_connects_late_is_told_of_the_cancel(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        async with sidecar.agent.get("/v1/stream") as early:
            await gateway.push(cancel=True, signals=["go"])
            assert [await event(early), await event(early)] == [("cancel", {"cancel": True}), ("signal", {"signals": ["go"]})]
            async with sidecar.session() as agent, sidecar.agent.get("/v1/stream") as late:
                assert await agent.pushed() == {"push": {"cancel": True}}
                assert await event(late) == ("cancel", {"cancel": True})


async def event(response: Any) -> tuple[str, Any]:
    async with asyncio.timeout(PATIENCE):
        name = ""
        while True:
            line = (await response.content.readline()).decode().strip()
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                return name, json.loads(line[6:])


async def test_the_stream_tells_outcomes_and_the_loss_as_the_gateway_gave_them(tmp_path: Path) -> None:
    gateway = Gateway()
    outcome = {"w": {"status": "satisfied", "fired": [{"index": 0, "kind": "signal", "payload": {"text": "line\nbreak"}}]}}
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        async with sidecar.agent.get("/v1/stream") as stream:
            await gateway.push(outcomes=outcome)
            assert await event(stream) == ("wait", {"outcomes": outcome})
            await gateway.pod.send(LeaseLost(run=RUN, epoch=1, reason="superseded"))
            assert await event(stream) == ("lost", {"reason": "superseded"})


async def test_a_stream_that_is_open_counts_as_life(tmp_path: Path) -> None:
    gateway = Gateway()
    lease(gateway, stall_timeout_seconds=0.2)
    async with running(tmp_path, gateway) as sidecar, sidecar.agent.get("/v1/stream"):
        await gateway.until(lambda: gateway.pods and len(gateway.pod.of(Beat)) > 6)
        assert gateway.pod.of(Beat)[-1].agent == 0.0
        assert not gateway.store.ops


# ---------------------------------------------------------------------------------------------------- SIGTERM


async def test_sigterm_lets_a_run_come_to_its_end(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            sidecar.terminate()
            async with asyncio.timeout(PATIENCE):
                while (await sidecar.get("/healthz"))[1]["state"] != "retiring":
                    pass
            assert "answer" in await agent.step("still served")
            await agent.call("finish", outcome="succeeded")
        assert await sidecar.exit_code() == 0


async def test_sigterm_ends_an_idle_pod_at_once(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.store.held = False
    async with running(tmp_path, gateway) as sidecar:
        await gateway.until(lambda: gateway.pods)
        sidecar.terminate()
        assert await sidecar.exit_code() == 0


async def test_after_sigterm_a_lease_is_not_taken(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.store.held = False
    async with running(tmp_path, gateway) as sidecar:
        waiting = asyncio.create_task(sidecar.get("/v1/run"))
        await gateway.until(lambda: gateway.pods and gateway.pod.of(Beat))
        sidecar.terminate()
        assert (await asyncio.wait_for(waiting, PATIENCE))[0] == 410


async def test_an_agent_that_dies_with_its_pod_is_reported_before_the_sidecar_goes(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        async with sidecar.session() as agent:
            await agent.step("first")
            sidecar.terminate()
        assert (await finishes(gateway))["outcome"] == "retry"
        assert await sidecar.exit_code() == 0


# ---------------------------------------------------------------------------------------------------- large runs


def gives_by_wish(gateway: Gateway) -> None:
    """Marks in the context only for pods whose agent fetches."""

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Hello | Idle):
            gateway.lease.fetch = frame.fetch
            gateway.lease.context = b'{"runId":"%b","marks":%b}' % (RUN.encode(), b"true" if frame.fetch else b"false")
        await gateway.behave(pod, frame)

    gateway.react = react


async def test_the_gateway_hears_whether_the_agent_fetches(tmp_path: Path) -> None:
    gateway = Gateway()
    gives_by_wish(gateway)
    async with running(tmp_path, gateway) as sidecar:
        assert (await sidecar.get("/v1/run?fetch=true"))[1]["marks"] is True
        gateway.pod.cut()
        await gateway.until(lambda: len(gateway.pods) == 2)
        assert gateway.pod.hello.fetch
        assert (await sidecar.get("/v1/run?fetch=true"))[1]["marks"] is True
        assert len(gateway.pods) == 2


async def test_an_agent_that_does_not_fetch_gets_its_run_whole(tmp_path: Path) -> None:
    """Though it was delivered for one that does: as when the image of a pool has two SDKs."""
    gateway = Gateway()
    gives_by_wish(gateway)
    async with running(tmp_path, gateway) as sidecar:
        assert (await sidecar.get("/v1/run?fetch=true"))[1]["marks"] is True
        assert (await sidecar.get("/v1/run"))[1]["marks"] is False
        assert (len(gateway.pods), gateway.pod.hello.fetch) == (2, False)
        assert (await sidecar.post("events", {"kind": "x"}))[0] == 200


async def test_a_session_says_that_its_agent_fetches(tmp_path: Path) -> None:
    """It may come before the agent asks for its run."""
    gateway = Gateway()
    gives_by_wish(gateway)
    async with running(tmp_path, gateway) as sidecar, sidecar.agent.ws_connect("/v1/session?fetch=true"):
        asked = await gateway.until(lambda: [frame for pod in gateway.pods for frame in pod.received if getattr(frame, "ready", True)])
        assert asked[0].fetch


async def test_what_is_fetched_passes_through(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session():
        assert (await sidecar.post("fetch", {"keys": ["step:s#0"]}))[0] == 200
        assert gateway.store.bodies() == [{"op": "fetch", "keys": ["step:s#0"]}]
