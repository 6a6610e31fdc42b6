"""The agent of the soak in Python: it does what its journey says, one action after the other, and gives back all that it received.

``python -m tests.soak.agents``. It asks and changes the outside world over plain HTTP, and where its journey says so it announces to the
soak that an effect is about to happen or has just happened, so that a freeze meets that very moment.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from tests.soak.journey import Action, Journey

from perdure import AppendSlice, EffectUnknown, Run, Slice, WaitTimedOut, agent, signal, step, timer, tool

WORLD, SOAK = os.environ.get("SOAK_WORLD", ""), os.environ.get("SOAK_HARNESS", "")
TOOL_SECONDS = 2.0
ASKS = 60.0
TRAIL = AppendSlice("trail", str)
TOTAL = Slice("total", int)


class Planned(Exception):
    """The journey says that this run fails."""


def ask(base: str, method: str, path: str, body: object = None) -> Any:
    """One request; None for 404. Blocks."""
    where = urlsplit(base)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ASKS)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return _read(answer.status, answer.read())
    finally:
        connection.close()


async def ask_async(base: str, method: str, path: str, body: object = None) -> Any:
    """The same on the event loop, without a thread: a call that is cancelled does not go on."""
    where = urlsplit(base)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        writer.write(f"{method} {path} HTTP/1.0\r\nHost: soak\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        return _read(int(head.split()[1]), content)
    finally:
        writer.close()


def _read(status: int, content: bytes) -> Any:
    if status == 404:
        return None
    if status != 200:
        raise ConnectionError(f"status {status}")
    return json.loads(content)


def _order(run: Run, identity: str, policy: str, freeze: str, key: str) -> dict[str, Any]:
    return {"identity": identity, "policy": policy, "freeze": freeze, "key": key, "run": run.id, "attempt": run.attempt, "pid": os.getpid()}


def _moment(identity: str, moment: str) -> dict[str, Any]:
    return {"identity": identity, "moment": moment, "pid": os.getpid()}


def carry_out(run: Run, identity: str, policy: str, freeze: str, key: str) -> str:
    if freeze == "before":
        ask(SOAK, "POST", "/moments", _moment(identity, freeze))
    ref = str(ask(WORLD, "POST", "/effects", _order(run, identity, policy, freeze, key))["ref"])
    if freeze == "after":
        ask(SOAK, "POST", "/moments", _moment(identity, freeze))
    return ref


async def carry_out_async(run: Run, identity: str, policy: str, freeze: str, key: str) -> str:
    if freeze == "before":
        await ask_async(SOAK, "POST", "/moments", _moment(identity, freeze))
    ref = str((await ask_async(WORLD, "POST", "/effects", _order(run, identity, policy, freeze, key)))["ref"])
    if freeze == "after":
        await ask_async(SOAK, "POST", "/moments", _moment(identity, freeze))
    return ref


def _tools(policy: Any) -> tuple[Any, Any]:
    """A tool of this policy that blocks a thread, and one that does not."""
    name = policy.replace("-", "_")

    @tool(name=f"{name}_sync", effect="external", scope=("identity",), on_unknown=policy, timeout=TOOL_SECONDS)
    def blocking(run: Run, identity: str, freeze: str, key: str = "") -> str:
        return carry_out(run, identity, policy, freeze, key)

    @tool(name=name, effect="external", scope=("identity",), on_unknown=policy, timeout=TOOL_SECONDS)
    async def cooperative(run: Run, identity: str, freeze: str, key: str = "") -> str:
        return await carry_out_async(run, identity, policy, freeze, key)

    async def reconcile(key: str) -> str | None:
        found = await ask_async(WORLD, "GET", f"/effects/{key}")
        return None if found is None else str(found["ref"])

    if policy == "query":
        blocking.reconcile(reconcile)
        cooperative.reconcile(reconcile)
    return blocking, cooperative


TOOLS = {policy: _tools(policy) for policy in ("query", "retry-same-key", "ask", "assume-not-done", "fail")}


@step
async def count(run: Run, identity: str, amount: int) -> str:
    """Its result is another one at each execution: only one of them is the run's."""
    nonce = uuid4().hex
    run.session[TRAIL].append(nonce)
    run.session[TOTAL] += amount
    await ask_async(WORLD, "POST", "/steps", {"identity": identity, "nonce": nonce, "run": run.id, "attempt": run.attempt})
    return nonce


async def act(run: Run, journey: Journey, action: Action) -> dict[str, Any]:
    """What the agent received from this action."""
    match action.do:
        case "step":
            return {"nonce": await count.options(key=action.part)(run, journey.identity(action), action.amount)}
        case "effect":
            return await effect(run, journey.identity(action), action)
        case "children":
            return await children(run, action)
        case "fail":
            raise Planned(action.part)
        case "hang":
            await run.wait_signal("never", key=action.part)
        case "sleep":
            await run.sleep(action.seconds, key=action.part)
            return {}
    return {"got": [_signal(came) for came in await signals(run, action)]}


async def effect(run: Run, identity: str, action: Action) -> dict[str, Any]:
    blocking, cooperative = TOOLS[action.policy]
    try:
        return {"ref": await (blocking if action.sync else cooperative)(run, identity, action.freeze)}
    except EffectUnknown:
        return {"unknown": True}


async def signals(run: Run, action: Action) -> list[Any]:
    """Those that a wait of this kind received."""
    part, names = action.part, action.names
    match action.do:
        case "signal":
            return [await run.wait_signal(names[0], key=part)]
        case "race":
            waited = await run.wait(signal(names[0]), timer(action.seconds), key=part)
            return [fired for fired in waited.fired if fired.kind == "signal"]
        case "all":
            waited = await run.wait(*(signal(name) for name in names), mode="all", key=part)
            return sorted(waited.fired, key=lambda fired: fired.index)
        case "timeout":
            try:
                return [await run.wait_signal(names[0], key=part, timeout=action.seconds)]
            except WaitTimedOut:
                return []
        case "abandon":
            try:
                async with asyncio.timeout(action.seconds):
                    return [await run.wait_signal(names[0], key=f"{part}-first", hold=ASKS)]
            except TimeoutError:
                return [await run.wait_signal(names[0], key=part)]
    raise AssertionError(action.do)


async def children(run: Run, action: Action) -> dict[str, Any]:
    started = []
    for child in action.plans:
        key = f"{action.part}-{child.path}"
        started.append(await run.spawn(input=child, policy=action.bond, key=key, spec={"retry": run.spec["retry"]}))  # type: ignore[arg-type]
    ended = await run.join(started, mode="any" if action.join == "any" else "all", key=action.part) if action.join != "none" else []
    found = [{"id": one.child, "status": one.status, "result": one.result if one.succeeded else None} for one in ended]
    return {"children": [child.id for child in started], "ended": found}


def _signal(came: Any) -> dict[str, Any]:
    return {"name": came.name, "id": came.id, "amount": came.payload["amount"]}


def value_of(items: list[dict[str, Any]]) -> int:
    """What came from outside: the signals' amounts, and the values of the children that were waited for."""
    signals = sum(got["amount"] for item in items for got in item.get("got", ()))
    return signals + sum(one["result"]["value"] for item in items for one in item.get("ended", ()) if one["result"])


@agent(non_retryable=(Planned,))
async def traveller(run: Run, journey: Journey) -> dict[str, Any]:
    journey.path = journey.path or run.name
    cursor: dict[str, Any] = run.cursor() or {"next": 0, "items": []}
    items: list[dict[str, Any]] = cursor["items"]
    for n, action in enumerate(journey.actions):
        if n < cursor["next"]:
            continue
        if action.do == "checkpoint":
            items.append({})
            await run.checkpoint(cursor={"next": n + 1, "items": items})
        else:
            items.append(await act(run, journey, action))
    return {"items": items, "trail": list(run.session[TRAIL]), "value": run.session[TOTAL] + value_of(items)}


if __name__ == "__main__":
    traveller.serve()
