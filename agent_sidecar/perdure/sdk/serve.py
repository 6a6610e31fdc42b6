"""``agent.serve()``: an agent as a process of a worker pod.

A single-use pod: connect to the sidecar, wait for the run, execute one attempt, exit. Where the pod is reused (PERDURE_POD_REUSE is
ForkPerRun) ``forkserver`` does that in a child process for each run. PERDURE_SECRET_FD, set by the fork server, names a file descriptor
with the secret of the lease.

Exit codes: 0 finished, suspended, or nothing more to do; 1 the agent failed, and that was reported; 75 the lease was lost; 143 told to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any, NoReturn

from perdure.sdk.errors import PodRetired, Refused, SidecarUnavailable
from perdure.sdk.execution import Execution
from perdure.sdk.exits import DONE, ENDING, LEASE_LOST, TERMINATED, ProcessExits
from perdure.sdk.sidecar import Address, SidecarTransport, address_from

if TYPE_CHECKING:
    from perdure.sdk.agents import Agent

_log = logging.getLogger("perdure")


def serve(agent: Agent[..., Any]) -> NoReturn:
    """Does not return: it exits the process. Raises InvalidDeclaration where there is an event loop already."""
    if not logging.root.handlers:
        logging.basicConfig(
            level=os.environ.get("PERDURE_LOG_LEVEL", "info").upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
    exits = ProcessExits()
    child = "PERDURE_SECRET_FD" in os.environ
    if os.environ.get("PERDURE_POD_REUSE") == "ForkPerRun":
        from perdure.sdk.forkserver import serve_forking

        code = serve_forking(agent, address_from(os.environ), exits)
    else:
        code = serve_once(agent, address_from(os.environ), _inherited_secret(), exits)
    if child:
        exits.leave(code)  # as a forked one ends: with the run, whatever else goes on in this process
    exits.end(code)


def serve_once(agent: Agent[..., Any], address: Address, secret: str | None, exits: ProcessExits) -> int:
    """One run on an event loop of its own; gives the exit code."""
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    # The loop is left as it is: to close it would run what the agent left pending.
    return loop.run_until_complete(_Server(agent, exits).run(address, secret))


class _Server:
    def __init__(self, agent: Agent[..., Any], exits: ProcessExits) -> None:
        self._agent = agent
        self._exits = exits
        self._execution: Execution | None = None

    async def run(self, address: Address, secret: str | None) -> int:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            for number in ENDING:
                loop.add_signal_handler(number, self._told_to_end)
            self._exits.heed()
        transport = SidecarTransport(address, secret)
        opening = asyncio.ensure_future(transport.open())
        try:
            context = await transport.context()
            await opening
            return await self._agent.attempt(context, transport, self._exits, observe=self._began)
        except PodRetired:
            return DONE
        except (SidecarUnavailable, Refused) as error:
            _log.error("%s", error)
            return LEASE_LOST
        finally:
            opening.cancel()
            await transport.close()

    def _began(self, execution: Execution) -> None:
        self._execution = execution

    def _told_to_end(self) -> None:
        """SIGTERM: the run is given back, as soon as the tools that are at work have sent their receipts."""
        self._exits.terminated = True  # also where the agent has a handler of its own in place of that of ``heed``
        if self._execution is None:
            self._exits.leave(DONE)
        else:
            self._execution.give_back(TERMINATED)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _inherited_secret() -> str | None:
    number = os.environ.pop("PERDURE_SECRET_FD", None)
    if number is None:
        return None
    with os.fdopen(int(number), "rb") as source:
        return source.read().decode()
