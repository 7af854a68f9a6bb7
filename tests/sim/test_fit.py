"""Fit costs to the iteration times that a journal recorded."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.fit import assumed_for, fitted
from pensieve.sim.observed import expected_seconds
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import WORKLOAD_PRESETS, drawn
from tests.sim.recorded import A100, SLOWER, journal_of, seen_in, simulated


class Noisy(CostModel):
    """A machine whose iterations vary by a few percent, and sometimes take much longer."""

    draw = random.Random(0)

    def pass_seconds(self, tokens: int, pairs: int, keys: int, decodes: int = 0) -> float:
        pause = 5.0 if self.draw.random() < 0.02 else 1.0
        return (
            super().pass_seconds(tokens, pairs, keys, decodes)
            * pause
            * math.exp(self.draw.gauss(0, 0.03))
        )


def test_a_fit_finds_the_costs_of_the_machine(tmp_path: Path) -> None:
    """The first guess is another model on another machine. Times have 3 % noise and 2 % pauses."""
    arrivals = [
        Arrival(
            arrival.conversation,
            arrival.at,
            arrival.input_tokens,
            arrival.output_tokens,
            arrival.after,
        )
        for arrival in drawn(WORKLOAD_PRESETS["agents"], 0.4, 15.0, 3)
    ]
    simulated(tmp_path / "j", arrivals, Noisy(**vars(A100)), device_tokens=200_000, budget=2048)
    seen = seen_in(tmp_path / "j")
    fit = fitted(seen, CostModel.of(MODELS["qwen2-7b"], HARDWARE["h200"]), "a test")
    assert fit.cost.dense_seconds_per_token == pytest.approx(A100.dense_seconds_per_token, rel=0.03)
    assert fit.cost.attention_seconds_per_pair == pytest.approx(
        A100.attention_seconds_per_pair, rel=0.04
    )
    assert fit.cost.attention_seconds_per_key == pytest.approx(
        A100.attention_seconds_per_key, rel=0.04
    )
    constant = fit.cost.dense_seconds_min + fit.cost.overhead_seconds
    assert constant == pytest.approx(A100.dense_seconds_min + A100.overhead_seconds, rel=0.03)
    errors = {each.kind: each for each in fit.errors}
    assert errors["all"].seen == sum(errors[kind].seen for kind in list(errors)[:3])
    assert errors["all"].median is not None
    assert errors["all"].median < 0.03
    for kind in ("decode only", "with prompts"):
        assert errors[kind].held_out > 50
        assert (errors[kind].p90 or 1.0) < 0.08


def test_a_fit_finds_the_link_speed_if_iterations_wait_for_copies(tmp_path: Path) -> None:
    slow = CostModel(**{**vars(A100), "link_bytes_per_second": 3e9})
    arrivals = [
        Arrival(f"c{turn % 12}", 10.0 * turn, 300, 20) for turn in range(240)
    ]  # more tokens than the device holds
    simulated(tmp_path / "j", arrivals, slow, device_tokens=16_000, host_tokens=200_000)
    fit = fitted(seen_in(tmp_path / "j"), A100, "a test")
    assert fit.cost.link_bytes_per_second == pytest.approx(3e9, rel=0.05)
    assert "link_bytes_per_second" in fit.found


def test_unobserved_costs_are_noted_and_scaled_in_proportion(tmp_path: Path) -> None:
    """One conversation runs at a time, with short prompts: nothing is compute-bound or copied."""
    arrivals = [Arrival(f"c{i}", 100.0 * i, 20, 200) for i in range(20)]
    simulated(tmp_path / "j", arrivals, SLOWER)
    fit = fitted(seen_in(tmp_path / "j"), A100, "a test")
    assert fit.found == ("dense_seconds_min", "attention_seconds_per_key")
    notes = {note.split(":")[0]: note for note in fit.assumed}
    assert set(notes) == {
        "dense_seconds_per_token",
        "attention_seconds_per_pair",
        "overhead_seconds",
        "link_bytes_per_second",
    }
    assert "no batch of up to 20 tokens took longer" in notes["dense_seconds_per_token"]
    constant = SLOWER.dense_seconds_min + SLOWER.overhead_seconds
    assert fit.cost.dense_seconds_min == pytest.approx(constant, rel=0.01)
    assert fit.cost.dense_seconds_per_token == pytest.approx(
        SLOWER.dense_seconds_per_token, rel=0.1
    )
    assert fit.cost.attention_seconds_per_pair == pytest.approx(
        SLOWER.attention_seconds_per_pair, rel=0.1
    )
    assert fit.cost.link_bytes_per_second == A100.link_bytes_per_second


def test_a_fit_of_too_few_iterations_is_refused(tmp_path: Path) -> None:
    journal_of(tmp_path)
    with pytest.raises(ValueError, match="at least 40 are needed"):
        fitted(seen_in(tmp_path / "j"), A100, "a test")


def test_a_long_journal_leaves_a_bounded_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pensieve.sim.observed.KEPT_MAX", 50)
    simulated(tmp_path / "j", [Arrival("a", 0.0, 10, 500)])
    seen = seen_in(tmp_path / "j")
    assert seen.counts["decode only"] == 499
    kept = seen.kept["decode only"]
    assert 25 <= len(kept) <= 50
    assert [row.keys - kept[0].keys for row in kept] == [16 * i for i in range(len(kept))]
    assert expected_seconds(A100, kept[0]) == pytest.approx(kept[0].seconds)


def test_first_costs_are_derived_from_the_model_in_the_journal() -> None:
    named = {
        "name": "m",
        "parameters": 8_030_000_000,
        "layers": 32,
        "heads": 32,
        "head_size": 128,
        "weight_bytes": 16_060_000_000,
        "kv_bytes_per_token": 131_072,
    }
    found = assumed_for(named, HARDWARE["a100-80gb"])
    assert found is not None
    assert vars(found) == {**vars(A100), "source": found.source}
    assert assumed_for({**named, "layers": "x"}, HARDWARE["cpu"]) is None
    assert assumed_for({}, HARDWARE["cpu"]) is None
