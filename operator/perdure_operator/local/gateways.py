"""The gateway processes of ``perdure dev``: started, awaited until they serve, and started again when they die."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.pods import last_lines
from perdure_operator.local.processes import Leash, Process, describe

READY_SECONDS = 120.0
"""Of a process that lives: on a busy machine it is only slow."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
STOP_SECONDS = 2.0
"""A gateway holds nothing that is not in the store; somebody's open tail need not delay the end."""
STEADY_SECONDS = 30.0
"""A gateway that ran so long is started again without a pause."""


class GatewayFailed(PerdureError):
    """A gateway process does not start."""

    code, status = "gateway-failed", 500
    action = "If the machine is busy, try again."


@dataclass(frozen=True)
class GatewayConfig:
    name: str
    port: int
    dsn: str
    secret: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return {
            "PERDURE_DSN": self.dsn,
            "PERDURE_LISTEN": f"127.0.0.1:{self.port}",
            "PERDURE_TOKEN_SECRET_FILE": str(self.secret),
            "PERDURE_GATEWAY_NAME": self.name,
        }


class LocalGateway:
    """One gateway. ``changed`` is called when it has another process."""

    def __init__(
        self, config: GatewayConfig, *, environ: Mapping[str, str], leash: Leash, say: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        self.config = config
        self._env = {**environ, **config.env}
        self._leash, self._say, self._changed = leash, say, changed
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Returns when it is ready. Raises GatewayFailed."""
        process = await Process.start(
            (sys.executable, "-m", "perdure_operator.main", "gateway"),
            env=self._env, cwd=self.config.log.parent, log=self.config.log, leash=self._leash,
        )  # fmt: skip
        self._process = process
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READY_SECONDS
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http:
            while not await self._ready(http):
                if process.code is not None or loop.time() > deadline:
                    why = describe(process.code) if process.code is not None else f"was not ready after {READY_SECONDS:.0f} s"
                    await process.stop()
                    words = "\n".join(last_lines(self.config.log, 15)) or "(it has said nothing)"
                    raise GatewayFailed(f"{self.config.name} {why}; its log, {self.config.log}, ends:\n{words}")
                await asyncio.sleep(0.03)

    async def supervise(self) -> None:
        """Until cancelled: start it again when it dies."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while self._process is not None:
            started = loop.time()
            code = await self._process.wait()
            pause = FIRST_PAUSE if loop.time() - started > STEADY_SECONDS else pause
            self._say(f"{self.config.name} {describe(code)}; starting it again")
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            try:
                await self.start()
            except (GatewayFailed, OSError) as error:
                self._say(str(error))
                continue
            self._say(f"{self.config.name} is ready again")
            self._changed()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop(STOP_SECONDS)

    async def _ready(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(f"{self.config.url}/readyz") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
