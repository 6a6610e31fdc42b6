"""Tables and documents for people: what kubectl would print, in its words and columns."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import yaml
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from perdure_operator.cli.story import PodName, PodNames, age, clock, plain, tell
from perdure_operator.cli.views import DeliveryView, EventView, JournalView, LedgerView, PoolView, RunView, WaitingFor, WhyView

STYLES = {
    "Pending": "yellow",
    "Running": "cyan",
    "Suspended": "blue",
    "Paused": "magenta",
    "Cancelling": "magenta",
    "Succeeded": "green",
    "Failed": "bold red",
    "Cancelled": "dim",
    "SUCCEEDED": "green",
    "UNKNOWN": "bold red",
    "FAILED": "red",
    "DONE": "green",
    "DEAD": "bold red",
}


_POD = re.compile(r"\bpod ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")


class Output(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


class _Lines(Console):
    """A console whose lines end where their text does: rich fills up the last column of a table."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as printed:
            super().print(*objects, **options)
        self.file.write("".join(f"{line.rstrip(' ')}\n" for line in printed.get().splitlines()))
        self.file.flush()


def console() -> Console:
    """Standard output; without a terminal lines are as long as they need to be, and plain."""
    if sys.stdout.isatty():
        return Console(highlight=False, soft_wrap=True, emoji=False)
    return _Lines(highlight=False, soft_wrap=True, emoji=False, width=10_000)


def document(value: Any, output: Output) -> None:
    """The API's own JSON, or the same as YAML."""
    if output is Output.JSON:
        print(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), end="")


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    found = Table(*columns, box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in found.columns:
        column.no_wrap = True
        column.overflow = "ellipsis"
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
    return found


def phase(state: str) -> Text:
    return Text(plain(state), style=STYLES.get(state, ""))


def waiting(run: RunView) -> str:
    """What it waits for, or why it does not run."""
    if run.terminal:
        return str(run.error) if run.error and run.state == "Failed" else ""
    if run.waiting_for and not run.parked:
        more = len(run.waiting_for) - 1
        return str(run.waiting_for[0]) + (f" +{more}" if more else "")
    return (run.message or run.reason) if run.state in ("Pending", "Suspended") else ""


def progress(run: RunView) -> str:
    """``3/7 write`` when the agent has a plan, else the number of journaled steps."""
    if isinstance(run.progress, dict) and run.progress.get("total"):
        return f"{run.progress.get('done', 0)}/{run.progress['total']} {run.progress.get('current') or ''}".strip()
    return str(run.progress) if isinstance(run.progress, str) else f"{run.steps} step{'' if run.steps == 1 else 's'}"


COLUMNS = ("NAME", "PHASE", "WAITING-FOR", "STEP/PROGRESS", "ATTEMPT", "POD", "AGE")
WIDE = ("POOL", "CHILDREN", "ID", "SUMMARY")


def run_row(run: RunView, pod_names: PodNames, *, with_namespace: bool) -> list[str | Text]:
    name = run.full_name if with_namespace else run.name
    pod = pod_names(run.pool)(run.pod_id) if run.pod_id else ""
    return [
        name,
        phase(run.phase),
        plain(waiting(run), 60),
        progress(run),
        str(run.attempt),
        pod,
        age(run.created_at),
    ]


def runs(found: Iterable[RunView], pod_names: PodNames, *, wide: bool = False, with_namespace: bool = False) -> Table:
    def row(run: RunView) -> list[str | Text]:
        children = f"{run.children.ended} of {run.children.total} done" if run.children.total else ""
        extra = [run.pool, children, run.run_id, run.summary or run.objective]
        return run_row(run, pod_names, with_namespace=with_namespace) + (extra if wide else [])

    return table(COLUMNS + (WIDE if wide else ()), map(row, found))


def pools(found: Iterable[PoolView], *, with_namespace: bool = False) -> Table:
    def row(pool: PoolView) -> list[str | Text]:
        capacity = pool.spec.get("capacity") or {}
        counts = [str(n) for n in (pool.runnable, pool.idle, pool.starting, pool.leased)]
        warm = f"{capacity.get('minIdle', 0)}..{capacity.get('maxIdle', '')}"
        trouble = plain(pool.trouble.message, 100) if pool.trouble else ""
        return [pool.pool if with_namespace else pool.pool.partition("/")[2], *counts, warm, str(capacity.get("maxPods", "")), trouble]

    return table(("NAME", "WAITING-RUNS", "IDLE", "STARTING", "LEASED", "WARM", "MAX", "TROUBLE"), map(row, found))


def events(found: Iterable[EventView], pod_name: PodName) -> Table:
    return table(("SEQ", "TIME", "EPOCH", "KIND", "WHAT"), map(event_row(pod_name), found))


def event_row(pod_name: PodName) -> Callable[[EventView], list[str | Text]]:
    return lambda e: [str(e.seq), clock(e.at), str(e.epoch), e.kind, tell(e, pod_name)]


def questions(run: RunView, command: Callable[[str], str]) -> Text:
    """Which calls a person must decide about, and where it is said how. Empty if there is none."""
    asked = ", ".join(wait.tool for wait in run.waiting_for or [] if wait.tool)
    return Text(f"a person must decide what became of {plain(asked)}: {command('why')} {run.name}") if asked else Text()


def ledger(found: Iterable[LedgerView], *, wide: bool = False) -> Table:
    def row(entry: LedgerView) -> list[str | Text]:
        key = entry.key if wide else entry.key[:12]
        ends = [plain(entry.receipt, 200 if wide else 40), entry.provider_ref or "", plain(entry.error or "", 200 if wide else 60)]
        return [key, entry.tool, entry.effect, phase(entry.state), str(entry.attempts), entry.step or "", *ends]

    return table(("KEY", "TOOL", "EFFECT", "STATE", "ATTEMPTS", "STEP", "RECEIPT", "PROVIDER-REF", "ERROR"), map(row, found))


def journal(found: Iterable[JournalView]) -> Table:
    def row(entry: JournalView) -> list[str | Text]:
        return [str(entry.seq), entry.kind, entry.key, entry.state, str(entry.attempts or ""), str(entry.error) if entry.error else ""]

    return table(("SEQ", "KIND", "KEY", "STATE", "ATTEMPTS", "ERROR"), map(row, found))


def deliveries(found: Iterable[DeliveryView], *, wide: bool = False) -> Table:
    def row(one: DeliveryView) -> list[str | Text]:
        cells: list[str | Text] = [one.delivery_id, one.source, phase(one.state), age(one.created_at), str(one.attempts), one.run or ""]
        extra = [one.fire_at or "", one.dedup_key, one.superseded_by or ""] if wide else []
        return [*cells, *extra, plain(one.message, 1000 if wide else 100)]

    columns = ("ID", "SOURCE", "STATE", "AGE", "ATTEMPTS", "RUN", *(("DUE", "KEY", "SUPERSEDED-BY") if wide else ()), "MESSAGE")
    return table(columns, map(row, found))


def tree(root: RunView, descendants: Sequence[RunView], pod_names: PodNames) -> Tree:
    children: dict[str | None, list[RunView]] = {}
    for run in descendants:
        children.setdefault(run.parent, []).append(run)
    top = Tree(_label(root, pod_names))
    open_branches = [(top, root)]
    while open_branches:
        branch, run = open_branches.pop()
        open_branches += [(branch.add(_label(child, pod_names)), child) for child in children.get(run.run_id, [])]
    return top


def _label(run: RunView, pod_names: PodNames) -> Text:
    text = Text.assemble(plain(run.name), "  ", phase(run.phase))
    for part in (waiting(run), progress(run), pod_names(run.pool)(run.pod_id) if run.pod_id else "", plain(run.summary)):
        if part:
            text.append(f"  {plain(part)}", style="dim")
    return text


def why(view: WhyView, run: str, pod_name: PodName, command: Callable[[str], str]) -> RenderableType:
    """State, reason, and for each wait what would end it. The pod has the name that the other commands call it by. ``command``: the
    beginning of a command line for a verb."""
    run = shlex.quote(run)
    lines = [Text.assemble(phase(view.state), f" for {age(view.since)}" if view.since else "")]
    if view.paused_by or not view.waiting_for:
        message = with_pod_names(view.message, pod_name)
        if (said := ": ".join(p for p in (view.reason, message) if p)) not in ("", view.state):
            lines.append(Text(plain(said, 1000)))
    lines += [Text(f"    {plain(line)}", style="dim") for line in view.pool_trouble.last_words] if view.pool_trouble else []
    if view.paused_by and view.state != "Suspended":
        lines.append(Text("  a pause is requested"))
    for by in view.paused_by:
        lines.append(_way("to resume it", "set spec.desiredState: Running" if by == "spec" else f"{command('resume')} {run}"))
    for wait in view.waiting_for:
        what = f"waits for {wait}"
        if wait.call is not None:
            what = f"a person must decide: nobody knows whether {plain(wait.call, 400)} happened"
        since, at = f"for {age(wait.since)}" if wait.since else "", f"due {clock(wait.at)}" if wait.at else ""
        until = f"until {clock(wait.timeout_at)} at the latest" if wait.timeout_at else ""
        lines.append(Text("  " + plain(", ".join(p for p in (what, since, at, until) if p), 500)))
        if wait.refused is not None:
            lines.append(_way("one came that it could not use", f"{wait.refused.reason} (expected: {wait.refused.expected})"))
        lines += _ways(wait, run, command)
    if (size := view.size) is not None:
        lines.append(
            _way("it has written", f"{_of(size.bytes, size.max_bytes)}; {_of(size.stored_bytes, size.max_stored_bytes)} as stored")
        )
    return Text("\n").join(lines)


def _of(written: int, most: int | None) -> str:
    return f"{written} bytes" if most is None else f"{written} of {most} bytes ({written * 100 // most} %)"


def afterwards(state: str, entries: Sequence[LedgerView], run: str, command: Callable[[str], str]) -> Text | None:
    """What is still to be known of a run that has ended."""
    unknown = sorted({entry.tool for entry in entries if entry.state == "UNKNOWN"})
    lines = [_way(f"nobody knows whether {', '.join(unknown)} happened", f"{command('ledger')} {shlex.quote(run)}")] if unknown else []
    lines += [_way("what its agent said", f"{command('logs')} {shlex.quote(run)}")] if state == "Failed" else []
    return Text("\n").join(lines) if lines else None


def with_pod_names(message: str, pod_name: PodName) -> str:
    """Pods as the other commands call them."""
    return _POD.sub(lambda found: f"pod {pod_name(found[1])}", message)


def _way(what: str, how: str) -> Text:
    return Text(f"    {what}: {plain(how, 1000)}", style="dim")


def _ways(wait: WaitingFor, run: str, command: Callable[[str], str]) -> Iterator[Text]:
    """How to end a wait."""
    send = f"{command('signal')} {run} {shlex.quote(wait.name)}"
    if (call := wait.call) is not None:
        where = f", in step {call.step}" if call.step else ""
        yield _way("the call   ", f"effect {call.key}, attempt {call.attempts}{where}" + (f"; {call.error}" if call.error else ""))
        yield _way("it happened", f"""{send} '{{"happened": true, "response": RESPONSE}}'""")
        yield _way("RESPONSE   ", f"what {call.tool} would have returned, as JSON; null if nothing")
        yield _way("it did not ", f"""{send} '{{"happened": false}}' (then it is done again)""")
    elif wait.kind == "signal":
        expected = wait.refused.expected if wait.refused else ""
        yield _way("to send it", f"{send} PAYLOAD" if expected else send)
        if expected:
            yield _way("PAYLOAD   ", f"JSON that can be read as {expected}, in quotes")
    elif wait.kind == "child_done":
        yield _way("to see it", f"{command('why')} {shlex.quote(wait.name)}")
