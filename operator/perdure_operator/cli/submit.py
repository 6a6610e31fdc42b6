"""`submit`: start runs from files, or one from the command line, and watch them if asked.

On a cluster a file's objects are created by the apiserver, as `kubectl create` would, and the operator makes runs of them; with
--store-only the gateway makes the runs, and no object stands for them. On this machine all runs are of that kind.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure_operator.cli import render
from perdure_operator.cli.connection import Applied, Connection
from perdure_operator.cli.context import FAILED, NEW_RUN, USAGE, Format, Namespace, connect, fail, new_run
from perdure_operator.cli.follow import Follower
from perdure_operator.cli.render import Output
from perdure_operator.cli.story import clock, plain, tell
from perdure_operator.cli.target import choice
from perdure_operator.cli.verbs import JSON_HELP, payload
from perdure_operator.cli.views import RunView

UNTAKEN_SECONDS = 5.0
"""After this it is said that no operator has made a run of a resource."""


def submit(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Manifests: YAML files or folders.")] = None,
    more: Annotated[list[Path] | None, typer.Option("-f", "--filename", help="The same, as kubectl has it.")] = None,
    pool: Annotated[str | None, typer.Option(help="Without a file: the AgentPool that runs it.")] = None,
    name: Annotated[str | None, typer.Option(help="Without a file: the run's name; a new one if not given.")] = None,
    objective: Annotated[str | None, typer.Option(help="Without a file: what the agent is to do.")] = None,
    value: Annotated[str | None, typer.Option("--input", metavar="JSON", help=f"Without a file: the input. {JSON_HELP}")] = None,
    store_only: Annotated[bool, typer.Option("--store-only", help="On a cluster: runs without an AgentRun resource.")] = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Tell what happens until all have ended; exit 1 if one failed.")] = False,
    namespace: Namespace = None,
    output: Format = Output.TABLE,
) -> None:
    """Start runs. A run of the same name that is there already is not started twice; exit 1 if it has ended."""
    paths = [*(files or ()), *(more or ())]
    program = choice().program
    if bool(paths) == bool(pool):
        fail("say what to run", f"Give files ({program} submit run.yaml) or a pool ({program} submit --pool worker --input '{{}}').", USAGE)
    given = {"--name": name, "--objective": objective, "--input": value}
    if paths and (alone := " and ".join(option for option, it in given.items() if it is not None)):
        fail(f"{alone}: that is what the files say", f"Change the files, or leave them out: {program} submit --pool POOL …", USAGE)
    from perdure_operator.local.manifests import load, warnings

    connection = connect()
    place = namespace or connection.default_namespace
    applied: Iterable[Applied]
    if pool is not None:
        named = name or f"{pool}-{secrets.token_hex(3)}"
        applied = [connection.submit(place, named, _spec(pool, objective, payload(value)), store_only=store_only)]
    else:
        loaded = load(paths, namespace=place)
        for line in warnings(loaded):
            typer.echo(line, err=True)
        applied = connection.apply(loaded, store_only=store_only, say=partial(typer.echo, err=True))
    done = []
    for item in applied:
        done.append(item)
        if output in (Output.TABLE, Output.WIDE) and not watch:
            print(f"{item.run.full_name} {'created' if item.created else f'is there already ({item.run.state})'}")
        if item.warning:
            typer.echo(f"warning: {item.warning}", err=True)
    over = [item.run for item in done if item.run.terminal and not item.created]
    runs = [item.run for item in done]
    if watch:
        runs = watch_runs(connection, runs)
    if output in (Output.JSON, Output.YAML):
        answers = [item.resource if item.resource and not watch else _answer(connection, run) for item, run in zip(done, runs, strict=True)]
        render.document(answers[0] if len(answers) == 1 else {"items": answers}, output)
    if over:
        again = f"{program} submit --pool {pool} --name NEW" if pool is not None else new_run(str(paths[0]))
        typer.echo(f"{', '.join(run.full_name for run in over)}: nothing was started. {NEW_RUN}{again}", err=True)
    # With --watch the question is how the run ended, not whether it was new.
    if any(run.state != "Succeeded" for run in runs) if watch else over:
        raise typer.Exit(FAILED)


def watch_runs(connection: Connection, runs: list[RunView]) -> list[RunView]:
    """Tells the story of these runs on standard error until all are terminal; gives them as they ended."""
    follower = Follower(connection.client, "-")
    since, told = time.monotonic(), set[str]()
    while True:
        runs = [connection.refresh(run) for run in runs]
        for run, event in follower.news_of(run for run in runs if run.run_id):
            typer.echo(f"{clock(event.at)} {plain(run.full_name)} {tell(event, connection.pod_names(run.pool))}", err=True)
        if time.monotonic() - since > UNTAKEN_SECONDS:
            for run in (run for run in runs if not run.run_id and run.full_name not in told):
                told.add(run.full_name)
                typer.echo(
                    f"{plain(run.full_name)} waits for the operator: {plain(run.message) or 'it has not looked at it yet'}", err=True
                )
        if all(run.terminal and run.run_id for run in runs):
            return runs
        time.sleep(connection.poll_seconds)


def _answer(connection: Connection, run: RunView) -> Any:
    return connection.client.get(f"/v1/namespaces/{run.namespace}/runs/{run.run_id}")


def _spec(pool: str, objective: str | None, value: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"agent": {"poolRef": {"name": pool}}}
    return spec | {name: found for name, found in (("objective", objective), ("input", value)) if found is not None}
