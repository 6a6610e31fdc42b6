"""The command `perdure`: everything that a person does with runs. What is slow to import, a command imports when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from perdure_operator.cli import dev, kill, logs, reads, submit, verbs, verify
from perdure_operator.cli.context import Command, Commands

app = typer.Typer(
    name="perdure",
    cls=Commands,
    help="Durable runs of AI agents. Start with `perdure dev -f FILE`, then look with `get`, `why` and `logs` from another terminal.",
    epilog="Exit codes: 0 done, 1 the run failed or the answer is no, 2 wrong use, 3 not found, 4 no gateway answers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

HERE, LOOK, ACT = "On this machine", "Look", "Act"


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("perdure"))
        except PackageNotFoundError:
            typer.echo("unknown: perdure is not installed")
        raise typer.Exit


@app.callback()
def _perdure(
    _version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


COMMANDS: dict[str, list[Callable[..., None]]] = {
    HERE: [dev.dev, logs.logs, kill.kill, verify.verify],
    LOOK: [reads.get, reads.tree, reads.why, reads.events, reads.ledger, reads.journal],
    ACT: [submit.submit, verbs.signal, verbs.cancel, verbs.pause, verbs.resume],
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel)(command)


if __name__ == "__main__":
    app()
