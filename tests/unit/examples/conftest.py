from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.examples.outside import Outside, outside


@pytest.fixture
async def sinks(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Outside]:
    """A process of their own. Parametrised indirectly: more arguments of its command line."""
    async with outside(tmp_path, *getattr(request, "param", ())) as running:
        yield running
