"""The costs that a start uses (from --cost, a kept profile, or an estimate), and the line that names them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pensieve.config import Settings, resolve
from pensieve.core.cost import CostProfile
from pensieve.launch import profiles
from pensieve.launch.costs import Costs, costs_of
from pensieve.model.loader import LoadedModel, load
from pensieve.sim import cost_file
from pensieve.sim.cost import CostModel
from tests.conversations.rig import write_model
from tests.text.families import QWEN_2_5

CHUNKS = CostProfile.measured_at({32: 0.001, 64: 0.002, 128: 0.004}, 0.01, 0.003)
COST = CostModel(
    *(0.001, 0.002, 1e-7, 2e-7, 0.0, 2, 128, 1e6, "a profile"),
    dense_points=((2, 0.002), (64, 0.02)),
    decode_points=((0, 0.0), (8, 0.001)),
    chunk_costs=(8, CHUNKS),
)
ERRORS = {"errors": [{"kind": "all", "median": 0.042, "p90": 0.1}]}


class Place:
    """A model, and an empty folder for profiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_model(folder / "model", QWEN_2_5)
        self.model: LoadedModel = load(self.folder)

    def settings(self, **given: str) -> Settings:
        return resolve({"model": str(self.folder), "chunk_tokens": "8", **given}, {}).settings

    def key(self, **given: str) -> profiles.ProfileKey:
        return profiles.key_of(self.settings(**given), self.folder, self.model)

    def costs(self, **given: str) -> Costs:
        journal_model = {"name": "model", "layers": 2}
        return costs_of(self.settings(**given), self.folder, self.model, journal_model)

    def keep(self, key: profiles.ProfileKey, cost: CostModel = COST) -> None:
        profiles.write(key.path, profiles.text_of(key, cost, "2026-11-23", ERRORS))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Place(tmp_path)


def test_without_a_profile_costs_are_estimated_and_the_line_says_how_to_make_one(
    place: Place,
) -> None:
    found = place.costs()
    assert not found.retention.measured
    assert not found.iterations.dense_points
    assert found.in_words == (
        "costs: estimated from the model's shape: no profile of this model on this machine; "
        "`pensieve profile` makes one"
    )


def test_a_kept_profile_is_used(place: Place) -> None:
    key = place.key()
    place.keep(key)
    assert key.path.parent.name == "profiles"
    assert key.path.parent.parent.name == "pensieve"
    found = place.costs()
    assert found.retention == CHUNKS
    assert found.iterations == COST.computing
    assert found.in_words == (
        f"costs: profiled on this machine, 2026-11-23, off by 4% in the median ({key.path})"
    )


def test_the_file_of_cost_wins_over_a_kept_profile(place: Place, tmp_path: Path) -> None:
    place.keep(place.key())
    fitted = replace(COST, dense_points=(), decode_points=(), chunk_costs=None, source="run.jsonl")
    path = tmp_path / "cost.json"
    path.write_text(cost_file.text_of(fitted, {}))
    found = place.costs(cost=str(path))
    assert found.iterations == fitted.computing
    assert found.retention.chunk_seconds(0) == pytest.approx(0.008)
    assert found.in_words == f"costs: fitted from a journal, from {path}: run.jsonl"
    profiles.write(path, profiles.text_of(place.key(), COST, "2026-11-23", ERRORS))
    words = place.costs(cost=str(path)).in_words
    assert words == f"costs: profiled, from {path}: a profile"


@pytest.mark.parametrize(
    "given", [{"weights": "int8"}, {"tensor_parallel": "2"}, {"chunk_tokens": "16"}]
)
def test_a_profile_of_other_settings_is_not_used(place: Place, given: dict[str, str]) -> None:
    place.keep(place.key(**given))
    assert "no profile of this model" in place.costs().in_words


def test_a_profile_of_other_threads_types_or_models_is_not_used(
    place: Place, tmp_path: Path
) -> None:
    place.keep(place.key())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert "no profile of this model" in place.costs().in_words
    finally:
        torch.set_num_threads(threads)
    assert "profiled on this machine" in place.costs().in_words
    place.model = load(place.folder, dtype=torch.bfloat16)
    assert "no profile of this model" in place.costs().in_words
    place.model = load(place.folder)
    config = json.loads((place.folder / "config.json").read_text())
    config["rope_theta"] = 20000.0
    (place.folder / "config.json").write_text(json.dumps(config))
    assert "no profile of this model" in place.costs().in_words


def test_a_profile_of_other_versions_is_not_used_and_the_line_says_so(place: Place) -> None:
    key = place.key()
    place.keep(key._replace(versions={"pensieve": "0.0.1", "torch": "1.0"}))
    ours = key.versions
    assert place.costs().in_words == (
        "costs: estimated from the model's shape: its profile was measured with pensieve 0.0.1 and "
        f"torch 1.0, but this process runs pensieve {ours['pensieve']} and torch {ours['torch']}; "
        "`pensieve profile` makes one"
    )


def test_a_damaged_profile_is_not_used_and_stops_no_start(place: Place) -> None:
    key = place.key()
    place.keep(key)
    text = key.path.read_text()
    for damaged in (text[: len(text) // 2], "[1, 2]", "", '{"version": 9, "cost": {}}'):
        key.path.write_text(damaged)
        found = place.costs()
        assert not found.retention.measured
        assert "its profile cannot be used" in found.in_words
        assert str(key.path) in found.in_words


def test_a_profile_that_another_key_wrote_under_this_name_is_not_used(place: Place) -> None:
    key = place.key()
    other = {**key.measured_with, "device": "a faster one"}
    profiles.write(
        key.path, profiles.text_of(key._replace(measured_with=other), COST, "today", ERRORS)
    )
    assert "belongs to another model or configuration" in place.costs().in_words


def test_a_profile_that_cannot_be_written_is_no_half_file(place: Place) -> None:
    key = place.key()
    place.keep(key)
    before = key.path.read_text()

    with pytest.raises(UnicodeEncodeError):
        profiles.write(key.path, "not UTF-8: \ud800")
    assert key.path.read_text() == before
    assert [each.name for each in key.path.parent.iterdir()] == [key.path.name]
