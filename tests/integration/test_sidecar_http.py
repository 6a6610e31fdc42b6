"""The loopback interface itself: listeners, limits, errors, and that any HTTP client can do everything."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.integration.sidecar_harness import PATIENCE, Gateway, Op, Pod, Sidecar, running

from perdure import protocol
from perdure.protocol import MAX_PAYLOAD_BYTES, OPERATION_PATHS

LIMIT = 2 * MAX_PAYLOAD_BYTES + 65_536


async def raw(sidecar: Sidecar, data: bytes) -> tuple[bytes, bytes]:
    """Sends bytes on a connection of its own; the head and the body of what comes back until the server closes."""
    reader, writer = await asyncio.open_unix_connection(str(sidecar.socket))
    writer.write(data)
    async with asyncio.timeout(PATIENCE):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_shell_script_can_run_an_agent_with_curl_alone(tmp_path: Path) -> None:
    gateway = Gateway()
    script = """
        set -e
        call() { curl --silent --show-error --fail-with-body --unix-socket "$SOCKET" "http://localhost/v1/$@"; }
        call run?timeout=10
        call steps/begin --json '{"name":"fetch"}'
        call steps/end --json '{"key":"step:fetch#0","name":"fetch","output":[1,2]}'
        call finish --json '{"outcome":"succeeded","output":{"ok":true}}'
    """
    async with running(tmp_path, gateway) as sidecar:
        shell = await asyncio.create_subprocess_exec("bash", "-c", script, env={"SOCKET": str(sidecar.socket), "PATH": "/usr/bin:/bin"})
        assert await asyncio.wait_for(shell.wait(), PATIENCE) == 0
        assert gateway.store.kinds() == ["step.begin", "step.end", "finish"]
        assert await sidecar.exit_code() == 0


async def test_tcp_and_unix_serve_the_same(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway, PERDURE_PORT="0") as sidecar:
        reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.port)
        body = b'{"kind":"over tcp"}'
        await sidecar.get("/v1/run")
        writer.write(b"POST /v1/events HTTP/1.1\r\nHost: localhost:%d\r\nContent-Length: %d\r\n\r\n%b" % (sidecar.port, len(body), body))
        assert (await asyncio.wait_for(reader.readline(), PATIENCE)) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await sidecar.post("events", {"kind": "over unix"})
        assert [body["kind"] for body in gateway.store.bodies()] == ["over tcp", "over unix"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: evil.example", 421),
        ("Host: localhost\r\nOrigin: https://evil.example", 403),
        ("Host: 127.0.0.1:1", 200),
        ("Host: [::1]:80", 200),
    ],
)
async def test_a_web_page_gets_nothing(tmp_path: Path, headers: str, status: int) -> None:
    async with running(tmp_path, Gateway(), PERDURE_PORT="0") as sidecar:
        reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.port)
        writer.write(f"GET /healthz HTTP/1.1\r\n{headers}\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.readline(), PATIENCE)).split()[1] == str(status).encode()
        writer.close()


async def test_a_body_that_is_too_large_is_refused_with_the_limit(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        largest = b'{"output":"%b"}' % (b"a" * (LIMIT - 13))
        async with sidecar.agent.post("/v1/steps/end", data=largest) as response:
            assert response.status == 200
        assert len(gateway.store.ops[0].body) == LIMIT + len(b'"op":"step.end",')

        async def stream() -> Any:
            for _ in range(LIMIT // 65_536 + 1):
                yield b" " * 65_536

        for body in (largest + b" ", stream()):
            async with sidecar.agent.post("/v1/steps/end", data=body) as response:
                refused = json.loads(await response.read())
                assert (response.status, refused["type"]) == (413, "urn:perdure:payload-too-large")
                assert str(LIMIT) in refused["detail"]
        head, body = await raw(sidecar, b"POST /v1/events HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413"), "before the client has sent any of it"
        assert str(LIMIT).encode() in body
        assert (await sidecar.post("events", {"kind": "x"}))[0] == 200
        assert len(gateway.store.ops) == 2


async def test_json_that_is_too_deep_is_refused_like_any_that_is_wrong(tmp_path: Path) -> None:
    deep = b"[" * 10_000 + b"]" * 10_000
    async with running(tmp_path, Gateway()) as sidecar:
        await sidecar.get("/v1/run")
        body = b'{"token":"t","key":"k","response":%b}' % deep
        async with sidecar.agent.post("/v1/activities/end", data=body) as response:
            assert (response.status, response.content_type) == (400, "application/problem+json")
        async with sidecar.agent.ws_connect("/v1/session") as session:
            await session.send_str('{"id":1,"body":{"x":%s,"op":"step.end"}}' % deep.decode())  # noqa: UP031
            message = await session.receive(PATIENCE)
            refused = message.data if message.type is aiohttp.WSMsgType.TEXT else session.close_code
            assert refused == 1003 or "bad-request" in refused
        assert (await sidecar.get("/healthz"))[0] == 200


async def test_a_message_that_is_too_large_is_refused_and_the_session_lives_on(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        for size in (LIMIT + 1, 40_000_000):
            refused = (await agent.call("step.end", key="k", name="n", output="a" * size))["problem"]
            assert (refused["type"], refused["status"]) == ("urn:perdure:payload-too-large", 413)
            assert str(LIMIT) in refused["detail"]
        assert (await agent.step("after"))["answer"] == {"seq": 1}
        assert sidecar.most_memory() < 80 * 2**20, "it was not buffered"


async def test_a_large_lease_arrives_whole(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.lease.context = json.dumps({"journal": ["x" * 1000] * 20_000}).encode()
    async with running(tmp_path, gateway) as sidecar, sidecar.agent.get("/v1/run") as response:
        assert await response.read() == gateway.lease.context


async def test_the_agent_is_not_read_from_while_the_gateway_takes_nothing(tmp_path: Path) -> None:
    gateway = Gateway()
    taken: list[tuple[Pod, Op]] = []

    async def keep(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op):
            taken.append((pod, frame))
        else:
            await gateway.behave(pod, frame)

    gateway.react = keep
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        blob = "a" * 1_000_000
        sent = 0

        async def flood() -> None:
            nonlocal sent
            for n in range(45):
                answers.append(await agent.send("step.end", key=str(n), name="s", output=blob))
                sent += 1

        answers: list[asyncio.Future[dict[str, Any]]] = []
        flooding = asyncio.create_task(flood())
        await gateway.until(lambda: len(taken) >= 16)
        done, _ = await asyncio.wait([flooding], timeout=0.5)
        assert not done, "the sender is held up"
        assert sent < 40
        figures = dict(
            line.split() for line in (await sidecar.get("/metrics"))[1].splitlines() if not line.startswith("#") and "{" not in line
        )
        assert float(figures["perdure_sidecar_in_flight_bytes"]) < 20_000_000
        gateway.react = gateway.behave
        for pod, op in taken:
            await pod.send(gateway.store.commit(op))
        await asyncio.wait_for(flooding, PATIENCE)
        await asyncio.wait_for(asyncio.gather(*answers), PATIENCE)
        assert [body["key"] for body in gateway.store.bodies()] == [str(n) for n in range(45)]


async def test_plain_requests_wait_for_room_too(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.swallow()
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        posts = [asyncio.create_task(sidecar.post("events", {"kind": str(n), "data": "a" * 1_000_000})) for n in range(24)]
        await gateway.until(lambda: len(gateway.pod.of(Op)) >= 16)
        gateway.react = gateway.behave
        gateway.pod.cut()
        assert {status for status, _ in await asyncio.wait_for(asyncio.gather(*posts), PATIENCE)} == {200}
        assert len(gateway.store.ops) == 24


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"POST /v1/events HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n[]", 400, "bad-request"),
        (b"POST /v1/events HTTP/1.1\r\nHost: a\r\nPerdure-Request-Id: 7\r\nContent-Length: 2\r\n\r\n{}", 400, "bad-request"),
        (b'POST /v1/activities/end HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n{"a":}}', 400, "bad-request"),
        (b"GET /v1/run?timeout=soon HTTP/1.1\r\nHost: a\r\n\r\n", 400, "bad-request"),
        (b"GET /v1/run?timeout=nan HTTP/1.1\r\nHost: a\r\n\r\n", 400, "bad-request"),
        (b"GET /v1/session HTTP/1.1\r\nHost: a\r\n\r\n", 400, "bad-request"),
        (b"GET /v1/nothing HTTP/1.1\r\nHost: a\r\n\r\n", 404, "not-found"),
        (b"GET /v1/events HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method-not-allowed"),
        (b"POST /v1/run HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 405, "method-not-allowed"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", 431, "headers-too-large"),
        (b"POST /v1/events HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400, "bad-request"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "bad-request"),
    ],
)
async def test_what_is_wrong_is_told_as_a_problem(tmp_path: Path, request_bytes: bytes, status: int, code: str) -> None:
    async with running(tmp_path, Gateway()) as sidecar:
        await sidecar.get("/v1/run")
        close = request_bytes.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\nConnection: close\r\n", 1)
        head, body = await raw(sidecar, close)
        assert head.split()[1] == str(status).encode()
        assert b"Content-Type: application/problem+json" in head
        told = json.loads(body)
        assert (told["type"], told["status"]) == (f"urn:perdure:{code}", status)
        assert told["detail"]
        assert told["action"]


async def test_requests_on_one_connection_are_answered_in_order(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        reader, writer = await asyncio.open_unix_connection(str(sidecar.socket))

        async def answer() -> int:
            async with asyncio.timeout(PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"Content-Length"))
                seq: int = json.loads(await reader.readexactly(length))["seq"]
                return seq

        sent = 0
        for together in (1, 30, 1, 9):  # more than are read ahead, and again on the same connection
            bodies = [b'{"kind":"%d"}' % n for n in range(sent, sent + together)]
            writer.write(
                b"".join(b"POST /v1/events HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
            )
            assert [await answer() for _ in bodies] == list(range(sent + 1, sent + together + 1))
            sent += together
        assert [body["kind"] for body in gateway.store.bodies()] == [str(n) for n in range(sent)]
        writer.close()


async def test_a_client_that_leaves_does_not_undo_its_operation(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.swallow()
    async with running(tmp_path, gateway) as sidecar:
        await sidecar.get("/v1/run")
        post = asyncio.create_task(sidecar.post("events", {"kind": "left"}))
        await gateway.until(lambda: gateway.pod.of(Op))
        post.cancel()
        await asyncio.wait([post])
        gateway.react = gateway.behave
        gateway.pod.cut()
        await gateway.until(lambda: gateway.store.ops)
        assert (await sidecar.get("/healthz"))[1]["state"] == "live"


async def test_the_document_names_every_path_and_every_problem(tmp_path: Path) -> None:
    async with running(tmp_path, Gateway()) as sidecar:
        document = (await sidecar.get("/openapi.json"))[1]
        assert {f"/v1/{path}" for path in OPERATION_PATHS.values()} < set(document["paths"])
        for path, methods in document["paths"].items():
            for method in methods:
                async with sidecar.agent.request(method, path, params={"timeout": "0"}) as response:
                    known = {"/v1/next", "/v1/idle"}  # only where pods are reused
                    assert path in known or response.status not in (404, 405), f"{method} {path}"


async def test_the_figures_count_what_happened(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as sidecar, sidecar.session() as agent:
        await agent.step("one")
        await agent.call("made.up")
        gateway.pod.cut()
        await gateway.until(lambda: len(gateway.pods) == 2)
        await agent.step("two")
        figures = (await sidecar.get("/metrics"))[1].splitlines()
        assert 'perdure_sidecar_operations_total{op="step.end",result="answered"} 2' in figures
        assert 'perdure_sidecar_operations_total{op="other",result="answered"} 1' in figures
        assert "perdure_sidecar_operation_seconds_count 3" in figures
        assert "perdure_sidecar_gateway_connects_total 2" in figures
        assert "perdure_sidecar_gateway_connected 1.0" in figures
        assert "perdure_sidecar_sessions 1" in figures
