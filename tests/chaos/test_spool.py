"""A sidecar that has taken a receipt is killed before anybody has committed it: what `spool: Disk` does, and what becomes of it without."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from tests.chaos.stack import Stack, seen
from tests.chaos.test_frozen_worker import at_the_sink

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.xdist_group(__name__)]


@pytest.mark.parametrize("spool", ["Disk", "None"])
async def test_a_receipt_that_a_killed_sidecar_had_taken(chaos: Stack, spool: str) -> None:
    """The agent speaks plain HTTP and sends nothing twice. Between the effect and the commit the gateways stand still; they are killed too,
    so that what is in their sockets is lost with the sidecar."""
    name = f"spool-{spool.lower()}"
    await chaos.pool("plain", name=name, spool=spool)
    with chaos.sink.held(name):
        run = await chaos.create(name, name, {"what": name})
        pod = await at_the_sink(chaos, name)
        for gateway in chaos.gateways.values():
            gateway.freeze()
    folder = chaos.state.path / "spool" / pod.name

    async def taken() -> bool:
        done = (chaos.folder / f"{name}.done").exists()
        return done and (spool == "None" or any(segment.stat().st_size for segment in folder.glob("*.wal")))

    await seen(taken)
    pod.sidecar.send(9)
    await pod.sidecar.wait()
    for gateway in chaos.gateways.values():
        await chaos.restart_gateway(gateway)
    view = await chaos.until(run)
    [entry] = await chaos.sql("select state, attempts from perdure.ledger where run_id = $1", UUID(run))
    if spool == "Disk":
        assert (view.result, entry["state"]) == (["receipt", "ref-invoice"], "SUCCEEDED")
        assert not Path(folder).exists()  # noqa: ASYNC240  what the store has is gone from the disk
    else:
        assert (view.result, entry["state"]) == (["unknown", None], "UNKNOWN")
    assert chaos.sink.parts(name) == ["invoice"]
