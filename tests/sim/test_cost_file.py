"""Costs are unchanged after writing and reading their file. A wrong file is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.core.cost import CostProfile
from pensieve.sim import cost_file
from pensieve.sim.cost import CostModel
from pensieve.sim.fit import fitted
from pensieve.sim.trace import Arrival
from tests.sim.recorded import A100, seen_in, simulated


def test_costs_survive_their_file(tmp_path: Path) -> None:
    simulated(tmp_path / "j", [Arrival(f"c{i}", 10.0 * i, 600 * i, 20) for i in range(1, 9)])
    fit = fitted(seen_in(tmp_path / "j"), A100, "a test")
    assert cost_file.read(cost_file.fit_text(fit)) == fit.cost


def test_what_a_profile_measured_survives_its_file() -> None:
    chunks = CostProfile.measured_at({32: 0.0, 64: 0.5, 128: 1.0}, 2.0, 0.25)
    cost = replace(
        A100,
        dense_points=((2, 0.1), (512, 3.0)),
        decode_points=((0, 0.0), (64, 0.3)),
        chunk_costs=(32, chunks),
    )
    facts = {"measured_with": {"device": "a machine"}, "errors": [{"kind": "all", "median": 0.04}]}
    found = cost_file.parsed(cost_file.text_of(cost, facts))
    assert found.cost == cost
    assert found.measured_with == {"device": "a machine"}
    assert found.errors["all"]["median"] == 0.04
    assert found.cost.recompute(32) == chunks
    assert found.cost.recompute(16).chunk_seconds(64) == pytest.approx(0.5 * 2.5)
    assert found.cost.recompute(16).copy_seconds == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 3}, "version 3 is unknown; this release reads 1 and 2"),
        ({"cost": [1]}, "not a file that"),
        ({"cost.layers": 1.5}, "cost.layers must be a whole number"),
        ({"cost.layers": None}, "cost.layers must be a number"),
        (
            {"cost.overhead_seconds": -1},
            "cost.overhead_seconds must be a number of at least 0, not -1",
        ),
        (
            {"cost.overhead_seconds": math.inf},
            "cost.overhead_seconds must be a number of at least 0",
        ),
        ({"cost.dense_seconds_per_token": 0}, "cost.dense_seconds_per_token must be above 0"),
        ({"cost.link_bytes_per_second": 0}, "cost.link_bytes_per_second must be above 0"),
        ({"cost.speed": 3}, "cost.speed is unknown"),
        ({"source": 3}, "source must be a string"),
        ({"cost.dense_points": [[2, 0.1], [1]]}, "cost.dense_points must be a list of pairs"),
        (
            {"cost.dense_points": [[2, 0.1], [4, -1]]},
            "cost.dense_points must be a number of at least 0",
        ),
        (
            {"cost.dense_points": [[4, 0.1], [2, 0.1]]},
            "dense_points must be two or more points in ascending",
        ),
        ({"chunks": 3}, "chunks must be an object"),
        ({"chunks": {"tokens": 32, "attention_seconds": []}}, "chunks.other_seconds is missing"),
        ({"measured_with": "a machine"}, "measured_with must be an object"),
    ],
)
def test_a_wrong_file_of_costs_is_refused(change: dict[str, object], problem: str) -> None:
    names = (*cost_file.SECONDS, *cost_file.COUNTS, "link_bytes_per_second")
    given = {
        "version": 1,
        "source": "a test",
        "cost": {name: getattr(A100, name) for name in names},
    }
    assert cost_file.read(json.dumps(given)) == CostModel(**{**vars(A100), "source": "a test"})
    for key, value in change.items():
        inner = given["cost"] if key.startswith("cost.") else given
        assert isinstance(inner, dict)
        inner[key.removeprefix("cost.")] = value
    with pytest.raises(ValueError, match=problem):
        cost_file.read(json.dumps(given))
