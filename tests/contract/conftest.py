"""A real API server, alone, for tests of what the API server does with our resources: one for the whole test run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from tests.cluster import apiserver, binaries
from tests.cluster.apiserver import ApiServer
from tests.cluster.errors import CommandError
from tests.cluster.paths import ROOT
from tests.cluster.unavailable import unavailable
from tests.contract.objects import Objects, Refused

CRDS = ROOT / "crds"
ADMISSION = CRDS / "admission.yaml"
OLDER_THAN_THE_POLICY = {
    "apiVersion": "perdure.dev/v1alpha1",
    "kind": "AgentRun",
    "metadata": {"name": "older-than-the-policy", "finalizers": ["perdure.dev/cancel"]},
    "spec": {"agent": {"poolRef": {"name": "worker"}}, "input": "x" * 17_000, "inputFrom": {"blob": "sha256:" + "0" * 64}},
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Here and not in a fixture, so that pytest tells it once instead of once a test."""
    if reason := apiserver.obstacle():
        unavailable(reason)
    # Minutes of compiling are no part of a test, and no test's timeout allows for them.
    if not binaries.are_built(binaries.CONTROL_PLANE):
        unavailable("no API server has been built yet: run `make cluster-build`")


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    with apiserver.running() as server:
        yield server


@pytest.fixture(scope="session")
def objects(api_server: ApiServer) -> Objects:
    """Perdure's resources, with their definitions installed."""
    definitions = sorted(str(file) for file in CRDS.glob("*.yaml") if file != ADMISSION)
    api_server.kubectl("apply", "--warnings-as-errors", *(f"--filename={file}" for file in definitions))
    api_server.kubectl("wait", "--for=condition=Established", *(f"--filename={file}" for file in definitions))
    made = Objects(api_server.kubeconfig)
    made.create("agentruns", OLDER_THAN_THE_POLICY)
    api_server.kubectl("apply", "--warnings-as-errors", f"--filename={ADMISSION}")
    _wait_for_policies(api_server, made)
    return made


def _wait_for_policies(api_server: ApiServer, made: Objects) -> None:
    """They hold once the API server has read them, and it does not say when that is."""
    refused = {**OLDER_THAN_THE_POLICY, "metadata": {"name": "is-it-refused"}}
    warned = {**refused, "spec": {"agent": {"poolRef": {"name": "worker"}}, "budgets": {"maxSteps": 1}}}
    create = ("create", "--dry-run=server", "--warnings-as-errors", "--filename=-")
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            made.create("agentruns", refused, dry_run=True)
        except Refused:
            try:
                api_server.kubectl(*create, input=json.dumps(warned))
            except CommandError:
                return
        time.sleep(0.1)
    raise AssertionError("the admission policies do not hold after 30 s")
