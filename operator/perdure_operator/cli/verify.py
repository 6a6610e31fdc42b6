"""`perdure verify`: do the invariants hold in the store of the local session, or in another?"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from perdure_operator.cli import render
from perdure_operator.cli.context import FAILED, USAGE, Format, Namespace, complete_runs, connect, fail
from perdure_operator.cli.local import LocalConnection
from perdure_operator.cli.render import Output

if TYPE_CHECKING:
    from perdure_operator.store.verify import Progress

QUIET_SECONDS = 2.0
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_HEADER = ("INVARIANT", "RUN", "DETAIL")


def verify(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Only this run: name, id or NAMESPACE/NAME.", autocompletion=complete_runs),
    ] = None,
    namespace: Namespace = None,
    since: Annotated[str | None, typer.Option(metavar="AGE", help="Only runs that changed so lately: 90s, 30m, 1h, 2d.")] = None,
    dsn: Annotated[str | None, typer.Option(envvar="PERDURE_DSN", help="Another store than that of `perdure dev`.")] = None,
    output: Format = Output.TABLE,
) -> None:
    """Check every invariant of the store, each as a query; exit 1 and list what is violated."""
    if run is not None and since is not None:
        fail("a run and --since exclude each other", "Give one of them.", USAGE)
    seconds = _seconds(since) if since is not None else None
    if dsn is None:
        connection = connect()
        state = connection.state if isinstance(connection, LocalConnection) else None
        session = state.session() if state is not None else None
        if session is None:
            fail("there is no local session here", "Give the store with --dsn.", FAILED)
        dsn = session.dsn
    violations = asyncio.run(_check(dsn, run, namespace or "default", seconds))
    if output in (Output.JSON, Output.YAML):
        render.document({"violations": violations}, output)
    elif violations:
        render.console().print(render.table(_HEADER, ([*v.values()] for v in violations)))
    else:
        print("all invariants hold")
    if violations:
        raise typer.Exit(FAILED)


def _seconds(age: str) -> float:
    found = _AGO.fullmatch(age)
    if found is None:
        fail(f"{age} is not an age", "Use a number and a unit, s, m, h or d: 90s, 30m, 1h.", USAGE)
    return float(found[1]) * _UNITS[found[2]]


async def _check(dsn: str, run: str | None, namespace: str, since_seconds: float | None) -> list[dict[str, str]]:
    from perdure_operator.store.store import Store
    from perdure_operator.store.verify import Progress

    store = await Store.connect(dsn, connections=1)
    try:
        runs = None
        if run is not None:
            place, slash, name = run.rpartition("/")
            async with store.reader() as reader:
                runs = [await reader.find(place if slash else namespace, name)]
        progress = Progress()
        async with _told(progress):
            violations = store.violations(runs=runs, since_seconds=since_seconds, progress=progress)
            return [{"invariant": v.invariant, "run": v.run, "detail": v.detail} async for v in violations]
    finally:
        await store.close()


@asynccontextmanager
async def _told(progress: Progress) -> AsyncIterator[None]:
    """Says on standard error how far the check is, from its third second on."""

    async def tell() -> None:
        since = time.monotonic()
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            took = time.monotonic() - since
            done = f"{progress.runs} runs, {progress.events} events checked in {took:.0f} s"
            print(f"{done}; now: {progress.invariant}", file=sys.stderr, flush=True)

    teller = asyncio.create_task(tell())
    try:
        yield
    finally:
        teller.cancel()
        with suppress(asyncio.CancelledError):
            await teller
