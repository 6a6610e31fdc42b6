"""The cluster of the end-to-end tests: an existing one (``PERDURE_TEST_KUBECONFIG``), or the one of this checkout, started for them unless
it runs. Most of what they do is waiting, so `make test` runs them in one process and everything else in another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.cluster import base_image, binaries
from tests.cluster.clients import Clients, ExistingCluster
from tests.cluster.cluster import Cluster, obstacle
from tests.cluster.unavailable import unavailable
from tests.e2e.installation import Installation

HERE = Path(__file__).parent
# The first ones start a cluster, build images and install Perdure as well.
TEST_SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def own_cluster() -> Iterator[Cluster]:
    """Ours: its node's containers and its API server can be made to fail, and images can be built into it."""
    if ExistingCluster.from_environment():
        pytest.skip("needs the control plane and the node in its hands: unset PERDURE_TEST_KUBECONFIG")
    if reason := obstacle():
        unavailable(reason)
    if not (binaries.are_built() and base_image.layout().exists()):
        unavailable("no cluster has been built yet: run `make cluster-build`")
    cluster = Cluster()
    if cluster.is_running():
        yield cluster
        return
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Clients:
    """Whichever it is: commands and image names."""
    found: Clients = ExistingCluster.from_environment() or request.getfixturevalue("own_cluster")
    return found


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
