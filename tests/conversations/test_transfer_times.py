"""Whether to fetch KV: decided by measured links and by the time to recompute."""

from __future__ import annotations

import pytest

from pensieve.conversations.transfer_times import (
    BYTES_PER_SECOND,
    KNOWN_SECONDS,
    LATENCY_SECONDS,
    LINKS_MAX,
    TransferTimes,
    WantedKv,
    gain_of,
)

TOKEN_BYTES = 10_000
PART_BYTES = 1_000_000  # 100 tokens


def wanted(num_tokens: int, tokens_per_second: float) -> WantedKv:
    return WantedKv(num_tokens, TOKEN_BYTES, lambda start, stop: (stop - start) / tokens_per_second)


def growing(num_tokens: int, seconds_per_pair: float) -> WantedKv:
    """Return wanted KV for which the cost of a token grows with its context."""

    def seconds(start: int, stop: int) -> float:
        return seconds_per_pair * (stop * stop - start * start) / 2

    return WantedKv(num_tokens, TOKEN_BYTES, seconds)


def test_an_unknown_link_has_a_default_rate_and_is_tried_for_long_computations() -> None:
    times = TransferTimes()
    assert times.link("a", 0.0) is None
    assert times.bytes_per_second("a", 0.0) == BYTES_PER_SECOND == 50e6
    assert not times.is_worth("a", wanted(100, 10_000.0), PART_BYTES, 0.0)  # 10 ms to compute
    assert times.is_worth("a", wanted(100, 1_000.0), PART_BYTES, 0.0)  # compute 100 ms, fetch 20 ms
    assert not times.is_worth("a", wanted(1_000, 5_500.0), PART_BYTES, 0.0)  # 182 ms, 200 ms
    assert times.is_worth("a", wanted(2_000, 5_500.0), PART_BYTES, 0.0)  # over 0.2 s: try the link


def test_transfer_rates_are_learned_for_each_address() -> None:
    times = TransferTimes()
    times.learn("a", 0.1, 10_000_000, 1.0, 0.0)
    assert not times.is_worth("a", wanted(2_000, 5_500.0), PART_BYTES, 1.0)  # no trial: known link
    times.learn("b", 0.001, 10_000_000, 0.01, 0.0)
    assert times.is_worth("b", wanted(2_000, 5_500.0), PART_BYTES, 1.0)
    assert times.is_worth("b", wanted(100, 10_000.0), PART_BYTES, 1.0)
    times.learn("a", 0.02, 10_000_000, 0.1, 2.0)  # a new measurement counts for a quarter
    link = times.link("a", 2.0)
    assert link is not None
    assert link.bytes_per_second == pytest.approx(10e6 + 90e6 / 4)
    assert link.latency_seconds == pytest.approx(0.08)


def test_an_old_measurement_of_a_link_is_forgotten() -> None:
    times = TransferTimes()
    times.learn("a", 0.1, 1_000_000, 1.0, 0.0)
    assert times.link("a", KNOWN_SECONDS - 1) is not None
    assert times.link("a", KNOWN_SECONDS) is None
    times.learn("a", 0.1, 9_000_000, 1.0, KNOWN_SECONDS)
    assert times.bytes_per_second("a", KNOWN_SECONDS) == 9_000_000


def test_a_transfer_of_zero_bytes_is_not_a_measurement() -> None:
    times = TransferTimes()
    times.learn("a", 0.1, 0, 1.0, 0.0)
    assert times.link("a", 0.0) is None


def test_fetching_only_the_last_tokens_can_be_worth_it() -> None:
    """A link moves 100 tokens in 0.1 s. Computing the first 100 takes 0.005 s, the last 100 take 0.995 s."""
    times, growing_cost = TransferTimes(), growing(10_000, 1e-6)
    times.learn("a", 0.01, 1_000_000, 0.1, 0.0)
    rate = times.bytes_per_second("a", 0.0)
    assert gain_of(growing_cost, 9_900, 10_000, rate) == pytest.approx(0.895)
    assert gain_of(growing_cost, 0, 100, rate) == pytest.approx(-0.095)
    assert times.is_worth("a", growing_cost, PART_BYTES, 0.0)
    assert not times.is_worth("a", growing(900, 1e-6), PART_BYTES, 0.0)


def test_a_high_latency_makes_fetching_not_worth_it() -> None:
    times = TransferTimes()
    times.learn("near", LATENCY_SECONDS, 1_000_000, 0.001, 0.0)
    times.learn("far", 0.5, 1_000_000, 0.001, 0.0)
    assert times.is_worth("near", wanted(1_000, 10_000.0), PART_BYTES, 0.0)
    assert not times.is_worth("far", wanted(1_000, 10_000.0), PART_BYTES, 0.0)


def test_the_oldest_address_is_forgotten_beyond_the_limit() -> None:
    times = TransferTimes()
    for number in range(LINKS_MAX + 1):
        times.learn(f"a{number}", 0.1, 1_000_000, 1.0, 0.0)
    assert times.link("a0", 0.0) is None
    assert times.link("a1", 0.0) is not None
