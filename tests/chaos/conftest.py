"""Fixtures of the chaos tests: a stack for each module, and the loop with it."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.chaos.stack import Stack, stack
from tests.harness.fixtures import zygote
from tests.harness.gateways import Zygote

__all__ = ["zygote"]


@pytest.fixture(scope="module")
def chaos_folder(server_folder: Path) -> Iterator[Path]:
    folder = server_folder / f"chaos-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chaos(chaos_folder: Path, zygote: Zygote) -> AsyncIterator[Stack]:
    async with stack(chaos_folder, zygote) as made:
        yield made
