"""What ``make up`` runs: the whole life of one run, crash and long wait included, told to somebody who sees it for the first time.

Everything is real and on this machine: Postgres, two gateways, worker processes with their sidecars, a mail server, an object store.
The demo only pulls the triggers, looks at the public API and at the process list, and counts at the end. Exit code 1: a count is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientSession
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from examples.report.backstage import ROOT, Dev, Sinks, StartFailed, census, kill_worker, no_workers, running_dev, running_sinks
from examples.report.follow import Log, RunOver, following
from examples.report.gateway import Event, Gateway, GatewayError

MANIFESTS = Path(__file__).parent
RUN = "board-report"
LIMIT_SECONDS = 180
LOST = ("run.lost", "run.retrying")
"""The worker was seen dead by the fleet; or its sidecar could still say that its agent had died."""
console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
"""Where nobody reads on a terminal, lines are as long as they need to be."""
_started = time.monotonic()


async def main(state: Path) -> int:
    console.print("\n[bold]Perdure[/]: an agent reads five documents, writes a report, has it approved and mails it.")
    console.print("[dim]Its worker will be killed in the middle, and it will wait for a person without any process. Watch.[/]")
    async with AsyncExitStack() as stack:
        chapter("Start", "Postgres, two gateways, a fleet; a mail server, an object store and a webhook to send things to")
        sinks = await stack.enter_async_context(running_sinks(state / "sinks"))
        dev = await stack.enter_async_context(running_dev(MANIFESTS / "agentpool.yaml", state, sinks.environment, say))
        gateway = await stack.enter_async_context(Gateway(dev.url, dev.token))
        await asyncio.gather(gateway.until_pool("report"), gateway.until_pool("summarise"))
        say(f"ready; mail goes to {sinks.smtp}, the rest to {sinks.http}")

        chapter("The run starts", "one child run a document, each in a worker of its own; the parent's worker is let go meanwhile")
        await gateway.submit(RUN, manifest("agentrun.yaml", "AgentRun")["spec"])
        narrator = Narrator()
        log = await stack.enter_async_context(following(gateway, RUN, narrator))
        rendering = await log.until("the render step", lambda event: event.kind == "agent.rendering")
        lost = await crash(dev, log, rendering, narrator)
        await resume(gateway, log, lost)
        await wait(gateway, dev)
        await wake(gateway, log)
        await log.end()
        return await verdict(gateway, sinks, log)


async def crash(dev: Dev, log: Log, rendering: Event, narrator: Narrator) -> Event:
    chapter("The worker is killed", "SIGKILL to sidecar and agent, in the middle of the step that makes the PDF")
    with narrator.silent():  # else what follows from the kill could be told before it
        for line in await kill_worker(dev, RUN):
            say(line)
    return await log.until("the loss", lambda event: event.kind in LOST, rendering.seq)


async def resume(gateway: Gateway, log: Log, lost: Event) -> None:
    chapter("The run goes on", "a new attempt in a new worker; what is in the journal is not done again")
    again = await log.until("another attempt", lambda event: event.kind == "agent.rendering", lost.seq)
    say(f"the new attempt is at work {seconds_between(lost, again):.2f} s after the loss was seen")
    await log.until("the wait for approval", lambda event: event.kind == "run.suspended", again.seq)
    table = Table("seq", "journal", "state", "", box=None, header_style="dim", padding=(0, 2))
    for entry in await gateway.records(RUN, "journal"):
        opened = "opened now" if entry["state"] == "open" else "done now"
        fate = "[green]reused[/]" if entry["seq"] < lost.seq else opened
        table.add_row(str(entry["seq"]), entry["key"], entry["state"], fate)
    with console.capture() as drawn:
        console.print(table)
    for row in drawn.get().splitlines():  # rich fills up the last column
        print(row.rstrip(), flush=True)


async def wait(gateway: Gateway, dev: Dev) -> None:
    chapter("It waits for a person", "rows in Postgres and nothing else: no worker, no connection, no timer")
    await no_workers(dev)  # the last one has let the run go and is ending
    view = await gateway.run(RUN)
    say(f"{view['state']}, waiting for " + ", ".join(f"{wait['kind']} {wait['name']}" for wait in view["waitingFor"]))
    for kind, count in census(dev).items():
        console.print(f"  {count:>4}  {kind}")


async def wake(gateway: Gateway, log: Log) -> None:
    chapter("Somebody approves", "the pool keeps one worker warm from now on; any run of the pool could get it")
    pool = manifest("agentpool.yaml", "AgentPool")["spec"]
    await gateway.put_pool("report", {**pool, "capacity": {"minIdle": 1, "maxIdle": 1, "maxPods": 10}})
    await gateway.until_pool("report", idle=1)
    before = time.monotonic()
    await gateway.signal(RUN, "approved", {"by": "Ada"}, key="demo")
    awake = await log.until("the agent to be awake", lambda event: event.kind == "agent.approved")
    seen = time.monotonic() - before
    sent = next(event for event in log.events if event.kind == "signal.received")
    say(f"[bold]from signal to agent code running: {seconds_between(sent, awake) * 1000:.0f} ms[/] (seen here after {seen * 1000:.0f} ms)")


async def verdict(gateway: Gateway, sinks: Sinks, log: Log) -> int:
    chapter("The verdict", "counted by the receivers")
    view, children = await gateway.run(RUN), await gateway.descendants(RUN)
    stored, mailed, announced = [await effects(sinks, kind) for kind in ("objects", "mails", "notifications")]
    losses = [event for event in log.events if event.kind in LOST]
    checks = {
        "the run has succeeded": view["state"] == "Succeeded",
        "one worker was killed, and that took one more attempt": len(losses) == 1 and view["attempt"] == 2,
        "one child a document, and each has succeeded": [child["state"] for child in children] == ["Succeeded"] * 5,
        "exactly one upload": len(stored) == 1,
        "exactly one mail": len(mailed) == 1,
        "exactly one notification": len(announced) == 1,
        "the PDF that was mailed is the one that was stored": hashes(mailed) == hashes(stored) and len(hashes(stored)) == 1,
    }
    for line, good in checks.items():
        console.print(f"  [green]yes[/]  {line}" if good else f"  [bold red]NO[/]   {line}")
    for effect in stored:
        console.print(f"\n  The report: [bold]{effect['files'][0]['path']}[/]", soft_wrap=True)
    if not all(checks.values()):
        return 1
    console.print("\n  Now yourself: README.md, Try it yourself")
    return 0


async def effects(sinks: Sinks, kind: str) -> list[dict[str, Any]]:
    async with ClientSession() as session, session.get(f"{sinks.http}/{kind}") as response:
        items: list[dict[str, Any]] = (await response.json())["items"]
        return items


def hashes(items: list[dict[str, Any]]) -> list[str]:
    return [file["sha256"] for effect in items for file in effect["files"]]


def manifest(file: str, kind: str) -> dict[str, Any]:
    """The first document of that kind in the file."""
    documents = yaml.safe_load_all((MANIFESTS / file).read_text(encoding="utf-8"))
    found: dict[str, Any] = next(document for document in documents if document["kind"] == kind)
    return found


def chapter(title: str, what: str) -> None:
    console.print(f"\n[bold cyan]{title}[/]")
    console.print(Padding(f"[dim]{what}[/]", (0, 0, 0, 2), expand=False))


def say(text: str) -> None:
    console.print(f"  [dim]{time.monotonic() - _started:5.1f} s[/]  {text}", soft_wrap=True)


class Narrator:
    """One line for each event of the run, as it is written. Children are called by the document that they read."""

    def __init__(self) -> None:
        self._documents: dict[str, str] = {}
        self._kept: list[Event] | None = None

    @contextmanager
    def silent(self) -> Iterator[None]:
        """What comes meanwhile is told at the end."""
        kept: list[Event] = []
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None
            for event in kept:
                self(event)

    def __call__(self, event: Event) -> None:
        if self._kept is not None:
            self._kept.append(event)
            return
        data: dict[str, Any] = event.data or {}
        if event.kind == "child.spawned":
            self._documents[data["child"]] = data["key"].rpartition("=")[2]
        detail = self._documents.get(data.get("child", "")) or data.get("message") or data.get("name") or data.get("tool") or ""
        attempt = f"attempt {data['attempt']}" if event.kind == "run.leased" else ""
        what = f"{event.kind:<20} [dim]{attempt or detail}[/]" if attempt or detail else event.kind
        say(f"[dim]{event.seq:>3}  epoch {event.epoch}[/]  {what}")


def seconds_between(first: Event, second: Event) -> float:
    """By the database's clock."""
    return (datetime.fromisoformat(second.at) - datetime.fromisoformat(first.at)).total_seconds()


def run_demo() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.report.demo", description="The report example, from start to end.")
    parser.add_argument("--state-dir", type=Path, default=ROOT / ".perdure" / "demo", help="where the data, the logs and the PDF are kept")
    state: Path = parser.parse_args().state_dir.absolute()

    async def limited() -> int:
        own = asyncio.current_task()
        assert own is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
        async with asyncio.timeout(LIMIT_SECONDS):
            return await main(state)

    try:
        return asyncio.run(limited())
    except (StartFailed, RunOver, GatewayError) as error:
        console.print(f"\n[bold red]The demo has failed:[/] {error}")
    except TimeoutError:
        console.print(f"\n[bold red]The demo has failed:[/] it was not over after {LIMIT_SECONDS} s; the logs are in {state / 'logs'}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(run_demo())
