"""Commands that look: get, tree, why, events, ledger, journal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer
from rich.text import Text

from perdure_operator.cli import render
from perdure_operator.cli.client import read, run_path
from perdure_operator.cli.connection import Connection
from perdure_operator.cli.context import (
    ALL_NAMESPACES,
    USAGE,
    AllNamespaces,
    Follow,
    Format,
    Namespace,
    RunName,
    connect,
    fail,
    show,
)
from perdure_operator.cli.render import Output
from perdure_operator.cli.story import PodName, clock, tell
from perdure_operator.cli.target import choice
from perdure_operator.cli.views import TERMINAL, EventView, JournalView, LedgerView, PoolView, RunView, WhyView

RUNS = {"run", "runs", "agentrun", "agentruns", "arun"}
POOLS = {"pool", "pools", "agentpool", "agentpools", "apool"}
STATES = ("Pending", "Running", "Suspended", "Succeeded", "Failed", "Cancelled")
WATCH_SECONDS = 0.5


def get(
    what: Annotated[list[str] | None, typer.Argument(metavar="[runs|pools] [NAME]...", help="Runs if not said otherwise.")] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    state: Annotated[str | None, typer.Option(help=f"Only runs in this state: {', '.join(STATES)}.")] = None,
    pool: Annotated[str | None, typer.Option(help="Only runs of this pool.")] = None,
    parent: Annotated[str | None, typer.Option(help="Only children of the run with this id.")] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Print a line whenever a run changes.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """List runs, or show some by name; `get pools` lists the pools."""
    connection = connect()
    here = namespace or connection.default_namespace
    place = ALL_NAMESPACES if all_namespaces else here
    kind, names = (what[0], what[1:]) if what and what[0].lower() in RUNS | POOLS else ("runs", what or [])
    if kind.lower() in POOLS:
        answer = connection.client.get(f"/v1/namespaces/{place}/pools")
        answer["items"] = [item for item in answer["items"] if not names or item["pool"].partition("/")[2] in names]
        show(output, answer, lambda: render.pools(read(list[PoolView], answer["items"]), with_namespace=all_namespaces))
        return
    if state is not None and (state := state.capitalize()) not in STATES:
        fail(f"{state} is not a state", f"Use one of {', '.join(STATES)}.", USAGE)
    if pool is not None and "/" not in pool and not all_namespaces:
        pool = f"{here}/{pool}"

    def current() -> list[Any]:
        if names:
            return [connection.client.get(run_path(*connection.split(name, place))) for name in names]
        return list(connection.client.run_items(place, state=state, pool=pool, parent=parent))

    items = current()
    answer = items[0] if len(names) == 1 else {"items": items}
    if items or output in (Output.JSON, Output.YAML):
        show(
            output,
            answer,
            lambda: render.runs(
                read(list[RunView], items), connection.pod_names, wide=output is Output.WIDE, with_namespace=all_namespaces
            ),
        )
    else:
        typer.echo("no runs" + ("" if all_namespaces else f" in namespace {here}; -A shows all"), err=True)
    seen = {item["runId"]: item["lastSeq"] for item in items}
    while watch:
        time.sleep(max(WATCH_SECONDS, connection.poll_seconds))
        changed = [item for item in current() if seen.get(item["runId"]) != item["lastSeq"]]
        seen |= {item["runId"]: item["lastSeq"] for item in changed}
        for item in changed:
            _line(connection, item, output, with_namespace=all_namespaces)


def _line(connection: Connection, item: Any, output: Output, *, with_namespace: bool) -> None:
    if output is Output.JSON:
        print(json.dumps(item, ensure_ascii=False), flush=True)
        return
    cells = render.run_row(read(RunView, item), connection.pod_names, with_namespace=with_namespace)
    render.console().print(Text("   ").join(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def tree(run: RunName, namespace: Namespace = None, output: Format = Output.TABLE) -> None:
    """A run and all its descendants."""
    connection = connect()
    answer = connection.client.get(run_path(*connection.split(run, namespace), "tree"))
    show(
        output, answer, lambda: render.tree(read(RunView, answer["run"]), read(list[RunView], answer["descendants"]), connection.pod_names)
    )


def why(run: RunName, namespace: Namespace = None, output: Format = Output.TABLE) -> None:
    """Why a run is not further: what it waits for, since when, and what would wake it."""
    connection = connect()
    place, name = connection.split(run, namespace)
    answer = connection.client.get(run_path(place, name, "why"))

    view = read(WhyView, answer)
    show(output, answer, lambda: render.why(view, name, _pod_name(connection, place, name), _command(connection, place)))
    if output in (Output.TABLE, Output.WIDE) and view.state in TERMINAL:
        entries = read(list[LedgerView], connection.client.records(place, name, "ledger"))
        if known := render.afterwards(view.state, entries, name, _command(connection, place)):
            render.console().print(known)


def _command(connection: Connection, namespace: str) -> Callable[[str], str]:
    """The beginning of a command line for a verb, to be told to a person."""
    return lambda verb: f"{choice().program} {verb}" + ("" if namespace == connection.default_namespace else f" -n {namespace}")


def _pod_name(connection: Connection, namespace: str, run: str) -> PodName:
    """Of the pods of a run whose pool is not known yet; asks for it when there is a pod to name."""

    @cache
    def of_pool() -> PodName:
        return connection.pod_names(connection.client.run(namespace, run).pool)

    return lambda pod_id: of_pool()(pod_id)  # noqa: PLW0108 (not before there is a pod)


def events(
    run: RunName,
    namespace: Namespace = None,
    follow: Follow = False,
    start: Annotated[int, typer.Option("--from", min=1, help="First sequence number.")] = 1,
    output: Format = Output.TABLE,
) -> None:
    """The log of a run: everything that has happened to it, in order."""
    connection = connect()
    place, name = connection.split(run, namespace)
    pod_name = _pod_name(connection, place, name)
    if follow:
        for event in connection.client.tail(place, name, start):
            _print_event(pod_name, event, output)
        return
    items = list(connection.client.event_items(place, name, start))
    show(output, {"items": items}, lambda: render.events(read(list[EventView], items), pod_name))


def _print_event(pod_name: PodName, event: EventView, output: Output) -> None:
    if output is Output.JSON:
        fields = {name: getattr(event, name) for name in event.__struct_fields__}
        print(json.dumps(fields, ensure_ascii=False), flush=True)
    else:
        print(f"{clock(event.at)}  {event.seq:>5}  {tell(event, pod_name)}", flush=True)


def ledger(run: RunName, namespace: Namespace = None, output: Format = Output.TABLE) -> None:
    """The effects of a run: which calls to the outside happened, and which nobody knows about."""
    connection = connect()
    place, name = connection.split(run, namespace)
    answer = {"items": connection.client.records(place, name, "ledger")}
    entries = read(list[LedgerView], answer["items"])
    show(output, answer, lambda: render.ledger(entries, wide=output is Output.WIDE))
    if output in (Output.TABLE, Output.WIDE) and any(entry.state == "UNKNOWN" for entry in entries):
        view = connection.client.run(place, name)
        if view.terminal:
            typer.echo(
                "the run has ended, and nobody knows whether the UNKNOWN ones happened: ask their providers, by the effect's key", err=True
            )
        elif asked := render.questions(view, _command(connection, place)):
            render.console().print(asked)


def journal(run: RunName, namespace: Namespace = None, output: Format = Output.TABLE) -> None:
    """What a run has done for good: steps, waits and children that a restart does not repeat."""
    connection = connect()
    answer = {"items": connection.client.records(*connection.split(run, namespace), "journal")}
    show(output, answer, lambda: render.journal(read(list[JournalView], answer["items"])))
