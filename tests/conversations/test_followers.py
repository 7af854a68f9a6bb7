"""How long a turn runs without a reader: a grace period that a blocked event loop does not use up."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any, cast

import pytest

from pensieve.conversations.followers import FollowerLimits, TurnFollowers
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens

GRACE_SECONDS = 1.0
LIMITS = FollowerLimits(GRACE_SECONDS, stall_seconds=30.0, undelivered_tokens_max=1000)


class Handle:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop whose time the test advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Handle]] = []
        self._number = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, act: Callable[..., None], *arguments: Any) -> Handle:
        handle = Handle(lambda: act(*arguments))
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def round(self) -> None:
        """Run the timers that are due now, but not those that these timers add."""
        due = []
        while self._timers and self._timers[0][0] <= self.now:
            due.append(heapq.heappop(self._timers)[2])
        for handle in due:
            if not handle.is_cancelled:
                handle.act()

    def run(self, seconds: float, step: float = 0.001) -> None:
        """Advance the time in steps, with a round after each step."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            self.round()


class FollowersRig:
    def __init__(self) -> None:
        self.loop = Loop()
        self.given_up: list[LiveTurn] = []
        self.followers = TurnFollowers(
            cast(asyncio.AbstractEventLoop, self.loop), LIMITS, self.given_up.append
        )
        self.live = LiveTurn(1, "c", 0, 1)

    def attach_and_detach(self) -> None:
        async def act() -> None:
            reader = asyncio.ensure_future(self.followers.follow(self.live, ignore))
            await asyncio.sleep(0)
            assert self.followers.has_follower(self.live)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

        asyncio.run(act())


async def ignore(tokens: ReplyTokens) -> None:
    pass


def test_a_turn_without_readers_is_given_up_after_the_grace_period() -> None:
    rig = FollowersRig()
    rig.followers.start_grace(rig.live)
    rig.loop.run(0.95 * GRACE_SECONDS)
    assert rig.given_up == []
    rig.loop.run(0.1 * GRACE_SECONDS)
    assert rig.given_up == [rig.live]
    rig.loop.run(5 * GRACE_SECONDS)
    assert len(rig.given_up) == 1


def test_the_grace_period_restarts_when_a_reader_leaves() -> None:
    rig = FollowersRig()
    rig.followers.start_grace(rig.live)
    for _ in range(3):
        rig.loop.run(0.75 * GRACE_SECONDS)
        rig.attach_and_detach()
    rig.loop.run(0.95 * GRACE_SECONDS)
    assert rig.given_up == []
    rig.loop.run(0.1 * GRACE_SECONDS)
    assert rig.given_up == [rig.live]


@pytest.mark.parametrize("elapsed", [0.0, 0.5, 0.93, 0.999])
def test_clients_that_reconnect_after_a_blocked_event_loop_find_their_turn(elapsed: float) -> None:
    rig = FollowersRig()
    rig.followers.start_grace(rig.live)
    rig.loop.run(elapsed * GRACE_SECONDS)
    rig.loop.now += 1.2 * GRACE_SECONDS
    rig.loop.run(0.08 * GRACE_SECONDS)  # a reader needs some rounds to attach
    assert rig.given_up == []
    rig.attach_and_detach()
    rig.loop.run(1.05 * GRACE_SECONDS)
    assert rig.given_up == [rig.live]


def test_turns_are_given_up_even_if_the_event_loop_is_always_late() -> None:
    rig = FollowersRig()
    rig.followers.start_grace(rig.live)
    rig.loop.run(30 * GRACE_SECONDS, step=GRACE_SECONDS)
    assert rig.given_up == [rig.live]
