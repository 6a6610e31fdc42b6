"""An agent in another language asks to be suspended in the middle of a call: through a real sidecar to a real gateway, by plain HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.harness.cluster import Cluster
from tests.integration.sidecar_harness import Sidecar


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


WAIT = {"key": "wait:go#0", "on": [{"kind": "signal", "name": "go"}]}


@pytest.mark.parametrize("how", ["waits", "suspend"])
async def test_it_is_told_to_end_the_call_first(cluster: Cluster, sidecar: Sidecar, how: str) -> None:
    _, decision = await sidecar.post("activities/begin", {"tool": "pay", "effect": "external", "timeoutSeconds": 5})
    if how == "suspend":
        assert (await sidecar.post("waits", WAIT))[1]["status"] == "open"
        request: dict[str, object] = {"waits": [WAIT["key"]]}
    else:
        request = WAIT | {"suspend": True}
    status, problem = await sidecar.post(how, request)
    assert (status, problem["type"], problem["retryable"]) == (409, "urn:perdure:effect-running", True)
    assert "pay" in problem["detail"]
    assert "/v1/activities/end" in problem["action"]
    assert await cluster.pg.fetchval("select state from perdure.runs") == "Running"
    end = {"key": decision["key"], "token": decision["token"], "state": "succeeded", "response": 1}
    assert (await sidecar.post("activities/end", end))[1]["state"] == "SUCCEEDED"
    assert await sidecar.post(how, request) == (200, {"status": "suspended"})
    kinds = [row[0] for row in await cluster.pg.fetch("select kind from perdure.events order by seq")]
    assert "activity.unknown" not in kinds
    assert kinds[-1] == "run.suspended"
