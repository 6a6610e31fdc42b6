"""The cluster of the end-to-end tests: an existing one (``PERDURE_TEST_KUBECONFIG``), or the one of this checkout.

`make e2e` starts ours and runs pytest inside its network; a test run anywhere else cannot reach it, and says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
from tests.cluster.clients import Clients, ExistingCluster
from tests.cluster.cluster import Cluster
from tests.e2e.installation import Installation


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Here and not in a fixture, so that pytest tells it once instead of once a test."""
    # Not a failure on continuous integration either: there `make e2e` runs them, and fails if it cannot.
    if ExistingCluster.from_environment() is None and not Cluster().is_reachable():
        pytest.skip("end-to-end tests run inside a cluster's network: use `make e2e`")


@pytest.fixture(scope="session")
def cluster() -> Clients:
    """Whichever it is: commands and image names."""
    if existing := ExistingCluster.from_environment():
        return existing
    return Cluster()


@pytest.fixture(scope="session")
def own_cluster() -> Cluster:
    """Ours: its node's containers and its API server can be made to fail, and images can be built into it."""
    if ExistingCluster.from_environment():
        pytest.skip("needs the control plane and the node in its hands: unset PERDURE_TEST_KUBECONFIG")
    return Cluster()


@pytest.fixture
def namespace(cluster: Clients) -> Iterator[str]:
    """One of this test alone."""
    name = f"e2e-{uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=30s")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def perdure(own_cluster: Cluster) -> Installation:
    """Perdure, installed by its chart from its own images."""
    installation = Installation(own_cluster)
    # While tests are written: take what an earlier run has installed in a cluster that is still up.
    if not os.environ.get("PERDURE_TEST_INSTALLED"):
        installation.build_images()
        installation.install()
    return installation


@pytest.fixture(scope="module")
def place(perdure: Installation) -> Iterator[str]:
    """A namespace of this module, with an account ``tester`` that may do everything with runs."""
    name = f"e2e-{uuid4().hex[:8]}"
    perdure.cluster.kubectl("create", "namespace", name)
    perdure.prepare(name)
    yield name
    perdure.cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture
def operators(perdure: Installation) -> Iterator[None]:
    """For tests that take them away: two are there again afterwards."""
    yield
    perdure.scale_operators(2)
