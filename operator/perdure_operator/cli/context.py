"""What all commands share: the options, how the gateway is found, how an answer is shown, and how errors become exit codes.

Exit codes: 0 done · 1 the run failed, or the answer is no · 2 wrong use · 3 not found · 4 no gateway answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn
from uuid import UUID

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from perdure_operator.cli import render
from perdure_operator.cli.client import ApiError, Client, Unavailable
from perdure_operator.cli.render import Output
from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.state import StateDir

FAILED, USAGE = 1, 2
ALL_NAMESPACES = "-"

Namespace = Annotated[str, typer.Option("-n", "--namespace", envvar="PERDURE_NAMESPACE", help="Namespace of the run.")]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Every namespace.")]
Format = Annotated[Output, typer.Option("-o", "--output", help="How the answer is shown.", case_sensitive=False)]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Go on as more comes.")]


def complete_runs(incomplete: str) -> list[str]:
    """Names of runs, for the shell's completion; silent when there is no gateway."""
    try:
        return [run.name for run in connect().client.runs(ALL_NAMESPACES) if run.name.startswith(incomplete)]
    except (ApiError, PerdureError, OSError):
        return []


RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name or id of a run, or NAMESPACE/NAME.", autocompletion=complete_runs)]


class Commands(TyperGroup):
    """Turns typed errors into one message, what to do, and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ApiError as error:
            fail(str(error), error.action, error.exit_code)
        except PerdureError as error:
            fail(str(error), error.advice, USAGE if error.status == 400 else FAILED)
        except BrokenPipeError:
            # The reader (head, less) has gone; Python would complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def fail(message: str, action: str = "", code: int = FAILED) -> NoReturn:
    """Print what is wrong and what to do on standard error, and exit."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    errors.print("error: ", style="bold red", end="")
    errors.print(message, markup=False)
    if action:
        errors.print(action, markup=False)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Connection:
    """A gateway, and the state folder of the local session when there is one."""

    client: Client
    state: StateDir | None

    def pod_name(self, pod_id: str) -> str:
        """``worker-3`` of a local pod, else the beginning of its id."""
        name = self.state.pod_name(UUID(pod_id)) if self.state is not None else None
        return name or pod_id[:8]


def connect() -> Connection:
    """PERDURE_SERVER and PERDURE_TOKEN, else the running `perdure dev` whose state folder is nearest. Raises Unavailable."""
    environ = os.environ
    state = StateDir.find(Path.cwd(), environ)
    if server := environ.get("PERDURE_SERVER"):
        return Connection(Client(server.split(","), environ.get("PERDURE_TOKEN", "")), state)
    session = state.session() if state is not None else None
    if state is None or session is None:
        raise Unavailable(
            "no gateway is known here",
            code="no-session",
            action="Start `perdure dev` in this folder or one above it, or set PERDURE_STATE, or PERDURE_SERVER and PERDURE_TOKEN.",
        )
    hint = f"Is `perdure dev` (process {session.pid}) still running? Start it again with the state folder {state.path}; everything goes on."
    return Connection(Client(session.urls, session.token, hint=hint), state)


def split(run: str, namespace: str) -> tuple[str, str]:
    """Namespace and name of ``NAME`` or ``NAMESPACE/NAME``."""
    before, slash, after = run.partition("/")
    return (before, after) if slash else (namespace, run)


def show(output: Output, answer: Any, for_people: Callable[[], RenderableType]) -> None:
    """The API's answer in the asked-for form."""
    if output in (Output.JSON, Output.YAML):
        render.document(answer, output)
    else:
        render.console().print(for_people())
