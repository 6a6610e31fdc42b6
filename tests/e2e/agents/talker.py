"""An agent that prints before and after a wait, and has one effect: what logs, ledger and report have to tell."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import Run, agent, step, tool


@step
async def think(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "thought"


@tool(effect="external", scope=("to",), on_unknown="fail")
async def tell(to: str, key: str = "") -> dict[str, str]:
    return {"told": to}


@agent
async def talker(run: Run, input: dict[str, Any]) -> str:
    print("hello before the wait", flush=True)
    await think(input["seconds"])
    await tell("the board")
    go = await run.wait_signal("go")
    print(f"hello after the wait: {go.payload}", flush=True)
    await think(input["seconds"])
    return "said"


if __name__ == "__main__":
    talker.serve()
