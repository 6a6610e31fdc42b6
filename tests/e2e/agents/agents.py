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
async def stepper(run: Run, input: dict[str, Any]) -> dict[str, Any]:
    """Many steps of a second each: always at work, always writing."""
    for _ in range(input["steps"]):
        await work(1)
    return {"steps": input["steps"], "attempt": run.attempt}


@agent
async def parent(run: Run, input: dict[str, Any]) -> Any:
    """``levels`` below it; the last one does what ``leaf`` says. ``rows``: so many more children that are no resources."""
    levels = input["levels"]
    if levels == 0:
        if input["leaf"] == "wait":
            await run.wait_signal("never")
        return await work(float(input["leaf"]))
    rows = [
        await run.spawn(input={"levels": 0, "leaf": "wait"}, recording="StoreOnly", key=f"row-{n}") for n in range(input.get("rows", 0))
    ]
    below = await run.spawn(input={**input, "levels": levels - 1, "rows": 0}).join()
    for child in rows:
        await child.join()
    return below.result


@agent
async def breaker(run: Run, input: dict[str, Any]) -> None:
    raise ValueError("this agent cannot do anything")


AGENTS = {"waiter": waiter, "sleeper": sleeper, "worker": worker, "stepper": stepper, "parent": parent, "breaker": breaker}

if __name__ == "__main__":
    AGENTS[sys.argv[1]].serve()
