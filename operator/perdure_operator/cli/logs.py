"""`perdure logs`: what a run's agent printed, over all its pods, across suspends and crashes. For local sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from perdure_operator.cli.client import Client
from perdure_operator.cli.context import FAILED, Follow, Namespace, RunName, connect, fail, split
from perdure_operator.cli.views import EventView
from perdure_operator.local.state import PodRecord, StateDir

POLL_SECONDS = 0.2


def logs(
    run: RunName,
    namespace: Namespace = "default",
    follow: Follow = False,
    sidecar: Annotated[bool, typer.Option("--sidecar", help="The sidecars' logs instead.")] = False,
    prefix: Annotated[bool, typer.Option("--prefix", help="Begin each line with the pod's name.")] = False,
) -> None:
    """What the agent of a run printed, in all its pods, one after the other. (A pod that is reused shows its other runs too.)"""
    connection = connect()
    if connection.state is None:
        fail("logs are kept by `perdure dev` only", "On a cluster use kubectl logs with the pod that `perdure get -o wide` shows.", FAILED)
    place, name = split(run, namespace)
    for pod in _pods(connection.client, connection.state, place, name, follow=follow):
        file = Path(pod.log).with_suffix(".sidecar.log") if sidecar else Path(pod.log)
        for line in _lines(file, connection.state, pod.pod, follow=follow):
            typer.echo(f"{pod.name} | {line}" if prefix else line, nl=False)


def _pods(client: Client, state: StateDir, namespace: str, run: str, *, follow: bool) -> Iterator[PodRecord]:
    """The pods that held the run, in order; with ``follow`` the ones to come too."""

    def of(event: EventView) -> str | None:
        return str(event.data["pod"]) if event.kind == "run.leased" and isinstance(event.data, dict) and event.data.get("pod") else None

    seen: set[UUID] = set()
    for event in client.tail(namespace, run) if follow else client.events(namespace, run):
        if (pod_id := of(event)) is None or UUID(pod_id) in seen:
            continue
        seen.add(UUID(pod_id))
        if (pod := state.pods().get(UUID(pod_id))) is not None:
            yield pod
        else:
            typer.echo(f"(no log of the pod {pod_id}: it was not started here)", err=True)


def _lines(file: Path, state: StateDir, pod: UUID, *, follow: bool) -> Iterator[str]:
    """The log's lines; with ``follow`` until its pod has ended."""
    try:
        with file.open(encoding="utf-8", errors="replace") as log:
            while True:
                ended = not follow or bool(state.pods()[pod].ended)
                while line := log.readline():
                    yield line
                if ended:
                    return
                time.sleep(POLL_SECONDS)
    except FileNotFoundError:
        typer.echo(f"(the log {file} is gone)", err=True)
