"""`perdure kill`: make a crash happen, to see that nothing is lost. For local sessions."""

from __future__ import annotations

import os
import signal
from typing import Annotated, NoReturn
from uuid import UUID

import typer

from perdure_operator.cli.context import FAILED, Namespace, connect, fail
from perdure_operator.cli.local import LocalConnection

SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "STOP": signal.SIGSTOP, "CONT": signal.SIGCONT}


def kill(
    target: Annotated[
        str, typer.Argument(metavar="RUN|PART", help="A running run, whose pod is killed, or gateway-1, gateway-2, postgres.")
    ],
    namespace: Namespace = None,
    only: Annotated[str | None, typer.Option(metavar="agent|sidecar", help="Only this one of the pod's two processes.")] = None,
    how: Annotated[str, typer.Option("-s", "--signal", help=f"One of {', '.join(SIGNALS)}.")] = "KILL",
) -> None:
    """Kill the worker pod of a run, a gateway or the database, as a crash would."""
    number = SIGNALS.get(how.upper().removeprefix("SIG"))
    if number is None:
        fail(f"{how} is not a signal that is known here", f"Use one of {', '.join(SIGNALS)}.", 2)
    if only not in (None, "agent", "sidecar"):
        fail(f"{only} is no part of a pod", "Use --only agent or --only sidecar.", 2)
    connection = connect()
    if not isinstance(connection, LocalConnection) or connection.state is None or (session := connection.state.session()) is None:
        _not_here()
    parts = {gateway.name: gateway.pid for gateway in session.gateways} | {"postgres": session.postgres_pid}
    if pid := parts.get(target):
        _send(pid, number)
        print(f"{target} (process {pid}) got {number.name}")
        return
    _kill_pod(connection, *connection.split(target, namespace), only, number)


def _kill_pod(connection: LocalConnection, namespace: str, name: str, only: str | None, number: signal.Signals) -> None:
    run = connection.client.run(namespace, name)
    if run.pod_id is None:
        fail(f"{run.full_name} is {run.state} and holds no pod", "Only a running run has a worker to kill.", FAILED)
    pod = connection.state.pods().get(UUID(run.pod_id)) if connection.state is not None else None
    if pod is None or pod.ended:
        _not_here()
    for part, pid in (("agent", pod.agent_pid), ("sidecar", pod.sidecar_pid)):
        if only in (None, part):
            _send(pid, number)
            print(f"{part} of {pod.name} (process {pid}) got {number.name}")


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        fail(f"process {pid} has ended already", code=FAILED)


def _not_here() -> NoReturn:
    fail("this was not started by the `perdure dev` of this folder", "On a cluster use kubectl delete pod.", FAILED)
