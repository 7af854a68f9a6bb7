"""The costs of computing, fitted to observed iterations.

    seconds = dense · max(n, tokens) + attention · max(r · keys, pairs) + overhead

The floor of the dense part is `dense · n` (up to n tokens it takes as long as reading the weights) and that
of attention, per key, `attention · r`.  For a given n and r this is linear, so both are tried over all that
was observed, and each time the other three are the least squares that are not negative (least_squares.py).

Errors count relative to the prediction, and those far outside of the others (a pause, another process on
the machine) less and in the end not at all (Tukey's biweight).  Iterations of one kind are judged among
themselves, and kinds weigh about the same: in a journal of many decodes and few prompts, the prompts would
look like outliers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import mul
from typing import NamedTuple

from pensieve.sim.cost import CostModel
from pensieve.sim.least_squares import nonnegative
from pensieve.sim.observed import Observation

STEPS = 24  # n and r that are tried
ROUNDS = 8  # of weighing again, the later ones closer to the best n and r
CLEARLY = 12.0  # times the squares left per iteration: what leaving a number out must cost
SPREAD_MIN = 0.001  # relative: no clock and no machine is more exact
GROUP_WEIGHT_MAX = 20.0


class _Solved(NamedTuple):
    squares: float  # relative and weighted: what is left
    dense: float
    attention: float
    overhead: float
    n: float
    r: float

    def seconds(self, row: Observation) -> float:
        dense = self.dense * max(self.n, row.tokens)
        return dense + self.attention * max(self.r * row.keys, row.pairs) + self.overhead


def fit_compute(
    groups: Sequence[Sequence[Observation]], assumed: CostModel
) -> tuple[CostModel, list[str], list[str]]:
    """The costs without the link's; what was found, and notes on what was not."""
    rows = [row for group in groups for row in group]
    ns, rs = _steps([row.tokens for row in rows]), _steps([row.pairs / row.keys for row in rows])
    (least_n, most_n), (least_r, most_r) = (ns[0], ns[-1]), (rs[0], rs[-1])
    weights = [1 / row.seconds**2 for row in rows]
    best = _best(rows, weights, ns, rs)
    for turn in range(ROUNDS):
        weights = _weights(groups, best, 8.0 if turn < 3 else 4.685)
        best = _best(rows, weights, ns, rs)
        if turn >= 2:
            ns, rs = _closer(ns, best.n), _closer(rs, best.r)

    bar = best.squares * (1 + CLEARLY / len(rows)) + 1e-9

    def matters(ns: Iterable[float], rs: Iterable[float], without: str = "") -> bool:
        return _best(rows, weights, ns, rs, without).squares > bar

    some_n, some_r = sorted({least_n, *ns, most_n}), sorted({least_r, *rs, most_r})
    attends = matters(some_n, [best.r], "attention")
    grows = matters([most_n], some_r)
    has_overhead = grows and matters(some_n, some_r, "overhead")
    if not (grows and has_overhead and attends):  # the others take over what it explained
        without = "" if has_overhead else "overhead"
        ns = some_n if grows else [most_n]
        best = _best(rows, weights, ns, some_r, without if attends else f"{without} attention")
    has_floor = not grows or matters([least_n], some_r, "" if has_overhead else "overhead")
    by_pair = attends and matters([best.n], [most_r]) if least_r < most_r else False
    by_key = attends and (not by_pair or matters([best.n], [least_r]))

    floor, attention = best.dense * best.n, best.attention if attends else math.inf
    scale = _ratio(best.dense, assumed.dense_seconds_per_token) if grows else 0.0
    scale_floor = _ratio(floor, assumed.dense_seconds_min) if has_floor else 0.0
    scale, scale_floor = scale or scale_floor, scale_floor or scale
    numbers = {}
    found, notes = [], []
    # name, whether it was found, its value, the most that what was seen allows, and why it was not found
    for name, was_found, value, most, why in (
        (
            "dense_seconds_per_token",
            grows,
            best.dense,
            floor / most_n,
            f"no batch of up to {most_n:.0f} tokens took longer for its size",
        ),
        (
            "dense_seconds_min",
            has_floor,
            floor,
            best.dense * least_n,
            f"no batch of {least_n:.0f} tokens or more was bound by reading the weights",
        ),
        (
            "attention_seconds_per_pair",
            by_pair,
            best.attention,
            attention * best.r / most_r,
            "no iteration was bound by the products of attention",
        ),
        (
            "attention_seconds_per_key",
            by_key,
            best.attention * best.r,
            attention * least_r,
            "no iteration was bound by reading KV",
        ),
    ):
        if was_found:
            numbers[name] = value
            found.append(name)
        else:
            factor = scale if "_per_token" in name or "_per_pair" in name else scale_floor
            numbers[name] = min(getattr(assumed, name) * factor, most)
            notes.append(f"{name}: {why}; in proportion to {assumed.source}")
    numbers["overhead_seconds"] = best.overhead if has_overhead else 0.0
    if has_overhead:
        found.append("overhead_seconds")
    else:
        notes.append(
            "overhead_seconds: cannot be separated from what every iteration takes, and is part of that"
        )
    return replace(assumed, **numbers), found, notes  # type: ignore[arg-type]


def _weights(groups: Sequence[Sequence[Observation]], best: _Solved, reach: float) -> list[float]:
    """Of every row: how far to trust it, seen beside others of its kind."""
    weights = []
    most = max(map(len, groups))
    for group in groups:
        predicted = [best.seconds(row) for row in group]
        errors = [row.seconds / each - 1 for row, each in zip(group, predicted, strict=True)]
        cut = reach * max(1.4826 * statistics.median(map(abs, errors)), SPREAD_MIN)
        share = min(most / len(group), GROUP_WEIGHT_MAX)
        weights += [
            share * (1 - (error / cut) ** 2) ** 2 / each**2 if abs(error) < cut else 0.0
            for error, each in zip(errors, predicted, strict=True)
        ]
    return weights


def _ratio(found: float, assumed: float) -> float:
    return found / assumed if assumed > 0 else 0.0


def _steps(values: Sequence[float]) -> list[float]:
    least, most = min(values), max(values)
    if least == most:
        return [float(least)]
    ratio = (most / least) ** (1 / (STEPS - 1))
    return [least, *(least * ratio**i for i in range(1, STEPS - 1)), most]


def _closer(steps: list[float], at: float) -> list[float]:
    """Between the neighbours of one of them."""
    index = steps.index(at)
    low, high = steps[max(index - 1, 0)], steps[min(index + 1, len(steps) - 1)]
    return sorted({at, *(low + (high - low) * i / 8 for i in range(9))})


def _best(
    rows: Sequence[Observation],
    weights: Sequence[float],
    ns: Iterable[float],
    rs: Iterable[float],
    without: str = "",
) -> _Solved:
    """The least squares over all n and r; sums over the rows are shared between them."""
    seconds = [row.seconds for row in rows]
    to_seconds = list(map(mul, weights, seconds))
    squares, constant, constant_seconds = (
        sum(map(mul, to_seconds, seconds)),
        sum(weights),
        sum(to_seconds),
    )
    allowed = [
        i for i, name in ((0, ""), (1, "attention"), (2, "overhead")) if name not in without.split()
    ]
    attended = []
    for r in rs:
        column = [max(r * row.keys, row.pairs) for row in rows]
        weighted = list(map(mul, weights, column))
        sums = (sum(map(mul, weighted, column)), sum(weighted), sum(map(mul, to_seconds, column)))
        attended.append((r, weighted, sums))
    best: _Solved | None = None
    for n in ns:
        column = [max(n, row.tokens) for row in rows]
        nn = sum(w * each * each for w, each in zip(weights, column, strict=True))
        n1, nt = sum(map(mul, weights, column)), sum(map(mul, to_seconds, column))
        for r, weighted, (rr, r1, rt) in attended:
            nr = sum(map(mul, weighted, column))
            products = [[nn, nr, n1], [nr, rr, r1], [n1, r1, constant]]
            targets = [nt, rt, constant_seconds]
            solved = nonnegative(
                [[products[i][j] for j in allowed] for i in allowed], [targets[i] for i in allowed]
            )
            found = [0.0, 0.0, 0.0]
            left = squares
            for i, x in zip(allowed, solved, strict=True):
                found[i] = x
                left -= x * targets[i]
            left = max(left, 0.0)
            if best is None or left < best.squares:
                best = _Solved(left, found[0], found[1], found[2], n, r)
    assert best is not None
    return best
