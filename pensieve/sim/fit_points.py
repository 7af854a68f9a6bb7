"""Fit a cost model to the measured iterations of a profile.

A point (core/cost.py) is a number of tokens (or decodes) and its seconds. Between two points, seconds are
interpolated. So an iteration's time is linear in the unknowns: the seconds at each point, and the seconds of
attention per key and per pair. The fit minimises the squares of relative errors. No unknown is negative, and
outliers count less (Huber).

There are points for the dense part, by number of tokens, and points for decodes, by number of decodes. Both
are at powers of two. The dense points begin at two tokens. A slice of one token is a decode, whose dense cost
need not be separated from its other costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pensieve.core.cost import CostProfile
from pensieve.sim.cost import CostModel
from pensieve.sim.fit import FitError, error_of
from pensieve.sim.least_squares import nonnegative
from pensieve.sim.observed import Observation

ROUNDS = 6
OUTLIER_ERROR = 0.05  # relative error above which an observation counts less


def fit_points(rows: Sequence[Observation], model: CostModel) -> CostModel:
    """Return a copy of `model` whose costs of computing fit these rows.

    Raises ValueError for too few rows.
    """
    tokens = _counts(max(row.tokens for row in rows), 2)
    decodes = [0, *_counts(max(row.decodes for row in rows), 1)]
    if len(tokens) < 2 or len(decodes) < 2:
        raise ValueError("there are too few kinds of iterations to fit")
    columns = [
        [
            *_shares(tokens, row.tokens),
            *_shares(decodes, row.decodes)[1:],
            float(row.keys),
            float(row.pairs),
        ]
        for row in rows
    ]
    weights = [1 / row.seconds**2 for row in rows]
    for _ in range(ROUNDS):
        found = _solve(columns, rows, weights)
        weights = []
        for column, row in zip(columns, rows, strict=True):
            predicted = sum(x * each for x, each in zip(found, column, strict=True))
            error = abs(predicted / row.seconds - 1)
            weights.append(
                min(OUTLIER_ERROR / error, 1.0) / row.seconds**2 if error else 1 / row.seconds**2
            )
    used = [any(column[i] for column in columns) for i in range(len(found))]
    dense = [(count, found[i]) for i, count in enumerate(tokens) if used[i]]
    decoding = [(0, 0.0)]
    decoding += [(n, found[i]) for i, n in enumerate(decodes[1:], len(tokens)) if used[i]]
    most, most_seconds = dense[-1]
    quarter, quarter_seconds = dense[max(len(dense) - 3, 0)]  # at about a quarter of the tokens
    slope = (most_seconds - quarter_seconds) / (most - quarter)
    return replace(
        model,
        dense_seconds_per_token=slope if slope > 0 else most_seconds / most,
        dense_seconds_min=dense[0][1],
        attention_seconds_per_key=found[-2],
        attention_seconds_per_pair=found[-1],
        overhead_seconds=0.0,
        dense_points=tuple(dense),
        decode_points=tuple(decoding),
    )


def _counts(most: int, first: int) -> list[int]:
    """Return powers of two from `first`, and `most` if it is far from the last power."""
    counts = [first << power for power in range(32) if first << power <= most]
    return [*counts, most] if counts and most >= 1.5 * counts[-1] else counts


def _shares(points: Sequence[int], count: int) -> list[float]:
    """Return the weight of each point's seconds for this count, as core.cost.between interpolates."""
    shares = [0.0] * len(points)
    right = bisect_right(points, count)
    if not right:
        shares[0] = 1.0
        return shares
    right = min(right, len(points) - 1)
    low, high = points[right - 1], points[right]
    share = (count - low) / (high - low)
    shares[right - 1], shares[right] = 1 - share, share
    return shares


def _solve(
    columns: Sequence[Sequence[float]], rows: Sequence[Observation], weights: Sequence[float]
) -> list[float]:
    size = len(columns[0])
    products = [[0.0] * size for _ in range(size)]
    targets = [0.0] * size
    for column, row, weight in zip(columns, rows, weights, strict=True):
        nonzero = [(i, value) for i, value in enumerate(column) if value]
        for i, value in nonzero:
            targets[i] += weight * value * row.seconds
            for j, other in nonzero:
                products[i][j] += weight * value * other
    return nonnegative(products, targets)


def errors_of(cost: CostModel, held_out: Sequence[tuple[str, Observation]]) -> tuple[FitError, ...]:
    """Return the error of each kind, and of all together."""
    kinds = list(dict.fromkeys(kind for kind, _ in held_out))
    by_kind = [(kind, [row for each, row in held_out if each == kind]) for kind in kinds]
    every = [row for _, row in held_out]
    return tuple(error_of(kind, len(rows), rows, cost) for kind, rows in [*by_kind, ("all", every)])


def chunk_profile(
    measured: Mapping[int, float], cost: CostModel, chunk_tokens: int
) -> CostProfile | None:
    """Return the cost of recomputing a chunk.

    `measured` has the seconds of a chunk that ran alone, by the length of the context before it. The time of
    the attention is the measured time minus a base:

        base = measured time at the shortest context - attention time that `cost` predicts for that context

    Attention never takes less time after a longer context. So if a longer context was measured as faster than
    the next shorter one, both get the mean of the two times. The dense part is taken from `cost`, for a full
    batch, because dropped chunks are recomputed in full batches.

    Return None if there are too few measurements.
    """
    if len(measured) < 2:
        return None
    contexts = sorted(measured)
    first = contexts[0]
    reading, computing = cost.attention_seconds_per_key, cost.attention_seconds_per_pair
    pairs = chunk_tokens * first + chunk_tokens * (chunk_tokens + 1) // 2
    base = measured[first] - reading * (first + chunk_tokens) - computing * pairs
    rising = _nondecreasing([max(measured[context] - base, 0.0) for context in contexts])
    most, most_seconds = cost.dense_points[-1]
    return CostProfile.measured_at(
        dict(zip(contexts, rising, strict=True)),
        most_seconds / most * chunk_tokens,
        cost.copy_seconds(chunk_tokens),
    )


def _nondecreasing(values: Sequence[float]) -> list[float]:
    """Return the nearest values that never decrease."""
    means = list[tuple[float, int]]()
    for value in values:
        mean, count = value, 1
        while means and means[-1][0] > mean:
            previous, number = means.pop()
            mean, count = (mean * count + previous * number) / (count + number), count + number
        means.append((mean, count))
    return [mean for mean, count in means for _ in range(count)]
