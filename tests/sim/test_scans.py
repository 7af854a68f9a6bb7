"""Scans: more conversations than fit into the tiers return, one after the other.

LRU evicts each conversation before it returns, and reuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import DEFAULT, policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.messages import TurnEnded
from pensieve.sim.cost import instant
from pensieve.sim.simulator import SimulationFigures, Simulator
from pensieve.sim.trace import Arrival
from tests.sim.world import simulator

HISTORY = 1000  # tokens of each conversation. A turn replaces the tokens after them
SECONDS = 2.0  # between the turns of two conversations


def round_robin(num_conversations: int, rounds: int) -> Iterator[Arrival]:
    for number in range(num_conversations * rounds):
        conversation = f"c{number % num_conversations}"
        history = HISTORY if number >= num_conversations else None
        length = 8 if history else HISTORY
        yield Arrival(conversation, number * SECONDS, length, 2, history_tokens=history)


def twice(arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """Follow each turn by another turn of the same conversation, half a second later."""
    for arrival in arrivals:
        yield arrival
        at = (arrival.at or 0.0) + 0.5
        yield replace(arrival, at=at, input_tokens=8, history_tokens=HISTORY)


def reused(
    policy: str,
    num_conversations: int,
    device_tokens: int,
    host_tokens: int,
    rounds: int = 16,
    is_twice: bool = False,
) -> float:
    """Return which part of the history was reused, in the second half of the rounds."""
    one = simulator(
        policy=policy,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        count_from=rounds / 2 * num_conversations * SECONDS,
    )
    arrivals = round_robin(num_conversations, rounds)
    figures: SimulationFigures = one.run(twice(arrivals) if is_twice else arrivals)
    one.scheduler.check(one.clock.now())
    return 1.0 - figures.recomputed_tokens / figures.history_tokens


@pytest.mark.parametrize(
    ("num_conversations", "device_tokens", "host_tokens", "least"),
    [
        (
            40,
            20_000,
            0,
            0.43,
        ),  # half of the conversations fit, and a running turn has one of their places
        (12, 6_000, 0, 0.38),
        (48, 12_000, 15_000, 0.43),
        (32, 30_000, 0, 0.85),  # nearly all fit
    ],
)
def test_a_scan_reuses_a_part_of_the_history(
    num_conversations: int, device_tokens: int, host_tokens: int, least: float
) -> None:
    sizes = (num_conversations, device_tokens, host_tokens)
    assert reused("lru", *sizes) < 0.01
    assert reused(DEFAULT, *sizes) >= least


def test_a_scan_with_two_quick_turns_per_visit_reuses_a_part_too() -> None:
    """The second turn of a visit always finds the KV of the first."""
    sizes = (40, 20_000, 0)
    assert reused("lru", *sizes, is_twice=True) < 0.51
    assert reused(DEFAULT, *sizes, is_twice=True) >= 0.70


def test_a_scan_four_times_as_large_as_the_cache_reuses_a_part_too() -> None:
    assert reused(DEFAULT, 80, 20_000, 0, rounds=24) >= 0.18


class ChatterWatch(Simulator):
    """Adds up what the chatters' turns recompute in the second half of the load."""

    num_recomputed = 0

    def _end_turn(self, event: TurnEnded, now: float) -> None:
        if self._turns[event.attempt_id][0].startswith("chat") and now > 800.0:
            self.num_recomputed += event.usage.recomputed_tokens
        super()._end_turn(event, now)


def beside_chatters(rounds: int) -> Iterator[Arrival]:
    """Return a scan of 40 conversations, and four conversations that return every 25 seconds."""
    arrivals = list(round_robin(40, rounds))
    for number in range(4):
        for turn in range(int(rounds * 40 * SECONDS / 25.0)):
            at = 25.0 * turn + 6.0 * number + 0.5
            history = HISTORY if turn else None
            length = 8 if turn else HISTORY
            arrivals.append(Arrival(f"chat {number}", at, length, 2, history_tokens=history))
    yield from sorted(arrivals, key=lambda each: each.at or 0.0)


def test_a_scan_takes_nothing_from_conversations_that_lru_would_keep() -> None:
    cost, recompute = instant(32)
    one = ChatterWatch(
        cost,
        policy_named(DEFAULT, recompute, 32),
        CacheConfig(20_000 // 32, 0),
        SchedulerConfig(512, 16),
        count_from=800.0,
    )
    figures = one.run(beside_chatters(20))
    assert figures.recomputed_tokens < 0.7 * figures.history_tokens, "the scan is resisted"
    assert one.num_recomputed < 2 * HISTORY
