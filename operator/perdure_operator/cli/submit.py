"""`perdure submit`: start runs from files, or one from the command line, and watch them if asked."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure_operator.cli import render
from perdure_operator.cli.context import FAILED, NEW_RUN, USAGE, Connection, Format, Namespace, connect, fail, new_run
from perdure_operator.cli.follow import Follower
from perdure_operator.cli.render import Output
from perdure_operator.cli.story import clock, plain, tell
from perdure_operator.cli.verbs import JSON_HELP, payload
from perdure_operator.cli.views import RunView

POLL_SECONDS = 0.2


def submit(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Manifests: YAML files or folders.")] = None,
    more: Annotated[list[Path] | None, typer.Option("-f", "--filename", help="The same, as kubectl has it.")] = None,
    pool: Annotated[str | None, typer.Option(help="Without a file: the AgentPool that runs it.")] = None,
    name: Annotated[str | None, typer.Option(help="Without a file: the run's name; a new one if not given.")] = None,
    objective: Annotated[str | None, typer.Option(help="Without a file: what the agent is to do.")] = None,
    value: Annotated[str | None, typer.Option("--input", metavar="JSON", help=f"Without a file: the input. {JSON_HELP}")] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Tell what happens until all have ended; exit 1 if one failed.")] = False,
    namespace: Namespace = "default",
    output: Format = Output.TABLE,
) -> None:
    """Start runs. A run of the same name that is there already is not started twice; exit 1 if it has ended."""
    paths = [*(files or ()), *(more or ())]
    if bool(paths) == bool(pool):
        fail("say what to run", "Give files (perdure submit run.yaml) or a pool (perdure submit --pool worker --input '{}').", USAGE)
    from perdure_operator.cli.apply import Applied, apply
    from perdure_operator.cli.apply import submit as submit_one
    from perdure_operator.local.manifests import load

    connection = connect()
    applied: Iterable[Applied]
    if pool is not None:
        named = name or f"{pool}-{secrets.token_hex(3)}"
        body = {"spec": _spec(pool, objective, payload(value))}
        applied = [submit_one(connection.client, namespace, named, body, f"submit:{named}")]
    else:
        applied = apply(connection.client, load(paths, namespace=namespace))
    runs, over = [], []
    for item in applied:
        if item.run.terminal and not item.created:
            over.append(item.run)
        runs.append(item.run)
        if output is Output.TABLE and not watch:
            print(f"{item.run.full_name} {'created' if item.created else f'is there already ({item.run.state})'}")
    if watch:
        runs = watch_runs(connection, runs)
    if output is not Output.TABLE:
        answers = [connection.client.get(f"/v1/namespaces/{run.namespace}/runs/{run.run_id}") for run in runs]
        render.document(answers[0] if len(answers) == 1 else {"items": answers}, output)
    if over:
        again = f"perdure submit --pool {pool} --name NEW" if pool is not None else new_run(str(paths[0]))
        typer.echo(f"{', '.join(run.full_name for run in over)}: nothing was started. {NEW_RUN}{again}", err=True)
    # With --watch the question is how the run ended, not whether it was new.
    if any(run.state != "Succeeded" for run in runs) if watch else over:
        raise typer.Exit(FAILED)


def watch_runs(connection: Connection, runs: list[RunView]) -> list[RunView]:
    """Tells the story of these runs on standard error until all are terminal; gives them as they ended."""
    follower = Follower(connection.client, "-")
    while True:
        runs = [connection.client.run(run.namespace, run.run_id) for run in runs]
        for run, event in follower.news_of(runs):
            typer.echo(f"{clock(event.at)} {plain(run.full_name)} {tell(event, connection.pod_name)}", err=True)
        if all(run.terminal for run in runs):
            return runs
        time.sleep(POLL_SECONDS)


def _spec(pool: str, objective: str | None, value: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"agent": {"poolRef": {"name": pool}}}
    return spec | {name: found for name, found in (("objective", objective), ("input", value)) if found is not None}
