"""Both examples from start to end: real processes, a real Postgres, real effects."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import yaml
from examples.report.backstage import ROOT, running_dev
from examples.report.follow import following
from examples.report.gateway import Gateway
from tests.unit.examples.outside import Outside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_the_demo_ends_with_a_good_verdict(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.report.demo", "--state-dir", str(tmp_path / "state")),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told = (await process.communicate())[0].decode()
    assert process.returncode == 0, told
    assert "exactly one mail" in told
    assert (tmp_path / "state/sinks/objects/board-report.pdf").read_bytes().startswith(b"%PDF-")


async def test_the_shell_agent_waits_without_a_process_and_notifies_once(sinks: Outside, tmp_path: Path) -> None:
    folder = ROOT / "examples/shell"
    spec = yaml.safe_load((folder / "agentrun.yaml").read_text())["spec"]
    spec["input"]["notifyUrl"] = f"{sinks.at.http}/notifications"
    async with running_dev(folder / "agentpool.yaml", tmp_path / "state", {}) as dev, Gateway(dev.url, dev.token) as gateway:
        await gateway.until_pool("shell")
        await gateway.submit("disk-watch", spec)
        async with following(gateway, "disk-watch", lambda event: None) as log:
            await log.until("the wait", lambda event: event.kind == "run.suspended")
            await gateway.signal("disk-watch", "approved", None, key="s")
            await log.end()
        view = await gateway.run("disk-watch")
    assert view["state"] == "Succeeded"
    assert [event.kind for event in log.events].count("step.succeeded") == 1
    [notification] = await sinks.effects("notifications")
    assert notification["body"] == {"event": "disk", **view["result"]}
