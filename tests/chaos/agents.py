"""The agents that the chaos tests run, each as a process of a worker pod: ``python agents.py NAME``.

``voyage`` does everything once that a run can do, so that every kind of commit is in its log.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from perdure import AppendSlice, Run, Slice, agent, step, tool

SINK = os.environ.get("CHAOS_SINK", "")

TRAIL = AppendSlice("trail", str)
TOTAL = Slice("total", int)


class Order(msgspec.Struct):
    """``child``: this run is the child of another voyage. ``what``: names its effects."""

    what: str
    child: bool = False


def ask(method: str, path: str, body: object = None) -> Any:
    """One request to the sink; None for 404."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(SINK + path, data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


@step
async def note(run: Run, what: str, amount: int) -> str:
    run.session[TRAIL].append(what)
    run.session[TOTAL] += amount
    return f"noted {what}"


@tool(effect="external", on_unknown="query", timeout=3)
def book(what: str, part: str, key: str = "") -> str:
    return str(ask("POST", f"/effects/{key}", {"what": what, "part": part})["ref"])


@book.reconcile
def booked(key: str) -> str | None:
    found = ask("GET", f"/effects/{key}")
    return None if found is None else str(found["ref"])


@agent
async def voyage(run: Run, order: Order) -> dict[str, Any]:
    if order.child:
        return {"noted": await note(run, "child", 100), "booked": await book(order.what, "ferry")}
    if run.cursor(str) is None:
        await note(run, "packed", 1)
        await book(order.what, "flight")
        joined = await run.spawn(input=Order(order.what, child=True), result=dict[str, str]).join()
        await note(run, f"{joined.status} {joined.result['booked']}", 10)
        go = await run.wait_signal("go", str)
        await note(run, f"go {go.payload}", 1000)
        await run.checkpoint(cursor="under way")
    last = await book(order.what, "hotel")
    return {"last": last, "trail": list(run.session[TRAIL]), "total": run.session[TOTAL]}


@tool(effect="external", timeout=3)
def pay(what: str, part: str, key: str = "") -> str:
    """Like ``book``, but only a person can tell what became of it."""
    return str(ask("POST", f"/effects/{key}", {"what": what, "part": part})["ref"])


@agent
async def payer(run: Run, order: Order) -> dict[str, Any]:
    ref = await pay(order.what, "invoice")
    return {"ref": ref, "noted": await note(run, "paid", 1), "trail": list(run.session[TRAIL])}


@step
async def linger(run: Run, what: str) -> int:
    """Says that it is here, stays as long as the sink wants, and tells who did it."""
    run.session[TRAIL].append(str(os.getpid()))
    await asyncio.to_thread(ask, "POST", "/effects/linger", {"what": what, "part": "linger"})
    return os.getpid()


@agent
async def lingerer(run: Run, order: Order) -> dict[str, Any]:
    return {"pid": await linger(run, order.what), "trail": list(run.session[TRAIL])}


async def stubbornly(run: Run, work: Callable[[], Awaitable[Any]], tries: int) -> Any:
    """As bad frameworks do it: whatever is raised is an error of the work, to be tried again."""
    for _ in range(tries):
        try:
            return await work()
        except BaseException as error:  # noqa: BLE001
            run.log.warning("swallowed %r", error)
            await asyncio.sleep(0)
    return "given up"


@agent
async def swallower(run: Run, order: Order) -> dict[str, Any]:
    first = await stubbornly(run, lambda: linger(run, order.what), 5)
    go = await stubbornly(run, lambda: run.wait_signal("go", str), 5)
    return {"lingered": isinstance(first, int), "go": go if isinstance(go, str) else go.payload}


@agent
async def hangs(run: Run) -> None:
    await note(run, "about to hang", 1)
    while True:
        time.sleep(0.1)  # noqa: ASYNC251


@agent
async def deaf(run: Run, order: Order) -> str:
    """Ignores that it is to end."""
    await linger(run, order.what)
    while True:
        try:
            await asyncio.sleep(0.05)
            run.check()
        except BaseException:  # noqa: BLE001
            run.log.warning("and so what")


@agent
async def litterer(run: Run, order: Order) -> dict[str, Any]:
    """Leaves a process behind that has detached itself as well as it can; gives its pid."""
    script = "import os,sys,time\nif os.fork(): os._exit(0)\nos.setsid()\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as started:  # noqa: ASYNC220
        assert started.stdout is not None
        left = int(started.stdout.readline())
    return {"left": left, "pid": os.getpid(), "parent": os.getppid(), "tmp": tempfile.gettempdir()}


class Plain:
    """Without the SDK, as an agent in another language: plain HTTP, and nothing is sent twice. Its result is what it was told of its one
    effect."""

    def serve(self) -> None:
        order = self._ask("GET", "run")["input"]
        begin = {"tool": "pay", "arguments": {"what": order["what"]}, "effect": "external", "onUnknown": "ask"}
        decision = self._ask("POST", "activities/begin", begin)
        if decision["decision"] == "execute":
            done = ask("POST", f"/effects/{decision['key']}", {"what": order["what"], "part": "invoice"})
            Path(os.environ["CHAOS_FOLDER"], f"{order['what']}.done").touch()
            end = {"key": decision["key"], "token": decision["token"], "state": "succeeded", "response": done["ref"]}
            self._ask("POST", "activities/end", end)
        self._ask("POST", "finish", {"outcome": "succeeded", "output": [decision["decision"], decision.get("response")]})

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        url, data = f"http://127.0.0.1:{os.environ['PERDURE_PORT']}/v1/{path}", None if body is None else json.dumps(body).encode()
        for _ in range(1000):
            try:
                with urllib.request.urlopen(urllib.request.Request(url, data=data, method=method), timeout=600) as answer:
                    if answer.status == 200:
                        return json.load(answer)
            except ConnectionError:
                raise
            except urllib.error.URLError:  # the sidecar is not there yet
                time.sleep(0.02)
        raise TimeoutError(path)


plain = Plain()


def main() -> None:
    agents = {name: value for name, value in globals().items() if hasattr(value, "serve")}
    agents[sys.argv[1]].serve()


if __name__ == "__main__":
    main()
