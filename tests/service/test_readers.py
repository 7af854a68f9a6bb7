"""How long a turn lives without a reader: a grace that a loop which stands still does not use up."""

from __future__ import annotations

import asyncio
import time

import pytest

from pensieve.core.turn import FinishReason
from pensieve.service.live_turn import LiveTurn
from pensieve.service.readers import ReaderLimits, Readers

GRACE_SECONDS = 1.0
LIMITS = ReaderLimits(GRACE_SECONDS, stall_seconds=30.0, undelivered_tokens_max=1000)


async def nothing(start: int, stop: int) -> None:
    pass


async def comes_late(readers: Readers, live: LiveTurn) -> None:
    """A reader that is some rounds of the loop away when the loop stands still."""
    for _ in range(8):
        await asyncio.sleep(0)
    await readers.follow(live, nothing)


def test_a_turn_that_nobody_reads_is_given_up_when_its_grace_has_passed() -> None:
    given_up: list[LiveTurn] = []

    async def main() -> None:
        readers = Readers(asyncio.get_running_loop(), LIMITS, given_up.append)
        live = LiveTurn(1, "c", 0, 1)
        readers.start_grace(live)
        while not given_up:
            await asyncio.sleep(0.01)
        assert given_up == [live]
        assert not readers.has_reader(live)

    asyncio.run(asyncio.wait_for(main(), 60.0))


@pytest.mark.parametrize("has_left", [False, True], ids=["a first reader", "one that comes again"])
def test_readers_on_their_way_when_the_loop_stands_still_find_their_turn(has_left: bool) -> None:
    given_up: list[LiveTurn] = []

    async def main() -> None:
        readers = Readers(asyncio.get_running_loop(), LIMITS, given_up.append)
        live = LiveTurn(1, "c", 0, 1)
        if has_left:
            first = asyncio.ensure_future(readers.follow(live, nothing))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        else:
            readers.start_grace(live)
        coming = asyncio.ensure_future(comes_late(readers, live))
        await asyncio.sleep(0)
        time.sleep(1.2 * GRACE_SECONDS)  # the whole loop
        while not (given_up or readers.has_reader(live)):
            await asyncio.sleep(0)
        assert given_up == []
        live.finish = FinishReason.STOP
        readers.wake(live.number)
        await coming

    asyncio.run(asyncio.wait_for(main(), 60.0))
