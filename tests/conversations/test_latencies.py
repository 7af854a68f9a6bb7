"""Token latencies that the operator sees: quantiles of the last minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig

LONG = pb.Sampling(max_tokens=40, ignore_eos=True)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    """A daemon with iterations of 5 ms."""
    with DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as rig:
        yield rig


def stats(rig: DaemonRig) -> Any:
    return rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats


def test_stats_include_first_token_and_token_gap_latencies(rig: DaemonRig) -> None:
    assert stats(rig).first_token.count == stats(rig).token_gap.count == 0
    for number in range(3):
        rig.ask(f"c{number}", "hello", sampling=LONG)
    found = stats(rig)
    assert (found.first_token.count, found.token_gap.count) == (3, 3 * 39)
    assert 0.004 < found.first_token.p50_seconds <= found.first_token.p95_seconds
    assert 0.002 < found.token_gap.p50_seconds <= found.token_gap.p99_seconds


def test_a_replay_is_not_counted_in_the_latencies(rig: DaemonRig) -> None:
    for _ in range(2):
        rig.ask("c", "hello", sampling=LONG, request_id="one")
    assert stats(rig).first_token.count == 1
