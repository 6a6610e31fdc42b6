"""What the README says for a cluster: the examples as they are, with kubectl alone, and a world that counts what happens to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from tests.cluster.paths import ROOT
from tests.e2e.installation import PODS, RUNS, Installation

Json = dict[str, Any]

EXAMPLES = ROOT / "examples"
SINKS = "http://sinks:8090"


@pytest.fixture(scope="module", autouse=True)
def outside_world(perdure: Installation, place: str) -> None:
    perdure.build_shell_example()
    perdure.cluster.kubectl("apply", "-n", place, "-f", str(EXAMPLES / "report" / "cluster"))
    perdure.cluster.kubectl("rollout", "status", "deployment/sinks", "-n", place, "--timeout=90s", seconds=100)


def happened(perdure: Installation, place: str, kind: str) -> list[Json]:
    """What the outside world has got: objects, mails or notifications."""
    path = f"/api/v1/namespaces/{place}/services/sinks:http/proxy/{kind}"
    return list(json.loads(perdure.cluster.kubectl("get", "--raw", path))["items"])


def waits_without_a_pod(perdure: Installation, place: str, name: str) -> None:
    """As ``kubectl get agentruns`` and ``kubectl get pods`` show it."""
    perdure.until(
        f"{name} waits for its approval", lambda: (perdure.run(name, place).get("status") or {}).get("waitReason") == "signal approved", 240
    )

    def others() -> list[str]:
        pods = perdure.cluster.kubectl("get", PODS, "-n", place, "--no-headers", "-o", "custom-columns=:.metadata.name").split()
        return [pod for pod in pods if not pod.startswith("sinks-")]

    perdure.until("no pod but that of the sinks is left", lambda: not others())
    [row] = [line for line in perdure.cluster.kubectl("get", "agentruns", "-n", place).splitlines() if line.startswith(f"{name} ")]
    assert "Suspended" in row
    assert "signal approved" in row


def test_the_report_is_mailed_once(perdure: Installation, place: str) -> None:
    perdure.cluster.kubectl("apply", "-n", place, "-f", str(EXAMPLES / "report"))
    waits_without_a_pod(perdure, place, "board-report")
    children = [run for run in perdure.all(RUNS, place) if run["metadata"].get("ownerReferences")]
    assert [child["status"]["phase"] for child in children] == ["Succeeded"] * 5
    described = perdure.cluster.kubectl("describe", "agentrun", "board-report", "-n", place)
    assert "waits for signal approved" in described
    assert [len(happened(perdure, place, kind)) for kind in ("objects", "mails", "notifications")] == [1, 0, 0]

    perdure.signal("board-report", place, "approved", {"by": "Ada"})
    perdure.cluster.kubectl("wait", "--for=condition=Succeeded", "agentrun/board-report", "-n", place, "--timeout=120s", seconds=130)
    result = perdure.run("board-report", place)["status"]["result"]
    [stored], [mail], [notice] = (happened(perdure, place, kind) for kind in ("objects", "mails", "notifications"))
    assert result["approvedBy"] == "Ada"
    assert mail["to"] == ["board@example.org"]
    assert [file["sha256"] for file in (*stored["files"], *mail["files"])] == [result["sha256"]] * 2
    assert notice["body"] == {"event": "report-sent", "subject": "board-report.pdf"}


def test_an_agent_of_shell_and_curl(perdure: Installation, place: str) -> None:
    perdure.cluster.kubectl("apply", "-n", place, "-f", str(EXAMPLES / "shell" / "agentpool.yaml"))
    run = yaml.safe_load((EXAMPLES / "shell" / "agentrun.yaml").read_text())
    run["spec"]["input"]["notifyUrl"] = f"{SINKS}/notifications"  # the manifest's is that of one's own machine
    perdure.apply(place, run)
    waits_without_a_pod(perdure, place, "disk-watch")

    perdure.signal("disk-watch", place, "approved")
    perdure.cluster.kubectl("wait", "--for=condition=Succeeded", "agentrun/disk-watch", "-n", place, "--timeout=120s", seconds=130)
    result = perdure.run("disk-watch", place)["status"]["result"]
    told = [notice for notice in happened(perdure, place, "notifications") if notice["body"]["event"] == "disk"]
    assert [notice["body"]["usedPercent"] for notice in told] == [result["usedPercent"]]
    assert told[0]["key"]
