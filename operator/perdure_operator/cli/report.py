"""`report`: one page about a run for people: what it was asked, what it did, what that cost, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from perdure.protocol import asked_about
from perdure_operator.cli import render
from perdure_operator.cli.client import read, run_path
from perdure_operator.cli.connection import Connection
from perdure_operator.cli.context import Format, Namespace, RunName, connect, show
from perdure_operator.cli.logs import ENDS
from perdure_operator.cli.render import Output
from perdure_operator.cli.story import PodName, age, clock, plain
from perdure_operator.cli.target import choice
from perdure_operator.cli.views import EventView, JournalView, LedgerView, RunView

Row = Sequence[str | Text]
MAX_ROWS = 50
MAX_VALUE = 2000
TOLD_TO_END = frozenset({"Terminated", "DevStopped", "Stopped"})
"""Reasons of run.lost of which nothing was lost: somebody ended the worker on purpose."""
WAIT_ENDS = {"wait.satisfied": "came", "wait.timed_out": "timed out", "wait.abandoned": "given up"}
RUN_ENDS = frozenset({"run.succeeded", "run.failed", "run.cancelled"})


@dataclass(frozen=True)
class Wait:
    """``ended`` None: it is open."""

    what: str
    since: str
    ended: EventView | None


def report(run: RunName, namespace: Namespace = None, output: Format = Output.TABLE) -> None:
    """One page: what a run was asked, what it did, what it cost, how it ended."""
    connection = connect()
    place, name = connection.split(run, namespace)
    client = connection.client
    answer = client.get(run_path(place, name))
    view = read(RunView, answer)
    path = (view.namespace, view.run_id)
    answers = {
        "run": answer,
        "journal": client.records(*path, "journal"),
        "ledger": client.records(*path, "ledger"),
        "descendants": client.get(run_path(*path, "tree"))["descendants"],
        "events": list(client.event_items(*path)),
    }
    show(output, answers, lambda: _page(view, answers, connection, wide=output is Output.WIDE))


def _page(view: RunView, answers: dict[str, Any], connection: Connection, *, wide: bool) -> RenderableType:
    events = read(list[EventView], answers["events"])
    journal = read(list[JournalView], answers["journal"])
    ledger = read(list[LedgerView], answers["ledger"])
    children = [run for run in read(list[RunView], answers["descendants"]) if run.parent == view.run_id]
    room = None if wide else MAX_ROWS
    parts: list[RenderableType] = [Text.assemble((plain(view.full_name), "bold"), "  ", render.phase(view.phase))]
    parts += _section("Asked", _asked(view))
    parts += _section("Did", _did(view, events, journal, ledger, children, connection.pod_names(view.pool), room))
    parts += _section("Cost", _cost(view, events, ledger, children))
    parts += _section("Ended" if view.terminal else "Now", _ended(view, connection.pod_names(view.pool)))
    return Group(*parts)


def _section(title: str, lines: Iterable[RenderableType]) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), *(Padding(line, (0, 0, 0, 2), expand=False) for line in lines)]


def _fact(name: str, value: object) -> Text:
    return Text.assemble((f"{name:<10} ", "dim"), plain(value, MAX_VALUE))


def _asked(view: RunView) -> Iterator[Text]:
    if view.summary:
        yield _fact("summary", view.summary)
    if view.objective:
        yield _fact("objective", view.objective)
    if view.input is not None:
        yield _fact("input", json.dumps(view.input, ensure_ascii=False))
    yield _fact("pool", view.pool)
    yield _fact("created", _when(view.created_at))


def _did(
    view: RunView, events: Sequence[EventView], journal: Sequence[JournalView], ledger: Sequence[LedgerView], children: Sequence[RunView],
    pod_name: PodName, room: int | None,
) -> Iterator[RenderableType]:  # fmt: skip
    at = {event.data["key"]: event.at for event in events if isinstance(event.data, dict) and event.data.get("key")}
    steps = [entry for entry in journal if entry.kind == "step"]
    waits = list(_waits(events, ledger))
    step_rows: list[Row] = [
        [clock(at.get(step.key)), step.name or step.key, render.phase(step.state), str(step.error or "")] for step in steps
    ]
    yield from _table("steps", ("AT", "STEP", "STATE", "ERROR"), step_rows, room)
    effect_rows: list[Row] = [
        [clock(at.get(entry.key)), entry.tool, render.phase(entry.state), str(entry.attempts), _receipt(entry)] for entry in ledger
    ]
    yield from _table("effects", ("AT", "TOOL", "STATE", "ATTEMPTS", "RECEIPT"), effect_rows, room)
    child_rows: list[Row] = [[run.name, render.phase(run.phase), str(run.steps), str(run.error or "")] for run in children]
    yield from _table("children", ("CHILD", "PHASE", "STEPS", "ERROR"), child_rows, room)
    wait_rows: list[Row] = [[clock(w.since), w.what, _outcome(w), _span(w.since, w.ended.at if w.ended else None)] for w in waits]
    yield from _table("waits", ("SINCE", "WAITED FOR", "OUTCOME", "FOR"), wait_rows, room)
    lease_rows: list[Row] = [[clock(start), pod_name(pod), _span(start, end), why] for start, end, pod, why in _leases(events)]
    yield from _table("workers", ("FROM", "POD", "FOR", "UNTIL"), lease_rows, room)
    if not (steps or ledger or children or waits or lease_rows):
        yield Text(f"nothing yet; {choice().program} why {view.name} says what it waits for", style="dim")


def _table(what: str, columns: Sequence[str], rows: Sequence[Row], room: int | None) -> Iterator[RenderableType]:
    if not rows:
        return
    yield Text(f"{len(rows)} {what if len(rows) > 1 else what.removesuffix('ren').removesuffix('s')}", style="dim")
    yield Padding(render.table(columns, rows[:room]), (0, 0, 0, 2), expand=False)
    if room is not None and len(rows) > room:
        yield Text(f"  and {len(rows) - room} more: -o wide", style="dim")


def _receipt(entry: LedgerView) -> str:
    return plain(entry.error or entry.provider_ref or entry.receipt, 80)


def _waits(events: Sequence[EventView], ledger: Sequence[LedgerView]) -> Iterator[Wait]:
    ends = {event.data.get("key"): event for event in events if event.kind in WAIT_ENDS}
    over = next((event for event in events if event.kind in RUN_ENDS), None)
    calls = {entry.key: entry.tool for entry in ledger}
    for event in events:
        if event.kind == "wait.opened":
            first = event.data.get("first") or {}
            name = str(first.get("name") or "")
            what = f"{str(first.get('kind', '')).replace('_', ' ')} {name}".strip() or event.data.get("name", "")
            if (key := asked_about(name)) is not None:
                what = f"decision about {calls.get(key, key)}"
            more = int(event.data.get("conditions") or 1) - 1
            yield Wait(f"{what} and {more} more" if more > 0 else what, event.at, ends.get(event.data.get("key"), over))


def _outcome(wait: Wait) -> str:
    return "open" if wait.ended is None else WAIT_ENDS.get(wait.ended.kind) or wait.ended.kind.replace(".", " ")


def _leases(events: Sequence[EventView]) -> Iterator[tuple[str, str | None, str, str]]:
    """From, until, pod, and what ended it."""
    begun: EventView | None = None
    for event in events:
        if event.kind in ENDS and begun is not None:
            yield begun.at, event.at, str(begun.data.get("pod")), _end(event)
            begun = None
        if event.kind == "run.leased":
            begun = event
    if begun is not None:
        yield begun.at, None, str(begun.data.get("pod")), ""


def _end(event: EventView) -> str:
    told = event.kind == "run.lost" and event.data.get("reason") in TOLD_TO_END
    return "stopped" if told else event.kind.removeprefix("run.")


def _cost(view: RunView, events: Sequence[EventView], ledger: Sequence[LedgerView], children: Sequence[RunView]) -> Iterator[Text]:
    leases = list(_leases(events))
    end = view.finished_at
    calls = sum(entry.attempts for entry in ledger)
    running = sum((_seconds(start, until or end) for start, until, _, _ in leases), timedelta())
    yield _fact("time", f"{_span(view.created_at, end)}, of which {_words(running)} with a worker")
    yield _fact(
        "work",
        ", ".join(
            (
                _count(view.steps, "step"),
                _count(calls, "call with an effect", "calls with effects"),
                _count(len(children), "child", "children"),
            )
        ),
    )
    yield _fact("workers", f"{_count(len(leases), 'lease')}, {_count(view.attempt, 'attempt')}")
    for name, value in (view.usage or {}).items():
        yield _fact(name, value)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def _ended(view: RunView, pod_name: PodName) -> Iterator[Text]:
    if view.terminal:
        yield _fact("at", _when(view.finished_at))
    else:
        yield _fact(
            "state", ", ".join(part for part in (view.phase, render.waiting(view) or render.with_pod_names(view.message, pod_name)) if part)
        )
    if view.error is not None:
        yield _fact("error", view.error)
    elif view.terminal and view.message:
        yield _fact("message", view.message)
    if view.result is not None:
        yield _fact("result", json.dumps(view.result, ensure_ascii=False))


def _when(at: str | None) -> str:
    return datetime.fromisoformat(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z") if at else ""


def _seconds(start: str, end: str | None) -> timedelta:
    since = datetime.fromisoformat(start)
    return (datetime.fromisoformat(end) if end else datetime.now(since.tzinfo)) - since


def _span(start: str | None, end: str | None) -> str:
    return age(start, now=datetime.fromisoformat(end) if end else None)


def _words(span: timedelta) -> str:
    now = datetime.now().astimezone()
    return age((now - span).isoformat(), now=now)
