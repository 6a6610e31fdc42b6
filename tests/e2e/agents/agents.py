"""The agents of the end-to-end tests: ``python agents.py NAME``. Each does one kind of thing and says in its result what it did."""

from __future__ import annotations

import sys
import time
from typing import Any

from perdure import Run, agent, step


@step
async def note(what: str) -> str:
    return f"noted {what}"


@step
def work(seconds: float) -> str:
    time.sleep(seconds)
    return f"worked {seconds} s"


@agent
async def waiter(run: Run, input: dict[str, Any]) -> dict[str, Any]:
    """A step, a signal, a step."""
    first = await note("before")
    go = await run.wait_signal("go")
    return {"first": first, "payload": go.payload, "id": go.id, "second": await note("after"), "attempt": run.attempt}


@agent
async def sleeper(run: Run, input: dict[str, Any]) -> str:
    await note("before")
    await run.sleep(input.get("seconds", 3))
    return await note("after")


@agent
async def worker(run: Run, input: dict[str, Any]) -> dict[str, Any]:
    """A step that is done, then a long one: to be killed in."""
    first = await note("first")
    return {"first": first, "second": await work(input.get("seconds", 8)), "attempt": run.attempt}


@agent
async def parent(run: Run, input: dict[str, Any]) -> Any:
    """``levels`` below it; the last one works for ``leaf`` seconds."""
    if input["levels"] == 0:
        return await work(float(input["leaf"]))
    below = await run.spawn(input={**input, "levels": input["levels"] - 1}).join()
    return below.result


@agent
async def stepper(run: Run, input: dict[str, Any]) -> dict[str, Any]:
    """At work for long, in many short steps."""
    done = [await work(input.get("seconds", 0.2)) for _ in range(input["count"])]
    return {"steps": len(done), "attempt": run.attempt}


@agent
async def collector(run: Run, input: None) -> list[Any]:
    """What signals brought, one after the other, until one brings nothing."""
    brought = []
    while (payload := (await run.wait_signal("item")).payload) is not None:
        brought.append(payload)
    return brought


@agent
async def elder(run: Run, input: dict[str, Any]) -> list[str]:
    """``levels`` of its own kind below it; the last one has ``children``, each as ``run.spawn`` takes it."""
    if input["levels"]:
        children = [await run.spawn(input={**input, "levels": input["levels"] - 1})]
    else:
        children = [await run.spawn(**child, key=f"child-{n}") for n, child in enumerate(input["children"])]
    return [done.status for done in await run.join(children)]


@agent
async def breaker(run: Run, input: dict[str, Any]) -> None:
    raise ValueError("this agent cannot do anything")


AGENTS = {
    "waiter": waiter, "sleeper": sleeper, "worker": worker, "parent": parent, "stepper": stepper, "collector": collector, "elder": elder,
    "breaker": breaker,
}  # fmt: skip

if __name__ == "__main__":
    AGENTS[sys.argv[1]].serve()
