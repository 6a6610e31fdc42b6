"""A real API server, alone, for tests of what the API server does with our resources: one for the whole test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster import apiserver, binaries
from tests.cluster.apiserver import ApiServer
from tests.cluster.unavailable import unavailable


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
