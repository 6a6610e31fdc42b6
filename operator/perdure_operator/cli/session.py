"""One session of `perdure dev`: starts the machine, sends the manifests, shows what happens, and takes all of it down again.

The pieces meet here because they may not know each other: the tokens are the gateway's, the processes are `local`'s, and the manifests
go through the public API like anybody's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from perdure_operator.cli.apply import apply, pool_folders
from perdure_operator.cli.client import Client, Unavailable
from perdure_operator.cli.context import FAILED
from perdure_operator.cli.follow import Follower, News
from perdure_operator.cli.live import View, view
from perdure_operator.cli.local import LocalConnection
from perdure_operator.gateway.auth import LocalTokens, make_secret
from perdure_operator.local.dev import Dev, Limits
from perdure_operator.local.manifests import Loaded
from perdure_operator.local.state import StateDir

POLL_SECONDS = 0.25
MAX_NAMED = 5


async def run(state: StateDir, loaded: list[Loaded], *, once: bool, max_pods: int | None, again: str) -> int:
    """The exit code. Everything that was started has ended when this returns. ``again``: the command that goes on then."""
    # What libraries log would tear the screen apart.
    logging.basicConfig(filename=state.logs / "dev.log", level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = _signals()
    with view(f"perdure dev · {state.path}") as shown:
        tokens = LocalTokens(make_secret(state.secret))
        machine = Dev(state, tokens, folders=pool_folders(loaded), limits=Limits.of_machine(max_pods), environ=os.environ, say=shown.say)
        work = asyncio.create_task(_work(machine, loaded, shown, once=once))
        asked = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            shown.say("stopping")
            work.cancel()
            await asyncio.wait([work])
            return FAILED if once else 0
        finally:
            asked.cancel()
            await machine.stop()
            if stop.is_set():
                shown.say(f"stopped; everything goes on with: {again}")


async def _work(machine: Dev, loaded: list[Loaded], shown: View, *, once: bool) -> int:
    shown.say("starting the database and two gateways")
    session = await machine.start()
    shown.say(f"ready: {' and '.join(session.urls)}")
    connection = LocalConnection(Client(session.urls, session.token), machine.state)
    client = connection.client
    before = await asyncio.to_thread(lambda: list(client.runs("-")))
    known = {run.run_id: run.last_seq for run in before}
    ours = set()
    for item in await asyncio.to_thread(lambda: list(apply(client, loaded, shown.say))):
        ours.add(item.run.run_id)
        if item.run.run_id in known:
            hint = "; --fresh forgets every run of this folder" if item.run.terminal else ", and goes on"
            shown.say(f"{item.run.full_name} is there from an earlier start: {item.run.state}{hint}")
            if item.warning:
                shown.say(f"warning: {item.warning}")
    if others := [run.full_name for run in before if run.run_id not in ours and not run.terminal]:
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        shown.say(f"from an earlier start, and go on: {', '.join(others[:MAX_NAMED])}{more}")
    elif not ours:
        shown.say("there is no run yet; in another terminal: perdure submit FILE")
    follower = Follower(client, "-", known)
    broken = asyncio.create_task(machine.broken())
    silent = False
    try:
        while not broken.done():
            try:
                news: News = await asyncio.to_thread(follower.poll)
                silent = False
            except Unavailable as error:
                if not silent:
                    shown.say(f"{error}; trying again")
                silent = True
            else:
                shown.update(news, connection.pod_names)
                ended = [run for run in news.runs if run.run_id in ours and (run.terminal or run.parked)]
                if once and len(ended) == len(ours):
                    return FAILED if any(run.state != "Succeeded" for run in ended) else 0
            await asyncio.wait([broken], timeout=POLL_SECONDS)
        broken.result()
    finally:
        broken.cancel()
    return FAILED


def _signals() -> asyncio.Event:
    """Set by Ctrl-C, SIGTERM or a closed terminal. Asked twice, this process ends at once; the guardian ends what it leaves."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def asked() -> None:
        if stop.is_set():
            sys.stdout.write("\x1b[?25h" if sys.stdout.isatty() else "")
            sys.stdout.flush()
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked)
    return stop
