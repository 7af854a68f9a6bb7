"""Scans: more conversations than fit into the tiers return, one after the other.

LRU evicts each conversation before it returns, and reuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pensieve.core.policies.registry import DEFAULT
from pensieve.sim.simulator import SimulationFigures
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


def test_a_long_scan_of_four_times_what_fits_reuses_a_part_too() -> None:
    assert reused(DEFAULT, 80, 20_000, 0, rounds=24) >= 0.18
