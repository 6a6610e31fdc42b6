"""`perdure verify`: do the invariants hold in the store of the local session?"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from perdure_operator.cli import render
from perdure_operator.cli.context import FAILED, Format, connect, fail
from perdure_operator.cli.local import LocalConnection
from perdure_operator.cli.render import Output


def verify(
    dsn: Annotated[str | None, typer.Option(envvar="PERDURE_DSN", help="Another store than that of `perdure dev`.")] = None,
    output: Format = Output.TABLE,
) -> None:
    """Check every invariant of the store, each as a query; exit 1 and list what is violated."""
    from perdure_operator.store.store import Store

    if dsn is None:
        connection = connect()
        state = connection.state if isinstance(connection, LocalConnection) else None
        session = state.session() if state is not None else None
        if session is None:
            fail("there is no local session here", "Give the store with --dsn.", FAILED)
        dsn = session.dsn

    async def check(dsn: str) -> list[dict[str, str]]:
        store = await Store.connect(dsn, connections=1)
        try:
            return [{"invariant": v.invariant, "run": str(v.run), "detail": v.detail} for v in await store.verify()]
        finally:
            await store.close()

    violations = asyncio.run(check(dsn))
    if output in (Output.JSON, Output.YAML):
        render.document({"violations": violations}, output)
    elif violations:
        render.console().print(render.table(("INVARIANT", "RUN", "DETAIL"), ([*v.values()] for v in violations)))
    else:
        print("all invariants hold")
    if violations:
        raise typer.Exit(FAILED)
