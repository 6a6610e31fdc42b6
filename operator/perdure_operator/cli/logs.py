"""`logs`: what a run's agent printed, over all its pods, across suspends and crashes.

The run's log says which pods had it; each pod's own log is then read where it is, a file or the apiserver. To follow, one thread reads
the run's events and this one prints: a pod is left when its lease is over and it says no more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Annotated, Any

import typer

from perdure_operator.cli.client import ApiError, Client
from perdure_operator.cli.connection import Lease, LogGone
from perdure_operator.cli.context import Follow, Namespace, RunName, connect
from perdure_operator.cli.story import PodName, clock, plain
from perdure_operator.cli.views import EventView

ENDS = frozenset(
    f"run.{what}" for what in ("suspended", "lost", "retrying", "yielded", "paused", "succeeded", "failed", "cancelled", "leased")
)
"""After any of these the pod that had the run has it no more."""


def logs(
    run: RunName,
    namespace: Namespace = None,
    follow: Follow = False,
    sidecar: Annotated[bool, typer.Option("--sidecar", help="The sidecars' logs instead.")] = False,
    prefix: Annotated[bool, typer.Option("--prefix", help="Begin each line with the pod's name.")] = False,
) -> None:
    """What the agent of a run printed, in all its pods, one after the other. (A pod that is reused shows its other runs too.)"""
    connection = connect()
    place, name = connection.split(run, namespace)
    view = connection.client.run(place, name)
    place = view.namespace
    pod_name = connection.pod_names(view.pool)
    if view.epoch == 0:
        typer.echo(f"(no worker has had {name} yet: {plain(view.message or view.reason, 500)})", err=True)
    found = _followed if follow else _past
    ended_line, printed = True, Counter[str]()
    for number, lease in enumerate(found(connection.client, place, view.run_id, view.pool)):
        called = pod_name(lease.pod_id)
        if number and not prefix:
            typer.echo(("" if ended_line else "\n") + _separator(lease, pod_name))
        try:
            # A reused pod may have had the run before: what it printed then is printed.
            for line in islice(connection.log(lease, place, sidecar=sidecar, follow=follow), printed[lease.pod_id], None):
                printed[lease.pod_id] += 1
                typer.echo(f"{called} | {line}" if prefix else line, nl=False)
                ended_line = line.endswith("\n")
        except LogGone as gone:
            typer.echo(f"({gone})", err=True)


def _separator(lease: Lease, pod_name: PodName) -> str:
    return f"--- {clock(lease.at)} {pod_name(lease.pod_id)} goes on (attempt {lease.attempt}, epoch {lease.epoch}) ---"


class _Leases:
    """The leases that a run's events tell of."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._last: Lease | None = None

    def take(self, event: EventView) -> Lease | None:
        if event.kind in ENDS and self._last is not None:
            self._last.over.set()
        data: dict[str, Any] = event.data if isinstance(event.data, dict) else {}
        if event.kind != "run.leased" or not data.get("pod"):
            return None
        self._last = Lease(str(data["pod"]), self._pool, event.epoch, int(data.get("attempt") or 1), event.at, threading.Event())
        return self._last


def _past(client: Client, namespace: str, run: str, pool: str) -> Iterator[Lease]:
    """One for each pod: its log holds what it printed under later leases too."""
    leases = _Leases(pool)
    pods = {lease.pod_id: lease for event in client.events(namespace, run) if (lease := leases.take(event)) is not None}
    return iter(pods.values())


def _followed(client: Client, namespace: str, run: str, pool: str) -> Iterator[Lease]:
    """Those to come too, until the run is terminal. Raises ApiError."""
    queue: SimpleQueue[Lease | ApiError | None] = SimpleQueue()

    def tail() -> None:
        leases = _Leases(pool)
        try:
            for event in client.tail(namespace, run):
                if (lease := leases.take(event)) is not None:
                    queue.put(lease)
            queue.put(None)
        except ApiError as error:
            queue.put(error)

    threading.Thread(target=tail, name="tail", daemon=True).start()
    while (item := queue.get()) is not None:
        if isinstance(item, ApiError):
            raise item
        yield item
