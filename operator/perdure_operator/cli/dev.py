"""`perdure dev`: the command. What it does is in :mod:`session`, which is imported when it is called: it needs half of the project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from perdure_operator.cli.context import USAGE, Namespace, fail
from perdure_operator.cli.local import holder
from perdure_operator.local.state import NAME, StateDir


def dev(
    files: Annotated[list[Path] | None, typer.Option("-f", "--filename", help="Manifests: YAML files or folders.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when all runs from the files have ended; exit 1 if one failed.")] = False,
    state_dir: Annotated[
        Path | None, typer.Option(envvar="PERDURE_STATE", help=f"Where data and logs are kept; by default {NAME} in this folder.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="First forget what the state folder holds.")] = False,
    max_pods: Annotated[int | None, typer.Option(min=1, help="Worker pods at a time; by default four for each core.")] = None,
    namespace: Namespace = None,
) -> None:
    """Run Perdure on this machine: database, gateways and worker processes. Ctrl-C stops it; started again it goes on."""
    import asyncio

    from perdure_operator.cli import session
    from perdure_operator.local.disk import explained
    from perdure_operator.local.manifests import DEFAULT_NAMESPACE, load, runs, warnings

    namespace = namespace or DEFAULT_NAMESPACE
    loaded = load(files or [], namespace=namespace)
    if once and not runs(loaded):
        fail("--once waits for runs, and the files hold none", "Give files with an AgentRun: perdure dev -f run.yaml --once", USAGE)
    for line in warnings(loaded):
        typer.echo(line, err=True)
    if state_dir is None:
        _alone(Path.cwd())
    state = StateDir(state_dir or Path(NAME))
    again = _again(files or [], state_dir or Path(NAME), max_pods, namespace)
    with explained(state):
        state.create()
        state.acquire()
        if fresh:
            state.clear()
            state.create()
        code = asyncio.run(session.run(state, loaded, once=once, max_pods=max_pods, again=again))
    raise typer.Exit(code)


def _alone(folder: Path) -> None:
    """Exits when the other commands, called here, would mean a session of a folder above, which runs: a second one would hide it."""
    found = StateDir.find(folder, {})
    if found is not None and found.path.parent != folder and holder(found) is not None:
        action = f"Go there, or give this one a folder of its own with --state-dir {NAME}."
        fail(f"a `perdure dev` is running in {found.path.parent}", action)


def _again(files: list[Path], state_dir: Path, max_pods: int | None, namespace: str) -> str:
    """The command that goes on after this one. Without --fresh and --once, which would not."""
    words = [word for file in files for word in ("-f", str(file))]
    words += ["--state-dir", str(state_dir)] if state_dir != Path(NAME) else []
    words += ["--max-pods", str(max_pods)] if max_pods is not None else []
    words += ["-n", namespace] if namespace != "default" else []
    return shlex.join(["perdure", "dev", *words])
