"""Operations reach the gateway once, in order and untouched, whatever happens to the connection between."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

from tests.integration.sidecar_harness import PATIENCE, RUN, Gateway, Hello, Op, Pod, Store, problem, running

from perdure import protocol
from perdure.protocol import OPERATION_PATHS, LeaseLost, Refusal


async def test_every_operation_passes_by_plain_http_with_its_tag_and_untouched(tmp_path: Path) -> None:
    gateway = Gateway()
    odd = '{ "output" : {"a": [1.50, "\\u00e9", 1e400, 1152921504606846977]},"key":"k" }'
    async with running(tmp_path, gateway) as sidecar:
        assert (await sidecar.get("/v1/run"))[1] == {"runId": RUN, "input": {"a": 1}}
        order = [op for op in OPERATION_PATHS if op not in ("suspend", "finish")] + ["finish"]
        for op in order:
            async with sidecar.agent.post(f"/v1/{OPERATION_PATHS[op]}", data=odd) as response:
                assert response.status == 200, await response.text()
                uuid.UUID(response.headers["Perdure-Request-Id"])
        assert [op.body for op in gateway.store.ops] == [
            b'{"op":"%b","output" : {"a": [1.50, "\\u00e9", 1e400, 1152921504606846977]},"key":"k" }' % op.encode() for op in order
        ]
        assert {(op.run, op.epoch) for op in gateway.store.ops} == {(RUN, 1)}


async def test_the_answer_is_the_gateways_bytes_and_a_refusal_its_problem(tmp_path: Path) -> None:
    gateway = Gateway()
    refusal = problem("concurrent-append", 412, retryable=True)

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and b"refuse" in frame.body:
            await pod.send(Refusal(id=frame.id, problem=refusal))
        elif isinstance(frame, Op):
            await pod.send(protocol.Answer(id=frame.id, body=b'{ "seq": 7, "x": 1.10 }'))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway) as sidecar:
        await gateway.until(lambda: gateway.pods)
        await sidecar.get("/v1/run")
        async with sidecar.agent.post("/v1/events", json={"kind": "a"}) as response:
            assert await response.read() == b'{ "seq": 7, "x": 1.10 }'
        status, body = await sidecar.post("events", {"kind": "refuse"})
        assert (status, body) == (412, json.loads(protocol.encode_json(refusal)))
        async with sidecar.session() as agent:
            assert (await agent.call("event", kind="refuse"))["problem"]["type"] == "urn:perdure:concurrent-append"
            assert (await agent.call("event", kind="a"))["answer"] == {"seq": 7, "x": 1.10}


async def test_a_lost_answer_is_asked_for_again_with_the_same_request_and_in_order(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("first")
        gateway.commit_in_silence()
        answers = [await agent.send("step.end", key=f"s{n}", name="s") for n in range(20)]
        await gateway.until(lambda: len(gateway.store.ops) == 21)
        sent = [op.req for op in gateway.store.ops]
        gateway.react = gateway.behave
        gateway.pod.cut()
        done = await asyncio.wait_for(asyncio.gather(*answers), PATIENCE)
        assert [answer["answer"]["seq"] for answer in done] == list(range(2, 22)), "answered from the first commit"
        assert len(gateway.store.ops) == 21, "committed once"
        resent = gateway.pods[1].of(Op)
        assert [op.req for op in resent] == sent[1:]
        assert (gateway.pods[1].hello.run, gateway.pods[1].hello.epoch) == (RUN, 1)
        assert agent.answers == sorted(agent.answers)


async def test_what_was_not_committed_is_committed_in_order_after_the_reconnect(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("first")
        gateway.swallow()
        answers = [await agent.send("step.end", key=f"{n}", name="s") for n in range(10)]
        await gateway.until(lambda: len(gateway.pod.of(Op)) == 11)
        gateway.react = gateway.behave
        gateway.pod.cut()
        later = await agent.send("step.end", key="10", name="s")
        await asyncio.wait_for(asyncio.gather(*answers, later), PATIENCE)
        assert [body["key"] for body in gateway.store.bodies()] == ["first", *map(str, range(11))]


async def test_operations_wait_until_the_lease_is_delivered_again(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("first")

        async def welcome_only(pod: Pod, frame: protocol.FromPod) -> None:
            if isinstance(frame, Hello):
                await pod.send(protocol.Welcome(pod="pod", pool="pool", heartbeat_seconds=0.05, lease_seconds=60))
            elif isinstance(frame, Op):
                await gateway.behave(pod, frame)

        gateway.react = welcome_only
        gateway.pod.cut()
        answer = await agent.send("step.end", key="second", name="s")
        await gateway.until(lambda: len(gateway.pods) == 2 and len(gateway.pod.of(protocol.Beat)) >= 2)
        assert not gateway.pod.of(Op)
        await gateway.pod.send(gateway.lease)
        assert (await asyncio.wait_for(answer, PATIENCE))["answer"] == {"seq": 2}


async def test_two_gateways_that_flap_lose_and_double_nothing(tmp_path: Path) -> None:
    store = Store()
    gateways = [Gateway(store), Gateway(store)]
    async with running(tmp_path, *gateways) as sidecar, sidecar.session() as agent:
        await agent.step("start")
        answers = []
        for turn in range(6):
            answers += [await agent.send("step.end", key=f"{turn}.{n}", name="s") for n in range(25)]
            for gateway in gateways:
                for pod in gateway.pods:
                    pod.cut()
            answers += [await agent.send("step.end", key=f"{turn}.{n}", name="s") for n in range(25, 30)]
            await asyncio.wait_for(answers[-1], PATIENCE)
        await asyncio.wait_for(asyncio.gather(*answers), PATIENCE)
        assert [body["key"] for body in store.bodies()] == ["start"] + [f"{turn}.{n}" for turn in range(6) for n in range(30)]
        assert all(gateway.pods for gateway in gateways), "both were used"


async def test_a_gateway_that_goes_silent_is_left_for_another(tmp_path: Path) -> None:
    store = Store()
    dead, alive = Gateway(store), Gateway(store)
    dead.lease_seconds = alive.lease_seconds = 1.0
    async with running(tmp_path, dead, alive) as sidecar, sidecar.session() as agent:
        await agent.step("first")
        first, other = (dead, alive) if dead.pods else (alive, dead)
        transport = first.pod.request.transport
        assert transport is not None
        transport.pause_reading()  # type: ignore[attr-defined]  # the connection stays open and nothing is heard from it again
        assert (await agent.step("second"))["answer"] == {"seq": 2}
        assert other.pods


async def test_a_thousand_operations_in_flight(tmp_path: Path) -> None:
    gateway = Gateway()
    held: list[tuple[Pod, Op]] = []

    async def hold(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op):
            held.append((pod, frame))
        else:
            await gateway.behave(pod, frame)

    gateway.react = hold
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await sidecar.get("/v1/run")
        answers = [await agent.send("step.end", key=str(n), name="s") for n in range(1000)]
        await gateway.until(lambda: len(held) == 1000)
        figures = (await sidecar.get("/metrics"))[1].splitlines()
        assert "perdure_sidecar_in_flight 1000" in figures
        resident = next(line for line in figures if line.startswith("process_resident_memory_bytes"))
        assert int(resident.split()[1]) < 40 * 2**20
        for pod, op in held:
            await pod.send(gateway.store.commit(op))
        done = await asyncio.wait_for(asyncio.gather(*answers), PATIENCE)
        assert [answer["answer"]["seq"] for answer in done] == list(range(1, 1001))


async def test_a_request_sent_twice_while_under_way_goes_out_once_and_is_answered_twice(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.swallow()
    req = str(uuid.uuid4())
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        twice = [asyncio.create_task(sidecar.post("events", {"kind": "a"}, req=req)) for _ in range(2)]
        other = asyncio.create_task(sidecar.post("events", {"kind": "b"}))
        await gateway.until(lambda: len({op.req for op in gateway.pod.of(Op)}) == 2)
        gateway.react = gateway.behave
        gateway.pod.cut()
        assert await asyncio.wait_for(twice[0], PATIENCE) == await asyncio.wait_for(twice[1], PATIENCE)
        await other
        assert [body["kind"] for body in gateway.store.bodies()].count("a") == 1
        assert [op.req for op in gateway.pods[1].of(Op)].count(req) == 1


async def test_the_answer_of_a_finish_that_was_committed_before_the_cut_is_still_found(tmp_path: Path) -> None:
    """The gateway says that the lease is lost, which is true: the run has finished. The finish is asked for all the same."""
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        gateway.commit_in_silence()
        finish = asyncio.create_task(sidecar.post("finish", {"outcome": "succeeded"}))
        await gateway.until(lambda: gateway.store.kinds() == ["finish"])
        gateway.react = gateway.behave
        gateway.pod.cut()
        assert await asyncio.wait_for(finish, PATIENCE) == (200, {"state": "Pending"})
        assert await sidecar.exit_code() == 0


async def test_the_token_is_read_anew_at_each_connection(tmp_path: Path) -> None:
    gateway = Gateway()
    token = tmp_path / "token"
    token.write_text("one\n")
    async with running(tmp_path, gateway, PERDURE_TOKEN_FILE=str(token)) as sidecar:
        await gateway.until(lambda: gateway.pods)
        token.write_text("two\n")
        gateway.pod.cut()
        await gateway.until(lambda: len(gateway.pods) == 2)
        assert [pod.request.headers["Authorization"] for pod in gateway.pods] == ["Bearer one", "Bearer two"]
        assert "one" not in json.dumps(sidecar.log) + json.dumps(await sidecar.get("/metrics"))


async def test_a_gateway_that_refuses_is_tried_again(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.refuse_status = 401
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.logged("401")
        gateway.refuse_status = None
        assert (await sidecar.get("/v1/run"))[0] == 200


async def test_a_lease_lost_refusal_is_the_loss_of_the_lease(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("first")
        gateway.store.epoch = 2
        assert (await agent.step("second"))["problem"]["type"] == "urn:perdure:lease-lost"
        assert await agent.pushed() == {"lost": "lease-lost"}
        assert LeaseLost not in {type(frame) for frame in gateway.pod.received}
