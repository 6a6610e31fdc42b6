"""Commands about triggers: deliveries, redrive, fire. What fired, what became of it, and the same again by hand."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any
from uuid import uuid4

import typer

from perdure_operator.cli import render
from perdure_operator.cli.client import NotFound, read
from perdure_operator.cli.connection import Connection
from perdure_operator.cli.context import USAGE, Format, Namespace, complete, connect, fail, show
from perdure_operator.cli.render import Output
from perdure_operator.cli.target import choice
from perdure_operator.cli.verbs import JSON_HELP, payload
from perdure_operator.cli.views import DeliveryView
from perdure_operator.domain.trigger import DeliveryState

MAX_LISTED = 100_000


def complete_triggers(ctx: typer.Context, incomplete: str) -> list[str]:
    return complete(ctx, incomplete, lambda connection, place: connection.trigger_names(place))


def complete_dead(ctx: typer.Context, incomplete: str) -> list[str]:
    def dead(connection: Connection, place: str) -> list[str]:
        return [item["delivery_id"] for item in _dead(connection, *connection.split(ctx.params["trigger"], place))]

    return complete(ctx, incomplete, dead)


TriggerName = Annotated[
    str, typer.Argument(metavar="TRIGGER", help="Name of a Trigger, or NAMESPACE/NAME.", autocompletion=complete_triggers)
]


def deliveries(
    trigger: TriggerName,
    state: Annotated[DeliveryState | None, typer.Option(case_sensitive=False, help="Only deliveries in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="How many at most.")] = 100,
    namespace: Namespace = None,
    output: Format = Output.TABLE,
) -> None:
    """The firings of a trigger and what became of each, the youngest first."""
    connection = connect()
    place, name = connection.split(trigger, namespace)
    found = list(islice(connection.client.delivery_items(place, name, state=state, page=limit + 1), limit + 1))
    items = found[:limit]
    if items or output in (Output.JSON, Output.YAML):
        show(output, {"items": items}, lambda: render.deliveries(read(list[DeliveryView], items), wide=output is Output.WIDE))
    else:
        typer.echo(f"no {state.lower() + ' ' if state else ''}deliveries of trigger {place}/{name}", err=True)
    if len(found) > limit:
        typer.echo("there are older ones: --limit shows more", err=True)


def redrive(
    trigger: TriggerName,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of dead deliveries.", autocompletion=complete_dead)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All dead deliveries of the trigger.")] = False,
    namespace: Namespace = None,
    output: Format = Output.TABLE,
) -> None:
    """Try dead deliveries of a trigger anew: those that were given up because no run could be made."""
    if bool(ids) == everything:
        fail("say which deliveries", f"Give ids (`{choice().program} deliveries {trigger} --state dead` lists them) or --all.", USAGE)
    connection = connect()
    place, name = connection.split(trigger, namespace)
    answers = []
    # All of them before the first is redriven: it may die again meanwhile, and is not to be met twice.
    for id in [item["delivery_id"] for item in _dead(connection, place, name)] if everything else ids or ():
        try:
            answers.append(connection.client.redrive(place, name, id))
        except NotFound:
            if everything:
                continue  # somebody else was quicker
            raise
        if output not in (Output.JSON, Output.YAML):
            print(f"delivery {id} of {place}/{name} is tried again")
    if output in (Output.JSON, Output.YAML):
        render.document({"items": answers}, output)
    elif not answers:
        typer.echo(f"no dead deliveries of trigger {place}/{name}", err=True)


def fire(
    trigger: TriggerName,
    value: Annotated[str | None, typer.Argument(metavar="[JSON]", help=f"The run's input. {JSON_HELP}")] = None,
    delivery_id: Annotated[str | None, typer.Option("--id", help="Fired twice under the same id it counts once.")] = None,
    namespace: Namespace = None,
    output: Format = Output.TABLE,
) -> None:
    """Fire a trigger by hand, whatever its source; without an input, the run gets that of the trigger's template."""
    sent, connection = payload(value), connect()
    place, name = connection.split(trigger, namespace)
    answer = connection.client.fire(place, name, sent, delivery_id or str(uuid4()))
    if output in (Output.JSON, Output.YAML):
        render.document(answer, output)
    else:
        print(f"{place}/{name} {'had fired so already' if answer.get('duplicate') else 'fired'} (delivery {answer['delivery']})")


def _dead(connection: Connection, namespace: str, trigger: str) -> list[Any]:
    return list(connection.client.delivery_items(namespace, trigger, state=DeliveryState.DEAD))
