"""What agents tell the driver, by datagrams on loopback: the run, and the time at which its code ran."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TOLD_SECONDS = 60.0


class Told(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self._heard: asyncio.Queue[tuple[str, float]] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        run, _, at = data.decode().partition(" ")
        self._heard.put_nowait((run, float(at)))

    async def collect(self, count: int) -> dict[str, float]:
        """The next ``count`` words: seconds since 1970 by run. Raises TimeoutError."""
        async with asyncio.timeout(TOLD_SECONDS):
            return dict([await self._heard.get() for _ in range(count)])


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Told, int]]:
    """With the port that agents send to."""
    transport, told = await asyncio.get_running_loop().create_datagram_endpoint(Told, local_addr=("127.0.0.1", 0))
    try:
        yield told, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()
