"""`Series` merges bins and `Distribution` counts values by class, so that memory is bounded."""

from __future__ import annotations

import random

import pytest

from pensieve.sim.series import Distribution, Series


def test_bins_hold_means_and_double_their_width_when_full() -> None:
    series = Series(("tokens", "running"), bins=4, width_seconds=1.0)
    for at, tokens in ((0.0, 10), (0.5, 20), (1.0, 60), (3.9, 40)):
        series.add(at, (tokens, 1))
    assert series.means() == {
        "seconds": [0, 1, 2, 3],
        "tokens": [15, 60, None, 40],
        "running": [1, 1, None, 1],
    }
    series.add(4.0, (100, 5))
    assert series.width_seconds == 2.0
    assert series.means() == {
        "seconds": [0, 2, 4],
        "tokens": [30, 40, 100],
        "running": [1, 1, 5],
    }
    series.add(100.0, (0, 0))
    assert series.width_seconds == 32.0, "it may take several doublings at once"
    assert series.means()["tokens"] == [pytest.approx(230 / 5), None, None, 0]


def test_a_long_series_loses_no_values() -> None:
    series = Series(("tokens",), bins=64, width_seconds=0.01)
    for moment in range(100_000):
        series.add(moment * 0.1, (1.0,))
    means = series.means()
    assert len(means["seconds"]) <= 64
    assert set(means["tokens"]) == {1.0}


def test_quantiles_are_accurate_to_a_quarter_of_a_percent() -> None:
    draw = random.Random(4)
    values = [draw.lognormvariate(-3, 2) for _ in range(20_000)]
    spread = Distribution()
    for value in values:
        spread.add(value)
    values.sort()
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 0.9999):
        exact = values[int(share * len(values))]
        assert spread.quantile(share) == pytest.approx(exact, rel=0.0026)
    assert spread.total == pytest.approx(sum(values))
    assert len(spread.classes) < 4000


def test_quantiles_of_no_values_and_of_zeros() -> None:
    spread = Distribution()
    assert spread.quantile(0.5) is None
    spread.add(0.0, 3)
    spread.add(1.0)
    assert (spread.quantile(0.5), spread.count) == (0.0, 4)
    assert spread.quantile(0.99) == pytest.approx(1.0, rel=0.0026)
