"""Which Perdure a command means: that of a folder or that of a cluster, chosen by the program's name and the options here.

`kubectl agentrun` always means the cluster. `perdure` means the `perdure dev` that is found from this folder upwards, else the cluster;
any option of this module means the cluster.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

PERDURE, KUBECTL = "perdure", "kubectl agentrun"
PANEL = "Which cluster"


@dataclass
class Choice:
    """``meant`` is written when it is known: what the command asks, and how to ask the other, for messages. ``opened``: what is closed when
    the command has ended."""

    program: str = PERDURE
    kubeconfig: str | None = None
    context: str | None = None
    as_serviceaccount: str | None = None
    system_namespace: str | None = None
    namespace: str | None = None
    meant: str = ""
    opened: ExitStack = field(default_factory=ExitStack)

    @property
    def cluster(self) -> bool:
        named = (self.kubeconfig, self.context, self.as_serviceaccount, self.system_namespace)
        return self.program == KUBECTL or any(value is not None for value in named)

    def take(self, values: dict[str, Any]) -> None:
        """The options' values, out of those of a whole command."""
        for name in OPTIONS:
            if (value := values.pop(name, None)) is not None:
                setattr(self, name, value)


OPTIONS: dict[str, Any] = {
    "kubeconfig": Annotated[
        str | None, typer.Option("--kubeconfig", help="Kubeconfig to use; by default as kubectl.", rich_help_panel=PANEL)
    ],
    "context": Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", rich_help_panel=PANEL)],
    "as_serviceaccount": Annotated[
        str | None,
        typer.Option(
            "--as-serviceaccount", metavar="[NAMESPACE/]NAME", rich_help_panel=PANEL,
            help="Be this service account (of the run's namespace, or the given one) at the gateway, by a token of an hour. For users that "
            "have a certificate and no token.",
        ),
    ],
    "system_namespace": Annotated[
        str | None,
        typer.Option(
            "--system-namespace", metavar="NAMESPACE", envvar="PERDURE_SYSTEM_NAMESPACE", show_envvar=False, rich_help_panel=PANEL,
            help="Where Perdure is installed, if it is not found.",
        ),
    ],
}  # fmt: skip

_choice: ContextVar[Choice] = ContextVar("perdure-choice")


def begin(program: str) -> None:
    """A new command line."""
    _choice.set(Choice(program))


def choice() -> Choice:
    try:
        return _choice.get()
    except LookupError:
        begin(PERDURE)
        return _choice.get()


def on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of this module."""
    signature = inspect.signature(command, eval_str=True)
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in OPTIONS.items()]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        choice().take(values)
        choice().namespace = values.get("namespace")
        command(**values)

    parameters = [*signature.parameters.values(), *extra]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run
