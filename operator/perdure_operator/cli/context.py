"""What all commands share: the options, what they work on, how an answer is shown, and how errors become exit codes.

Exit codes: 0 done · 1 the run failed, or the answer is no · 2 wrong use · 3 not found · 4 not allowed · 5 not reachable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from typer.core import TyperCommand, TyperGroup

from perdure_operator.cli import render
from perdure_operator.cli.client import ApiError, Client, Unavailable
from perdure_operator.cli.connection import Connection
from perdure_operator.cli.local import LocalConnection, starting
from perdure_operator.cli.render import Output
from perdure_operator.cli.target import KUBECTL, PERDURE, Choice, begin, choice
from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.state import StateDir

FAILED, USAGE, NOT_FOUND, FORBIDDEN, UNREACHABLE = 1, 2, 3, 4, 5
BY_STATUS = {400: USAGE, 413: USAGE, 422: USAGE, 404: NOT_FOUND, 401: FORBIDDEN, 403: FORBIDDEN, 503: UNREACHABLE}
BY_CODE = {"no-cluster": UNREACHABLE, "no-credential": FORBIDDEN}
FOR_CLUSTER = "For a cluster: --context NAME, or `kubectl agentrun`."
FOR_LOCAL = "For a `perdure dev`: start it, or go to its folder, and give none of --context --kubeconfig."
ALL_NAMESPACES = "-"
PYDANTIC = "Value error, "
"""What typer leaves in front of its own words about a wrong value."""
NEW_RUN = "A run that has ended stays ended. For a new one: "

Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Namespace of the run or trigger; that of the context."),
]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Every namespace.")]
Format = Annotated[Output, typer.Option("-o", "--output", help="How the answer is shown.", case_sensitive=False)]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Go on as more comes.")]


def complete(ctx: typer.Context, incomplete: str, names: Callable[[Connection, str], Iterable[str]]) -> list[str]:
    """What of ``names`` (of a namespace) the shell may go on with; silent when nobody can be asked."""
    before = ctx.parent.params if ctx.parent else {}
    given = {**before, **{name: value for name, value in ctx.params.items() if value is not None}}
    try:
        choice().take(given)
        connection = connect()
        place = given.get("namespace") or connection.default_namespace
        return [name for name in names(connection, place) if name.startswith(incomplete)]
    except (ApiError, PerdureError, OSError):
        return []
    finally:
        choice().opened.close()


def complete_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    return complete(ctx, incomplete, lambda connection, place: (run.name for run in connection.client.runs(place)))


RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name or id of a run, or NAMESPACE/NAME.", autocompletion=complete_runs)]


class Command(TyperCommand):
    """Its help shows no type for a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Commands(TyperGroup):
    """Turns typed errors into one message, what to do, and an exit code."""

    program = PERDURE

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        begin(self.program)
        return super().make_context(info_name, args, parent, **extra)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ApiError as error:
            fail(str(error), _action(error), error.exit_code)
        except PerdureError as error:
            fail(str(error), error.advice, BY_CODE.get(error.code) or BY_STATUS.get(error.status, FAILED))
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(PYDANTIC)
            raise
        except BrokenPipeError:
            # The reader (head, less) has gone; Python would complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            choice().opened.close()


class KubectlCommands(Commands):
    program = KUBECTL


def fail(message: str, action: str = "", code: int = FAILED) -> NoReturn:
    """Print what is wrong and what to do on standard error, and exit."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    errors.print("error: ", style="bold red", end="")
    errors.print(message, markup=False)
    if action:
        errors.print(action, markup=False)
    if code in (NOT_FOUND, FORBIDDEN, UNREACHABLE) and (meant := choice().meant):
        errors.print(meant, style="dim", markup=False)
    raise typer.Exit(code)


def _action(error: ApiError) -> str:
    """What to do, in words of the program that was called: the gateway does not know which that is."""
    match error.code:
        case "run-finished":
            return f"{NEW_RUN}{_renamed('FILE')}."
        case "run-not-found":
            return f"Check namespace and name; `{choice().program} get` lists the runs."
        case "delivery-not-found":
            return f"Only dead ones can be redriven; `{choice().program} deliveries TRIGGER --state dead` lists them."
    return error.action


def new_run(file: str) -> str:
    """How to start a run anew whose name is taken by one that has ended."""
    again = _renamed(file)
    return again if choice().program == KUBECTL else f"{again}; or `perdure dev --fresh -f {file}`, which forgets every run of this folder"


def _renamed(file: str) -> str:
    return f"give it another metadata.name in {file} and `{choice().program} submit {file}`"


def connect() -> Connection:
    """What :mod:`target` says. Raises Unavailable, PerdureError."""
    environ, chosen = os.environ, choice()
    if chosen.cluster:
        return _cluster(chosen, "" if chosen.program == KUBECTL else FOR_LOCAL)
    if server := environ.get("PERDURE_SERVER"):
        chosen.meant = f"Meant was the gateway in PERDURE_SERVER. {FOR_CLUSTER}"
        return LocalConnection(Client(server.split(","), environ.get("PERDURE_TOKEN", "")), StateDir.find(Path.cwd(), environ))
    state = StateDir.find(Path.cwd(), environ)
    if state is None:
        try:
            return _cluster(chosen, f"No `perdure dev` was found from this folder upwards. {FOR_LOCAL}")
        except PerdureError as error:
            if error.code != "no-cluster":
                raise
            chosen.meant = ""
            raise Unavailable(
                f"no `perdure dev` was found from this folder upwards, and no cluster either ({error})",
                code="nowhere",
                action=f"Start one here: `perdure dev -f FILE…`, or go to its folder. {FOR_CLUSTER}",
            ) from None
    session = state.session()
    if (pid := starting(state, session)) is not None:
        chosen.meant = f"Meant was that `perdure dev`. {FOR_CLUSTER}"
        raise Unavailable(
            f"perdure dev (process {pid}) is starting; wait for its line `ready:`",
            code="starting",
            action="Then try again. (If it is being stopped, start it again.)",
            retryable=True,
        )
    if session is None:
        # Not the cluster: somebody who has stopped it does not expect their next `cancel` to reach one.
        raise Unavailable(
            f"the `perdure dev` of {state.path.parent} is stopped",
            code="stopped",
            action=f"Start it again there: `perdure dev -f FILE…`; everything goes on. {FOR_CLUSTER}",
        )
    chosen.meant = f"Meant was the `perdure dev` of {state.path}. {FOR_CLUSTER}"
    hint = f"Is `perdure dev` (process {session.pid}) still running? Start it again with the state folder {state.path}; everything goes on."
    return LocalConnection(Client(session.urls, session.token, hint=hint), state)


def _cluster(chosen: Choice, why: str) -> Connection:
    from perdure_operator.cli.cluster import ClusterConnection

    chosen.meant = f"Meant was a cluster. {why}".strip()
    connection = ClusterConnection(chosen)
    chosen.opened.callback(connection.close)
    chosen.meant = f"Meant was the cluster of the context {connection.context}. {why}".strip()
    return connection


def show(output: Output, answer: Any, for_people: Callable[[], RenderableType]) -> None:
    """The API's answer in the asked-for form."""
    if output in (Output.JSON, Output.YAML):
        render.document(answer, output)
    else:
        render.console().print(for_people())
