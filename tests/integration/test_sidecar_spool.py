"""Receipts of plain HTTP clients outlive the sidecar."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from tests.integration.sidecar_harness import PATIENCE, RUN, Gateway, Op, Pod, problem, running

from perdure import protocol
from perdure.protocol import Refusal

RECEIPT = {"key": "k", "token": "t", "state": "succeeded", "response": {"id": 7}}


def records(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.wal")))


async def leave_a_receipt_behind(tmp_path: Path, gateway: Gateway, req: str) -> None:
    """A sidecar takes a receipt and dies before the gateway has it."""
    gateway.swallow()
    async with running(tmp_path, gateway, PERDURE_SPOOL_DIR=str(tmp_path / "spool")) as sidecar:
        await sidecar.get("/v1/run")
        post = asyncio.create_task(sidecar.post("activities/end", RECEIPT, req=req))
        await gateway.until(lambda: gateway.pod.of(Op))
        assert records(tmp_path / "spool"), "on disk before it is sent"
        sidecar.kill()
        await sidecar.exit_code()
        await asyncio.wait([post])
    assert not gateway.store.ops
    gateway.pods.clear()
    gateway.url = ""
    gateway.react = gateway.behave


async def test_a_receipt_is_sent_again_after_a_restart_with_its_request_id_and_epoch(tmp_path: Path) -> None:
    gateway = Gateway()
    req = str(uuid.uuid4())
    await leave_a_receipt_behind(tmp_path, gateway, req)
    gateway.store.epoch = gateway.lease.epoch = 2
    async with running(tmp_path, gateway, PERDURE_SPOOL_DIR=str(tmp_path / "spool")) as sidecar:
        await gateway.until(lambda: gateway.store.ops)
        op = gateway.store.ops[0]
        assert (op.run, op.epoch, op.req) == (RUN, 1, req)
        assert gateway.store.bodies()[0] == {"op": "activity.end", **RECEIPT}
        await sidecar.post("events", {"kind": "x"})
        assert "perdure_sidecar_spool_receipts 0" in (await sidecar.get("/metrics"))[1]
        assert not records(tmp_path / "spool"), "what the gateway has is gone from the disk"


async def test_a_receipt_that_the_gateway_cannot_take_now_stays(tmp_path: Path) -> None:
    gateway = Gateway()
    refused = 0

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        nonlocal refused
        if isinstance(frame, Op) and not refused:
            refused += 1
            await pod.send(Refusal(id=frame.id, problem=problem("store-unavailable", 503, retryable=True)))
        else:
            await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway, PERDURE_SPOOL_DIR=str(tmp_path / "spool")) as sidecar:
        await sidecar.get("/v1/run")
        req = str(uuid.uuid4())
        assert (await sidecar.post("activities/end", RECEIPT, req=req))[0] == 503
        assert records(tmp_path / "spool")
        await gateway.until(lambda: gateway.store.ops)
        assert gateway.store.ops[0].req == req


async def test_a_torn_tail_is_cut_and_a_bad_record_reported(tmp_path: Path) -> None:
    gateway = Gateway()
    req = str(uuid.uuid4())
    await leave_a_receipt_behind(tmp_path, gateway, req)
    (segment,) = (tmp_path / "spool").glob("*.wal")
    good = segment.read_bytes()
    bad = bytearray(good)
    bad[-1] ^= 1
    segment.write_bytes(bytes(bad) + good + good[: len(good) // 2])
    async with running(tmp_path, gateway, PERDURE_SPOOL_DIR=str(tmp_path / "spool")) as sidecar:
        await gateway.until(lambda: gateway.store.ops)
        assert [op.req for op in gateway.store.ops] == [req]
        damage = {line["what"]: line for line in sidecar.log if line["event"] == "a part of the spool cannot be read"}
        assert damage["bad-crc"]["offset"] == 0
        assert "perdure_sidecar_spool_damage_total 2" in (await sidecar.get("/metrics"))[1]


async def test_many_receipts_at_once_are_all_on_disk_before_they_are_sent(tmp_path: Path) -> None:
    gateway = Gateway()
    missing: list[str] = []

    async def react(pod: Pod, frame: protocol.FromPod) -> None:
        if isinstance(frame, Op) and frame.req.encode() not in records(tmp_path / "spool"):
            missing.append(frame.req)
        await gateway.behave(pod, frame)

    gateway.react = react
    async with running(tmp_path, gateway, PERDURE_SPOOL_DIR=str(tmp_path / "spool")) as sidecar:
        await sidecar.get("/v1/run")
        posts = [sidecar.post("activities/end", {**RECEIPT, "token": str(n)}) for n in range(100)]
        assert {status for status, _ in await asyncio.wait_for(asyncio.gather(*posts), PATIENCE)} == {200}
        assert not missing
        assert len(gateway.store.ops) == 100


async def test_a_disk_that_fails_does_not_stop_receipts(tmp_path: Path) -> None:
    gateway = Gateway()
    spool = tmp_path / "spool"
    async with running(tmp_path, gateway, PERDURE_SPOOL_DIR=str(spool)) as sidecar:
        await sidecar.get("/v1/run")
        spool.rmdir()
        assert (await sidecar.post("activities/end", RECEIPT))[0] == 200
        assert "perdure_sidecar_spool_failures_total 1" in (await sidecar.get("/metrics"))[1]
