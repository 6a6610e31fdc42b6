from __future__ import annotations

import asyncio

import pytest

from perdure_operator.domain.errors import Unavailable
from perdure_operator.services.polling import Kick, Poll


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancel_that_meets_a_kick_ends_the_loop(turns: int) -> None:
    """A leader that is deposed while its loops are kicked has to stop: its successor has begun."""
    kick = Kick()

    async def loop() -> None:
        while True:
            await kick.pause(60)

    looping = asyncio.create_task(loop())
    await asyncio.sleep(0.01)
    kick()
    for _ in range(turns):
        await asyncio.sleep(0)
    looping.cancel()
    done, _ = await asyncio.wait([looping], timeout=1)
    assert done, "the cancel was swallowed"


async def test_a_kick_while_nobody_pauses_is_kept() -> None:
    kick = Kick()
    kick()
    async with asyncio.timeout(1):
        await kick.pause(None)
    before = asyncio.get_running_loop().time()
    await kick.pause(0.05)
    assert asyncio.get_running_loop().time() - before >= 0.04


async def test_a_poll_goes_on_after_an_outage_and_at_once_while_there_is_more() -> None:
    poll = Poll("could not look", seconds=60, outage=0.01)
    answers = [True, Unavailable("down"), True, False]
    looked = asyncio.Event()

    async def look() -> bool:
        answer = answers.pop(0)
        if not answers:
            looked.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    running = asyncio.create_task(poll.run(look))
    async with asyncio.timeout(5):
        await looked.wait()
    answers.append(False)
    looked.clear()
    poll.kick()
    async with asyncio.timeout(5):
        await looked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
