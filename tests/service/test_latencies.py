"""How long tokens take, as the operator sees it: quantiles of the latest minutes, in a few kilobytes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.service.latencies import BUCKETS, SLICES, RecentTimes
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.service.rig_daemon import ECHO, DaemonRig

LONG = pb.Sampling(max_tokens=40, ignore_eos=True)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    """Its iterations take 5 ms."""
    with DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as rig:
        yield rig


def stats(rig: DaemonRig) -> Any:
    return rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats


def test_quantiles_are_right_to_within_five_percent() -> None:
    times = RecentTimes()
    drawn = random.Random(5)
    values = sorted(10 ** drawn.uniform(-3.9, 2.8) for _ in range(5000))
    for value in values:
        times.add(value, now=100.0)
    found = times.spread(now=100.0)
    assert found.count == 5000
    for share, seconds in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert seconds == pytest.approx(values[round(share * 5000) - 1], rel=0.05)


def test_what_is_shorter_than_a_tenth_of_a_millisecond_is_nothing_and_hours_are_long() -> None:
    times = RecentTimes()
    assert times.spread(now=0.0).p50 == times.spread(now=0.0).count == 0
    times.add(0.0, now=1.0, count=60)
    times.add(-1e-9, now=1.0)
    times.add(1e-5, now=1.0)
    times.add(86_400.0, now=1.0, count=38)
    assert times.spread(now=1.0).p50 == 0.0
    assert times.spread(now=1.0).p99 > 900.0


def test_what_was_five_minutes_ago_counts_no_more_and_nothing_grows() -> None:
    times = RecentTimes()
    for second in range(100_000):
        times.add(1.0 if second < 99_000 else 0.01, now=float(second))
        assert len(times.slices) <= SLICES
    assert sum(len(each.counts) for each in times.slices) <= SLICES * BUCKETS
    assert sys.getsizeof(times.slices[0].counts) < 2000
    found = times.spread(now=99_999.0)
    assert 200 <= found.count <= 300
    assert found.p99 == pytest.approx(0.01, rel=0.05)
    assert times.spread(now=101_000.0).count == 0


def test_first_tokens_and_gaps_are_among_the_figures(rig: DaemonRig) -> None:
    assert stats(rig).first_token.count == stats(rig).token_gap.count == 0
    for number in range(3):
        rig.ask(f"c{number}", "hello", sampling=LONG)
    found = stats(rig)
    assert (found.first_token.count, found.token_gap.count) == (3, 3 * 39)
    assert 0.004 < found.first_token.p50_seconds <= found.first_token.p95_seconds
    assert 0.002 < found.token_gap.p50_seconds <= found.token_gap.p99_seconds


def test_a_reply_that_is_replayed_counts_once(rig: DaemonRig) -> None:
    for _ in range(2):
        rig.ask("c", "hello", sampling=LONG, request_id="one")
    assert stats(rig).first_token.count == 1
