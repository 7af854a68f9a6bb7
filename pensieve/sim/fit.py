"""What iterations cost on a machine, fitted to the journal of a daemon that ran there.

A replay gives each iteration's slices and how long it took (observed.py).  From those the costs of
computing are fitted (fit_compute.py) and then the rate of the link between the tiers.  Half
of the iterations, every other one, is fitted; the error is that of the other half.

**What was not observed is not made up.**  A number counts as found if leaving it out explains the
iterations clearly worse.  Any other keeps the proportion to the found ones that it has in `assumed` (the
model's shape on a data sheet), within what the iterations allow, and `Fit.assumed` lists it.

The rate of the link is found where copies took longer than the computation beside them, or where an iteration
waited for a copy and for nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pensieve.sim.cost import CostModel, HardwarePreset, ModelPreset
from pensieve.sim.fit_compute import fit_compute
from pensieve.sim.observed import KINDS, Observation, Observations, expected_seconds

FITTED_MAX = 1000  # of each kind
ITERATIONS_MIN = 40


class FitError(NamedTuple):
    """The error of a kind of iterations, |predicted - measured| / measured."""

    kind: str
    seen: int  # in the journal
    held_out: int
    median: float | None
    p90: float | None


@dataclass(frozen=True)
class Fit:
    """Costs, how well they predict, and which of them were observed."""

    cost: CostModel
    errors: tuple[FitError, ...]  # by kind, and of all
    found: tuple[str, ...]  # names of `CostModel`
    assumed: tuple[str, ...]  # what was not observed, and what stands in its place


def assumed_for(computed_by: Mapping[str, Any], hardware: HardwarePreset) -> CostModel | None:
    """What the model that a journal names costs by its shape and a data sheet; None if it names none."""
    names = ("parameters", "layers", "heads", "head_size", "weight_bytes", "kv_bytes_per_token")
    given: list[int] = [each for name in names if isinstance(each := computed_by.get(name), int)]
    if len(given) < len(names) or min(given) < 1:
        return None
    parameters, layers, heads, head_size, weight_bytes, kv_bytes = given
    name = str(computed_by.get("name", "the model"))
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
    computed_by: Mapping[str, Any], model: ModelPreset, hardware: HardwarePreset
) -> CostModel:
    """Of the model that a journal names; of `model`, as far as the journal does not describe it."""
    if (assumed := assumed_for(computed_by, hardware)) is not None:
        return assumed
    cost = CostModel.of(model, hardware)
    layers, kv_bytes = computed_by.get("layers"), computed_by.get("kv_bytes_per_token")
    if isinstance(layers, int) and isinstance(kv_bytes, int) and min(layers, kv_bytes) > 0:
        return replace(cost, layers=layers, kv_bytes_per_token=kv_bytes)
    return cost


def fitted(seen: Observations, assumed: CostModel, source: str) -> Fit:
    """Raises ValueError if there are too few iterations to fit."""
    learned = {kind: _thinned(rows[0::2]) for kind, rows in seen.kept.items()}
    groups = [learned[KINDS[0]], learned[KINDS[1]]]
    if sum(map(len, groups)) < ITERATIONS_MIN:  # copies towards the host disturb little
        groups.append([row for row in learned[KINDS[2]] if not row.slots_in])
    if sum(map(len, groups)) < ITERATIONS_MIN:
        count = sum(seen.counts.values())
        raise ValueError(
            f"of {count} iterations {sum(map(len, groups))} can be fitted, and at least {ITERATIONS_MIN} "
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
    """The costs with the link's rate, and a note if it was not found."""
    rows = [row for row in rows if row.slots_in]

    def error(rate: float) -> float:
        model = replace(cost, link_bytes_per_second=rate)
        return statistics.median(
            abs(expected_seconds(model, row) / row.seconds - 1) for row in rows
        )

    at_least = 0.0
    if len(rows) >= LINK_ROWS_MIN:
        hidden = error(math.inf)
        grid = [10 ** (5 + i / 8) for i in range(65)]
        best = min(grid, key=error)
        if error(best) < 0.9 * hidden:
            closer = [best * 10 ** (i / 64) for i in range(-8, 9)]
            return replace(cost, link_bytes_per_second=min(closer, key=error)), ""
        at_least = next((rate for rate in grid if error(rate) <= 1.05 * hidden), 0.0)
    if len(rates) >= LINK_ROWS_MIN:
        rate = statistics.median(rates) * cost.kv_bytes_per_token
        return replace(cost, link_bytes_per_second=max(rate, at_least)), ""
    taken = max(cost.link_bytes_per_second, at_least)
    why = "no copy was waited for"
    if at_least:
        why = f"copies hid behind the computation, so it is at least {at_least:.3g}"
    return (
        replace(cost, link_bytes_per_second=taken),
        f"link_bytes_per_second: {why}; {taken:.3g} is that of {cost.source}"
        if taken > at_least
        else f"link_bytes_per_second: {why}; that is taken",
    )
