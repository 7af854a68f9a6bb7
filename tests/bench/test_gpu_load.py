"""Throughput is compared at one latency."""

from __future__ import annotations

import pytest

from pensieve.bench import gpu_load as bench_load


def test_throughput_is_compared_at_one_latency() -> None:
    points = [(0.01, 100.0), (0.03, 300.0), (0.02, 220.0)]
    assert bench_load.throughput_at(points, 0.025) == pytest.approx(260.0)
    assert bench_load.throughput_at(points, 0.5) == 300.0
    assert bench_load.throughput_at(points, 0.001) == 100.0
