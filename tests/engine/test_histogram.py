"""Histograms: the bucket of a value, and histograms sent through the pipe."""

from __future__ import annotations

import pytest

from pensieve.engine.distributions import Histogram
from pensieve.engine.messages import GetStats
from tests.engine.rig import Rig, submit


def test_a_value_equal_to_a_bound_is_in_that_bucket() -> None:
    found = Histogram((0.1, 0.5, 2.0))
    for value in (0.0, 0.1, 0.100001, 0.5, 1.9, 2.0, 2.1, 1e9):
        found.add(value)
    assert found.counts == [2, 2, 2, 2]
    assert found.sum == pytest.approx(1e9 + 7.200001 - 0.5)


def test_several_equal_values_are_added_at_once() -> None:
    found = Histogram((1, 2))
    found.add(2, 3)
    found.add(5, 2)
    assert (found.counts, found.sum) == ([0, 3, 2], 16)


def test_bounds_must_be_ascending() -> None:
    with pytest.raises(AssertionError):
        Histogram((1, 1))


def test_a_histogram_is_unchanged_by_the_pipe() -> None:
    before = Histogram((0.25, 1, 16_384))
    before.add(0.2)
    before.add(20_000, 4)
    figures = {**before.figures("x"), "x_more": 1.0, "y.1": 5}
    after = Histogram.of_figures("x", figures)
    assert (after.bounds, after.counts, after.sum) == (before.bounds, before.counts, before.sum)


def test_the_engine_counts_the_tokens_of_its_iterations() -> None:
    rig = Rig(stops=False)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4], reply=3))
    rig.take(0.1, 0.1, 0.1)
    rig.mailbox.put(GetStats(9))
    rig.engine._deliver(rig.mailbox.drain())
    figures = rig.sink.events[-1].figures  # type: ignore[union-attr]
    found = Histogram.of_figures("iteration_tokens", figures)
    assert found.bounds[:3] == (1, 8, 16)
    assert found.sum == figures["tokens_computed"] == 6
    assert found.counts[:3] == [2, 1, 0]  # two tokens of the reply, then the prompt
