"""Helm, for tests that only render."""

from __future__ import annotations

import pytest
from tests.cluster import binaries
from tests.cluster.unavailable import unavailable


@pytest.fixture(scope="session", autouse=True)
def helm() -> None:
    if reason := binaries.obstacle((binaries.HELM,)):
        unavailable(reason)
    # Minutes of compiling are no part of a test, and no test's timeout allows for them.
    if not binaries.are_built((binaries.HELM,)):
        unavailable("no Helm has been built yet: run `make cluster-build`")
