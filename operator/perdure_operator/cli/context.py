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
from typer.core import TyperCommand, TyperGroup

from perdure_operator.cli import render
from perdure_operator.cli.client import ApiError, Client, Unavailable
from perdure_operator.cli.render import Output
from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.state import NAME, Session, StateDir

FAILED, USAGE = 1, 2
CLOCK_SECONDS = 2.0
"""How exact the start of a process is known."""
ALL_NAMESPACES = "-"
NEW_RUN = "A run that has ended stays ended. For a new one: "

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

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ApiError as error:
            action = error.action if error.code != "run-finished" else f"{NEW_RUN}{new_run('FILE')}."
            fail(str(error), action, error.exit_code)
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


def new_run(file: str) -> str:
    """How to start a run anew whose name is taken by one that has ended."""
    return f"give it another metadata.name in {file} and `perdure submit {file}`; or forget all runs: `perdure dev --fresh -f {file}`"


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
    if (starting := _starting(state, session)) is not None:
        raise Unavailable(
            f"perdure dev (process {starting}) is starting; wait for its line `ready:`",
            code="starting",
            action="Then try again. (If it is being stopped, start it again.)",
            retryable=True,
        )
    if state is None or session is None:
        raise Unavailable(
            "no gateway is known here",
            code="no-session",
            action="Start `perdure dev` in this folder or one above it, or set PERDURE_STATE, or PERDURE_SERVER and PERDURE_TOKEN.",
        )
    hint = f"Is `perdure dev` (process {session.pid}) still running? Start it again with the state folder {state.path}; everything goes on."
    return Connection(Client(session.urls, session.token, hint=hint), state)


def _starting(state: StateDir | None, session: Session | None) -> int | None:
    """The living process that has taken the state folder, if it is not that of ``session``. Without ``state``: the nearest folder.

    The lock itself is not tried: for a moment that would keep a `perdure dev` from getting it. A process that is younger than its entry
    in the lock is another one with the same id.
    """
    import psutil

    folders = [state.path] if state is not None else [folder / NAME for folder in (Path.cwd(), *Path.cwd().parents)]
    for lock in (folder / "lock" for folder in folders):
        try:
            pid, written = int(lock.read_text()), lock.stat().st_mtime
            if session is not None and session.pid == pid:
                return None
            if psutil.Process(pid).create_time() <= written + CLOCK_SECONDS:
                return pid
        except (OSError, ValueError, psutil.Error):
            continue
    return None


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
