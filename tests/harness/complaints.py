"""Collects everything that was not refused as it should be, so that one failing case of a table does not hide the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from tests.harness.api import Reply
from tests.harness.postgres import contents

from perdure import protocol as wire


class Complaints:
    def __init__(self) -> None:
        self.found: list[str] = []

    def reply(self, what: str, reply: Reply, *codes: str) -> None:
        """The reply must be a proper problem with one of these codes."""
        if reply.status < 400 or reply.type != "application/problem+json":
            self.found.append(f"{what}: {reply.status} {reply.type} {reply.body[:200]!r}")
        else:
            self.problem(what, reply.problem, *codes)

    def frame(self, what: str, frame: wire.Answer | wire.Refusal, *codes: str) -> None:
        """The same for the answer to a pod."""
        if isinstance(frame, wire.Answer):
            self.found.append(f"{what}: {frame.body[:200]!r}")
        else:
            self.problem(what, frame.problem, *codes)

    def problem(self, what: str, problem: wire.Problem, *codes: str) -> None:
        """Not retryable: what is wrong stays wrong."""
        code = problem.type.removeprefix("urn:perdure:")
        if code not in codes or not 400 <= problem.status < 500 or not problem.action or not problem.detail or problem.retryable:
            self.found.append(f"{what}: {problem}")


@asynccontextmanager
async def nothing_stored(pg: asyncpg.Connection) -> AsyncIterator[Complaints]:
    """Fails with all complaints, or when a table does not hold what it held before."""
    before, complaints = await contents(pg), Complaints()
    yield complaints
    after = await contents(pg)
    complaints.found += [f"{table}: {before[table]} before, {after[table]} now" for table in after if after[table] != before[table]]
    assert not complaints.found, "\n".join(complaints.found)
