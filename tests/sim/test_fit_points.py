"""Fitting iteration times finds a planted cost model. Errors are computed from held-out iterations."""

from __future__ import annotations

import random

import pytest

from pensieve.core.cost import work_of
from pensieve.sim.cost import CostModel
from pensieve.sim.fit_points import chunk_profile, errors_of, fit_points
from pensieve.sim.least_squares import nonnegative
from pensieve.sim.observed import Observation

PLANTED = CostModel(
    *(0.0, 0.0, 2e-7, 3e-6, 0.0, 4, 1000, 1e9, "planted"),
    dense_points=((2, 0.03), (16, 0.04), (64, 0.1), (512, 0.7)),
    decode_points=((0, 0.0), (1, 0.005), (16, 0.01), (64, 0.03)),
)
UNFITTED = CostModel(0, 0, 0, 0, 0, 4, 1000, 1e9, "a machine")


def seen(spans: list[tuple[int, int]], factor: float = 1.0) -> Observation:
    work = work_of(spans)
    seconds = factor * PLANTED.pass_seconds(*work)
    return Observation(work.tokens, work.pairs, work.keys, 0, seconds, work.decodes)


def mixes(seed: int, count: int, noise: float) -> list[Observation]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        contexts = [round(2 ** draw.uniform(4, 12)) for _ in range(round(2 ** draw.uniform(0, 6)))]
        spans = [(each - 1, each) for each in contexts] if draw.random() < 0.7 else []
        if not spans or draw.random() < 0.5:
            start = draw.choice((0, round(2 ** draw.uniform(4, 12))))
            spans.append((start, start + round(2 ** draw.uniform(1, 8.5))))
        pause = 4.0 if noise and draw.random() < 0.05 else 1.0
        rows.append(seen(spans, pause * (1 + draw.gauss(0, noise))))
    return rows


def test_a_planted_cost_is_found() -> None:
    found = fit_points(mixes(1, 300, 0.0), UNFITTED)
    assert found.attention_seconds_per_key == pytest.approx(3e-6, rel=0.02)
    assert found.attention_seconds_per_pair == pytest.approx(2e-7, rel=0.02)
    assert (found.layers, found.kv_bytes_per_token, found.source) == (4, 1000, "a machine")
    for tokens, decodes in ((16, 0), (100, 0), (512, 0), (1, 1), (16, 16), (64, 64)):
        expected = PLANTED.pass_seconds(tokens, 1000, 1000, decodes)
        assert found.pass_seconds(tokens, 1000, 1000, decodes) == pytest.approx(expected, rel=0.02)


def test_noise_and_pauses_change_little() -> None:
    found = fit_points(mixes(2, 300, 0.03), UNFITTED)
    every = errors_of(found, [("mixes", row) for row in mixes(3, 100, 0.0)])[-1]
    assert every.kind == "all"
    assert every.held_out == 100
    assert every.median is not None
    assert every.median < 0.02
    assert every.p90 is not None
    assert every.p90 < 0.05


def test_errors_are_listed_by_kind() -> None:
    rows = [("one", seen([(0, 100)], 2.0)), ("two", seen([(9, 10)])), ("two", seen([(99, 100)]))]
    one, two, every = errors_of(PLANTED, rows)
    assert (one.kind, one.held_out) == ("one", 1)
    assert (two.kind, two.held_out, every.held_out) == ("two", 2, 3)
    assert (one.median, two.median, every.p90) == pytest.approx((0.5, 0.0, 0.5))


def test_too_few_kinds_of_iterations_are_refused() -> None:
    with pytest.raises(ValueError, match="too few kinds"):
        fit_points([seen([(0, 1)]), seen([(5, 6)])], UNFITTED)


def test_measured_chunk_costs_never_fall_with_a_longer_context() -> None:
    measured = {at: PLANTED.iteration_seconds([(at, at + 32)]) for at in (32, 64, 128, 4096)}
    measured[64], measured[128] = measured[128] + 1e-4, measured[64]  # noise
    found = chunk_profile(measured, PLANTED, 32)
    assert found is not None
    assert found.measured
    assert found.other_seconds == pytest.approx(32 * 0.7 / 512)
    at = dict(found.attention_seconds)
    assert at[32] < at[64] == at[128] < at[4096]
    pairs = 32 * 4096 + 32 * 33 // 2
    assert at[4096] == pytest.approx(2e-7 * pairs + 3e-6 * (4096 + 32))
    assert found.copy_seconds == pytest.approx(32 * 1000 / 1e9)
    assert chunk_profile({32: 0.1}, PLANTED, 32) is None


def test_nonnegative_least_squares_finds_the_optimum() -> None:
    draw = random.Random(4)
    with_zeros = 0
    for _ in range(100):
        rows = [[draw.random() for _ in range(4)] for _ in range(10)]
        wanted = [draw.uniform(-1, 2) for _ in range(4)]
        seen = [sum(x * y for x, y in zip(row, wanted, strict=True)) for row in rows]
        products = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(4)]
        targets = [sum(row[i] * y for row, y in zip(rows, seen, strict=True)) for i in range(4)]
        found = nonnegative(products, targets)
        assert min(found) >= 0.0
        for i, x in enumerate(found):
            gradient = targets[i] - sum(products[i][j] * found[j] for j in range(4))
            assert abs(gradient) < 1e-6 if x else gradient < 1e-6
        with_zeros += 0.0 in found
    assert 20 < with_zeros < 100
