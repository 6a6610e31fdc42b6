"""What the status of a pod proves: that its containers were seen to end, or only that the cluster has given it up."""

from __future__ import annotations

from typing import Any

import pytest

from perdure_operator.controllers.pods import ending_of

RUNNING: dict[str, Any] = {"running": {}}
ENDED: dict[str, Any] = {"terminated": {"exitCode": 137}}
NOT_FOUND: dict[str, Any] = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}


@pytest.mark.parametrize(
    ("agent", "sidecar", "proven"),
    [
        (ENDED, ENDED, True),
        (ENDED, RUNNING, False),
        (RUNNING, RUNNING, False),  # a node that is cut off: the collector of pods has given it up
        (NOT_FOUND, ENDED, False),  # the kubelet could not find the container, and says that it ended
        (ENDED, NOT_FOUND, False),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, ENDED, False),
        ({}, ENDED, False),
    ],
)
def test_only_containers_that_were_seen_to_end_prove_anything(agent: dict[str, Any], sidecar: dict[str, Any], proven: bool) -> None:
    status = {
        "phase": "Failed",
        "containerStatuses": [{"name": "agent", "state": agent}],
        "initContainerStatuses": [{"name": "perdure-sidecar", "state": sidecar}],
    }
    ending = ending_of({"metadata": {}, "status": status})
    assert ending is not None
    assert ending.proven == proven


def test_a_pod_of_which_nothing_is_known_proves_nothing() -> None:
    ending = ending_of({"metadata": {}, "status": {"phase": "Failed"}})
    assert ending is not None
    assert not ending.proven
