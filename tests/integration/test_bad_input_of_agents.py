"""What is wrong with an operation is told to the agent, and nothing of it is stored: through a real sidecar to a real gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.harness.api import Reply
from tests.harness.cluster import Cluster
from tests.harness.complaints import nothing_stored
from tests.integration.sidecar_harness import Sidecar
from tests.integration.test_bad_input import LIMIT, NOT_JSON

BODIES = {
    "steps/end": '{"key":"step:s#0","name":"s","state":"succeeded","output":%s}',
    "events": '{"kind":"note","data":%s}',
    "activities/begin": '{"tool":"t","effect":"external","arguments":%s}',
    "finish": '{"outcome":"succeeded","output":%s}',
}


@pytest.fixture
async def sidecar(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Sidecar]:
    """It holds a run."""
    gateway, api = await cluster.one()
    await api.create()
    token = tmp_path / "token"
    token.write_text(cluster.tokens.issue_pod(uuid4(), "default/p"))
    sidecar = Sidecar(tmp_path, [gateway], PERDURE_TOKEN_FILE=str(token))
    await sidecar.start()
    assert (await sidecar.get("/v1/run"))[0] == 200
    yield sidecar
    await sidecar.close()


async def sent(sidecar: Sidecar, path: str, data: bytes) -> Reply:
    async with sidecar.agent.post(f"/v1/{path}", data=data) as response:
        return Reply(response.status, response.content_type, await response.read())


async def test_what_is_no_json(cluster: Cluster, sidecar: Sidecar) -> None:
    async with nothing_stored(cluster.pg) as complaints:
        # A payload inside an operation may be as deep as alone, and the operation around it has depth of its own.
        for what, data in NOT_JSON.items() - {("depth 201", NOT_JSON["depth 201"])}:
            for path, body in BODIES.items():
                head, tail = body.encode().split(b"%s")
                complaints.reply(f"{what} in {path}", await sent(sidecar, path, head + data + tail), "invalid-input", "bad-request")
    status, _ = await sidecar.post("events", {"kind": "note", "data": 1})
    assert status == 200, "what was refused did no harm to what is right"


async def test_what_is_too_large_or_nobody_knows(cluster: Cluster, sidecar: Sidecar) -> None:
    large = json.dumps("x" * (LIMIT - 1))
    async with nothing_stored(cluster.pg) as complaints:
        for path, body in BODIES.items():
            complaints.reply(f"too large in {path}", await sent(sidecar, path, (body % large).encode()), "payload-too-large")
            unknown = body % "1" + " "
            unknown = unknown.replace("{", '{"frobnicate":1,', 1)
            complaints.reply(f"unknown field in {path}", await sent(sidecar, path, unknown.encode()), "invalid-input", "bad-request")
