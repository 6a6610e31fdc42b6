"""Commands that act on a run: signal, cancel, pause, resume."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from perdure_operator.cli import render
from perdure_operator.cli.client import ApiError, Client, run_path
from perdure_operator.cli.context import USAGE, Format, Namespace, RunName, connect, fail
from perdure_operator.cli.render import Output
from perdure_operator.cli.story import plain
from perdure_operator.cli.target import choice
from perdure_operator.cli.views import RunView

JSON_HELP = 'JSON, or @FILE, or - for standard input. Other text is sent as a string; what begins with { [ or " must be JSON.'


def payload(text: str | None) -> Any:
    """The value of a JSON argument. Exits with 2 when it looks like JSON and is none, or a file that it names holds none."""
    if text is None:
        return None
    if text != "-" and not text.startswith("@"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if not text.lstrip().startswith(("{", "[", '"')):
                return text
            fail(f"this is not JSON: {error}\n{_pointed(text, error)}", 'For the shell, JSON is quoted: \'{"by": "me"}\'', USAGE)
    source = "standard input" if text == "-" else text[1:]
    try:
        return json.loads(sys.stdin.read() if text == "-" else Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{source} does not hold JSON: {error}", code=USAGE)


def _pointed(text: str, error: json.JSONDecodeError) -> str:
    """The line with the mistake, and a mark below it."""
    line = text.splitlines()[error.lineno - 1] if text.splitlines()[error.lineno - 1 :] else ""
    start = max(0, error.colno - 41)
    shown = plain(line[start : start + 80])
    return f"  {shown}\n  {' ' * (error.colno - 1 - start)}^"


def signal(
    run: RunName,
    name: Annotated[str, typer.Argument(help="The name that the run waits for.")],
    value: Annotated[str | None, typer.Argument(metavar="[JSON]", help=JSON_HELP)] = None,
    signal_id: Annotated[str | None, typer.Option("--id", help="Sent twice under the same id it counts once.")] = None,
    namespace: Namespace = None,
    output: Format = Output.TABLE,
) -> None:
    """Send a signal to a run; it is kept if the run does not wait for it yet."""
    if not name or name.startswith(("{", "[", '"')):
        value = shlex.quote(name) if name else "[JSON]"
        fail("the name of the signal is missing", f"{choice().program} signal {shlex.quote(run)} NAME {value}", USAGE)
    sent, connection = payload(value), connect()
    client, (place, run_name) = connection.client, connection.split(run, namespace)
    # Looked at before, because of a wait for several signals nothing may be left of this one afterwards.
    other = _other_waits(client, place, run_name, name) if output not in (Output.JSON, Output.YAML) else ""
    answer = client.signal(place, run_name, name, sent, signal_id or str(uuid4()))
    if output in (Output.JSON, Output.YAML):
        render.document(answer, output)
    else:
        print(f"signal {name} {'was there already' if answer.get('duplicate') else 'sent'} (event {answer['seq']} of {place}/{run_name})")
        if other and not answer.get("duplicate"):
            print(f"the run does not wait for it now; it waits for: {other}")


def _other_waits(client: Client, namespace: str, run: str, name: str) -> str:
    """What a suspended run waits for, if not for the signal ``name``. Empty as well if that cannot be known."""
    if (view := _seen(client, namespace, run)) is None:
        return ""
    waits = view.waiting_for or []
    if view.state != "Suspended" or any(wait.kind == "signal" and wait.name == name for wait in waits):
        return ""
    return ", ".join(plain(wait) for wait in waits)


def _seen(client: Client, namespace: str, run: str) -> RunView | None:
    """The run, if this person may read it: to act needs no reading."""
    try:
        return client.run(namespace, run)
    except ApiError:
        return None


def cancel(
    run: RunName,
    reason: Annotated[str | None, typer.Option(help="Is kept in the log.")] = None,
    namespace: Namespace = None,
    output: Format = Output.TABLE,
) -> None:
    """Cancel a run and its children: the agent is asked to stop, then made to."""
    _verb("cancel", run, namespace, output, {"reason": reason} if reason else {})


def pause(run: RunName, namespace: Namespace = None, output: Format = Output.TABLE) -> None:
    """Park a run: it gives its pod back and keeps what comes in until it is resumed."""
    _verb("pause", run, namespace, output, {})


def resume(run: RunName, namespace: Namespace = None, output: Format = Output.TABLE) -> None:
    """Let a paused run go on."""
    _verb("resume", run, namespace, output, {})


def _verb(verb: str, run: str, namespace: str | None, output: Output, body: dict[str, str]) -> None:
    connection = connect()
    place, name = connection.split(run, namespace)
    as_document = output in (Output.JSON, Output.YAML)
    # Looked at before: a run that waits is Cancelled at once, so the answer does not tell a first cancel from a second.
    before = _seen(connection.client, place, name) if verb == "cancel" and not as_document else None
    answer = connection.client.send("POST", run_path(place, name, verb), body)
    if as_document:
        render.document(answer, output)
    elif before is not None and before.state == "Cancelled":
        print(f"{place}/{name} is Cancelled already")
    else:
        said = {"cancel": "asked to cancel", "pause": "asked to pause", "resume": "resumed"}[verb]
        print(f"{place}/{name} {said} (it is {answer['state']})")
