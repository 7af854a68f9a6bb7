"""Quantiles and shares of the last minutes, in a few kilobytes."""

from __future__ import annotations

import random
import sys

import pytest

from pensieve.engine.distributions import BUCKETS, INTERVALS, RecentShare, RecentTimes


def test_quantiles_are_right_to_within_two_percent() -> None:
    times = RecentTimes()
    draw = random.Random(5)
    values = sorted(10 ** draw.uniform(-3.9, 2.8) for _ in range(5000))
    for value in values:
        times.add(value, now=100.0)
    found = times.spread(now=100.0)
    assert found.count == 5000
    for share, seconds in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert seconds == pytest.approx(values[round(share * 5000) - 1], rel=0.02)


def test_times_below_100_microseconds_count_as_zero_and_hours_in_the_last_bucket() -> None:
    times = RecentTimes()
    assert times.spread(now=0.0).p50 == times.spread(now=0.0).count == 0
    times.add(0.0, now=1.0, count=60)
    times.add(-1e-9, now=1.0)
    times.add(1e-5, now=1.0)
    times.add(86_400.0, now=1.0, count=38)
    assert times.spread(now=1.0).p50 == 0.0
    assert times.spread(now=1.0).p99 > 900.0


def test_values_older_than_five_minutes_are_dropped_and_memory_is_bounded() -> None:
    times = RecentTimes()
    for second in range(100_000):
        times.add(1.0 if second < 99_000 else 0.01, now=float(second))
        assert len(times.intervals) <= INTERVALS
    assert sum(len(each.counts) for each in times.intervals) <= INTERVALS * BUCKETS
    assert sys.getsizeof(times.intervals[0].counts) < 4000
    found = times.spread(now=99_999.0)
    assert 200 <= found.count <= 300
    assert found.p99 == pytest.approx(0.01, rel=0.02)
    assert times.spread(now=101_000.0).count == 0


def test_the_number_that_met_an_objective_is_counted_exactly() -> None:
    times = RecentTimes(objective=0.1)
    assert times.attained(now=0.0) == 1.0
    times.add(0.1, now=1.0, count=6)
    times.add(0.1000001, now=1.0)
    times.add(3.0, now=2.0)
    assert times.attained(now=2.0) == 6 / 8
    times.add(0.01, now=400.0)
    assert times.attained(now=400.0) == 1.0


def test_a_share_covers_only_the_last_minutes() -> None:
    share = RecentShare()
    assert share.share(now=0.0) == 0.0
    for second in range(0, 600, 10):
        share.add(1.0 if second < 300 else 3.0, 4.0, now=float(second))
        if second == 290:
            assert share.share(now=290.0) == 0.25
    assert share.share(now=599.0) == 0.75
    assert share.share(now=2000.0) == 0.0
