"""Fit the cost of iterations on a machine to the journal of a daemon that ran there.

A replay gives the slices and the duration of each iteration (observed.py). The fit finds the costs of
computing first, and then the rate of the link between the tiers. The fit uses every second iteration. Its
error is measured on the remaining iterations.

    seconds = dense · max(n, tokens) + attention · max(r · keys, pairs) + overhead

A batch of up to n tokens takes as long as reading the weights, `dense · n`. `keys` counts the keys that the
iteration reads, `pairs` the pairs of a query and a key. Reading a key takes `attention · r`, even if few
queries use it. For given n and r the formula is linear. So the fit tries values of n and r over the observed
range. For each pair of n and r, it finds the other three numbers by nonnegative least squares
(least_squares.py).

Errors are relative to the prediction. Outliers (a pause, another process on the machine) count less, and in
the end not at all (Tukey's biweight). Each kind of iteration is judged separately and has about the same
weight. Otherwise the prompts would look like outliers in a journal of many decodes and few prompts.

**The fit does not invent what was not observed.** A number counts as found if the fit is clearly worse
without this number. Any other number is taken from `assumed` (computed from the model's shape and a
data sheet), scaled like the found numbers, and limited to what the iterations allow. `Fit.assumed` lists
such numbers.

The link's rate is found where copies took longer than the computation, or where an iteration waited only for
a copy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, NamedTuple

from pensieve.sim.cost import CostModel, HardwarePreset, ModelPreset
from pensieve.sim.least_squares import nonnegative
from pensieve.sim.observed import KINDS, Observation, Observations, expected_seconds

FITTED_MAX = 1000  # iterations of each kind
ITERATIONS_MIN = 40
STEPS = 24  # tried values of n and of r
ROUNDS = 8  # rounds of reweighting; later rounds search closer to the best n and r
# A number counts as found if leaving it out raises the sum of squares by this many times the mean square.
SIGNIFICANCE = 12.0
SPREAD_MIN = 0.001  # relative; no clock or machine is more exact
GROUP_WEIGHT_MAX = 20.0


class FitError(NamedTuple):
    """The error on one kind of iterations: |predicted - measured| / measured."""

    kind: str
    seen: int  # iterations in the journal
    held_out: int
    median: float | None
    p90: float | None


@dataclass(frozen=True)
class Fit:
    """Fitted costs, how well they predict, and which of them were observed."""

    cost: CostModel
    errors: tuple[FitError, ...]  # the error of each kind, then of all together
    found: tuple[str, ...]  # names of fields of `CostModel`
    assumed: tuple[str, ...]  # for each number that was not observed: why, and what replaces it


def assumed_for(journal_model: Mapping[str, Any], hardware: HardwarePreset) -> CostModel | None:
    """Return the costs of a journal's model, from its shape and a data sheet; None without a shape."""
    names = ("parameters", "layers", "heads", "head_size", "weight_bytes", "kv_bytes_per_token")
    given: list[int] = [each for name in names if isinstance(each := journal_model.get(name), int)]
    if len(given) < len(names) or min(given) < 1:
        return None
    parameters, layers, heads, head_size, weight_bytes, kv_bytes = given
    name = str(journal_model.get("name", "the model"))
    preset = ModelPreset(name, parameters, layers, heads, heads, head_size)
    cost = CostModel.of(preset, hardware)
    return replace(
        cost,
        dense_seconds_min=cost.dense_seconds_min * weight_bytes / preset.weight_bytes,
        attention_seconds_per_key=cost.attention_seconds_per_key
        * kv_bytes
        / preset.kv_bytes_per_token,
        kv_bytes_per_token=kv_bytes,
    )


def assumed_costs(
    journal_model: Mapping[str, Any], model: ModelPreset, hardware: HardwarePreset
) -> CostModel:
    """Return the costs of the journal's model. Values that the journal lacks are taken from `model`."""
    if (assumed := assumed_for(journal_model, hardware)) is not None:
        return assumed
    cost = CostModel.of(model, hardware)
    layers, kv_bytes = journal_model.get("layers"), journal_model.get("kv_bytes_per_token")
    if isinstance(layers, int) and isinstance(kv_bytes, int) and min(layers, kv_bytes) > 0:
        return replace(cost, layers=layers, kv_bytes_per_token=kv_bytes)
    return cost


def fitted(seen: Observations, assumed: CostModel, source: str) -> Fit:
    """Fit the costs. Raises ValueError if there are too few iterations."""
    learned = {kind: _thinned(rows[0::2]) for kind, rows in seen.kept.items()}
    groups = [learned[KINDS[0]], learned[KINDS[1]]]
    if sum(map(len, groups)) < ITERATIONS_MIN:
        # Copies to the host hardly slow an iteration, so iterations with only such copies count, too.
        groups.append([row for row in learned[KINDS[2]] if not row.slots_in])
    if sum(map(len, groups)) < ITERATIONS_MIN:
        count = sum(seen.counts.values())
        raise ValueError(
            f"only {sum(map(len, groups))} of {count} iterations can be fitted; at least {ITERATIONS_MIN} "
            "are needed"
        )
    computing, found, notes = fit_compute([group for group in groups if group], assumed)
    cost, note = fit_link(computing, learned[KINDS[2]], seen.rates)
    if note:
        notes.append(note)
    else:
        found.append("link_bytes_per_second")
    held_out = {kind: kept[1::2] for kind, kept in seen.kept.items()}
    errors = [error_of(kind, seen.counts[kind], held_out[kind], cost) for kind in KINDS]
    everything = [row for kept in held_out.values() for row in kept]
    errors.append(error_of("all", sum(seen.counts.values()), everything, cost))
    return Fit(replace(cost, source=source), tuple(errors), tuple(found), tuple(notes))


def _thinned(rows: list[Observation]) -> list[Observation]:
    return rows[:: -(-len(rows) // FITTED_MAX) or 1]


def error_of(kind: str, seen: int, rows: Sequence[Observation], cost: CostModel) -> FitError:
    errors = sorted(abs(expected_seconds(cost, row) / row.seconds - 1) for row in rows)
    if not errors:
        return FitError(kind, seen, 0, None, None)
    p90 = errors[min(int(0.9 * len(errors)), len(errors) - 1)]
    return FitError(kind, seen, len(errors), statistics.median(errors), p90)


LINK_ROWS_MIN = 10


def fit_link(
    cost: CostModel, rows: Sequence[Observation], rates: Sequence[float]
) -> tuple[CostModel, str]:
    """Return the costs with the link's rate, and a note if the rate was not found."""
    rows = [row for row in rows if row.slots_in]

    def error(rate: float) -> float:
        model = replace(cost, link_bytes_per_second=rate)
        return statistics.median(
            abs(expected_seconds(model, row) / row.seconds - 1) for row in rows
        )

    rate_min = 0.0
    if len(rows) >= LINK_ROWS_MIN:
        hidden_error = error(math.inf)
        grid = [10 ** (5 + i / 8) for i in range(65)]
        best = min(grid, key=error)
        if error(best) < 0.9 * hidden_error:
            closer = [best * 10 ** (i / 64) for i in range(-8, 9)]
            return replace(cost, link_bytes_per_second=min(closer, key=error)), ""
        rate_min = next((rate for rate in grid if error(rate) <= 1.05 * hidden_error), 0.0)
    if len(rates) >= LINK_ROWS_MIN:
        rate = statistics.median(rates) * cost.kv_bytes_per_token
        return replace(cost, link_bytes_per_second=max(rate, rate_min)), ""
    taken = max(cost.link_bytes_per_second, rate_min)
    reason = "no iteration waited for a copy"
    if rate_min:
        reason = f"computation hid the copies, so it is at least {rate_min:.3g}"
    return (
        replace(cost, link_bytes_per_second=taken),
        f"link_bytes_per_second: {reason}; using {taken:.3g} from {cost.source}"
        if taken > rate_min
        else f"link_bytes_per_second: {reason}; using this bound",
    )


class _Solution(NamedTuple):
    squares: float  # sum of the weighted squares of the relative errors
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
    """Return the costs of computing, the names of the found numbers, and notes on the others."""
    rows = [row for group in groups for row in group]
    ns, rs = _steps([row.tokens for row in rows]), _steps([row.pairs / row.keys for row in rows])
    (least_n, most_n), (least_r, most_r) = (ns[0], ns[-1]), (rs[0], rs[-1])
    weights = [1 / row.seconds**2 for row in rows]
    best = _best(rows, weights, ns, rs)
    for number in range(ROUNDS):
        weights = _weights(groups, best, 8.0 if number < 3 else 4.685)
        best = _best(rows, weights, ns, rs)
        if number >= 2:
            ns, rs = _finer_steps(ns, best.n), _finer_steps(rs, best.r)

    squares_max = best.squares * (1 + SIGNIFICANCE / len(rows)) + 1e-9

    def is_worse(ns: Iterable[float], rs: Iterable[float], without: str = "") -> bool:
        """Return whether the fit is clearly worse with only these n and r, or without this number."""
        return _best(rows, weights, ns, rs, without).squares > squares_max

    some_n, some_r = sorted({least_n, *ns, most_n}), sorted({least_r, *rs, most_r})
    attends = is_worse(some_n, [best.r], "attention")
    grows = is_worse([most_n], some_r)
    has_overhead = grows and is_worse(some_n, some_r, "overhead")
    if not (grows and has_overhead and attends):
        # Fit again without the numbers that were not found, so that the other numbers explain all the time.
        without = "" if has_overhead else "overhead"
        ns = some_n if grows else [most_n]
        best = _best(rows, weights, ns, some_r, without if attends else f"{without} attention")
    has_floor = not grows or is_worse([least_n], some_r, "" if has_overhead else "overhead")
    by_pair = attends and is_worse([best.n], [most_r]) if least_r < most_r else False
    by_key = attends and (not by_pair or is_worse([best.n], [least_r]))

    floor, attention = best.dense * best.n, best.attention if attends else math.inf
    scale = _ratio(best.dense, assumed.dense_seconds_per_token) if grows else 0.0
    scale_floor = _ratio(floor, assumed.dense_seconds_min) if has_floor else 0.0
    scale, scale_floor = scale or scale_floor, scale_floor or scale
    numbers = {}
    found, notes = [], []
    # name, whether it was found, its value, the most that the iterations allow, why it was not found
    for name, was_found, value, most, reason in (
        (
            "dense_seconds_per_token",
            grows,
            best.dense,
            floor / most_n,
            f"no batch of up to {most_n:.0f} tokens took longer because of its size",
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
            "no iteration was bound by computing attention",
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
            notes.append(f"{name}: {reason}; scaled from {assumed.source}")
    numbers["overhead_seconds"] = best.overhead if has_overhead else 0.0
    if has_overhead:
        found.append("overhead_seconds")
    else:
        notes.append("overhead_seconds: cannot be separated, so the other costs contain it")
    return replace(assumed, **numbers), found, notes  # type: ignore[arg-type]


def _weights(groups: Sequence[Sequence[Observation]], best: _Solution, reach: float) -> list[float]:
    """Return the weight of each row: how plausible its error is among rows of its kind."""
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


def _finer_steps(steps: list[float], at: float) -> list[float]:
    """Return finer steps between the neighbours of one step."""
    index = steps.index(at)
    low, high = steps[max(index - 1, 0)], steps[min(index + 1, len(steps) - 1)]
    return sorted({at, *(low + (high - low) * i / 8 for i in range(9))})


def _best(
    rows: Sequence[Observation],
    weights: Sequence[float],
    ns: Iterable[float],
    rs: Iterable[float],
    without: str = "",
) -> _Solution:
    """Try all pairs of n and r. Return the solution with the least squares."""
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
    best: _Solution | None = None
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
            squares_left = squares
            for i, x in zip(allowed, solved, strict=True):
                found[i] = x
                squares_left -= x * targets[i]
            squares_left = max(squares_left, 0.0)
            if best is None or squares_left < best.squares:
                best = _Solution(squares_left, found[0], found[1], found[2], n, r)
    assert best is not None
    return best
