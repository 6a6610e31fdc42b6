"""The commands `perdure` and `kubectl agentrun`: everything that a person does with runs. What is slow to import, a command imports when
it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from perdure_operator.cli import deliveries, dev, kill, logs, reads, report, submit, verbs, verify
from perdure_operator.cli.context import Command, Commands, KubectlCommands
from perdure_operator.cli.target import KUBECTL, PERDURE, on_cluster

EPILOG = "Exit codes: 0 done, 1 the run failed or the answer is no, 2 wrong use, 3 not found, 4 not allowed, 5 not reachable."
HERE, LOOK, ACT = "On this machine", "Look", "Act"
LOCAL_ONLY: list[Callable[..., None]] = [dev.dev, kill.kill, verify.verify]
COMMANDS: dict[str, list[Callable[..., None]]] = {
    LOOK: [
        reads.get, reads.tree, reads.why, reads.events, reads.ledger, reads.journal, logs.logs, report.report, deliveries.deliveries,
    ],
    ACT: [submit.submit, verbs.signal, verbs.cancel, verbs.pause, verbs.resume, deliveries.fire, deliveries.redrive],
}  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("perdure"))
        except PackageNotFoundError:
            typer.echo("unknown: perdure is not installed")
        raise typer.Exit


def _program(
    ctx: typer.Context,
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", envvar="PERDURE_NAMESPACE", show_envvar=False, help="Namespace, if a command names none."),
    ] = None,
    _version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if namespace is not None and isinstance(ctx.command, Commands):
        ctx.default_map = {name: {"namespace": namespace} for name in ctx.command.commands}


def _application(group: type[Commands], about: str, commands: Mapping[str, list[Callable[..., None]]]) -> typer.Typer:
    application = typer.Typer(
        name=group.program,
        cls=group,
        help=about,
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(on_cluster(_program))
    for panel, found in commands.items():
        for command in found:
            application.command(cls=Command, rich_help_panel=panel)(command if command in LOCAL_ONLY else on_cluster(command))
    return application


app = _application(
    Commands,
    "Durable runs of AI agents. Start with `perdure dev -f FILE`, then look with `get`, `why` and `logs` from another terminal. "
    "Where no `perdure dev` is found from this folder upwards, the commands mean the cluster of your kubeconfig.",
    {HERE: LOCAL_ONLY, **COMMANDS},
)
kubectl_app = _application(KubectlCommands, "Durable runs of AI agents in a cluster.", COMMANDS)


def perdure() -> None:
    app(prog_name=PERDURE)


def kubectl() -> None:
    kubectl_app(prog_name=KUBECTL)


if __name__ == "__main__":
    perdure()
