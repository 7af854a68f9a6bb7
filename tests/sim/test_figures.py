"""Published figures played again: every row is there, and what a search finds is right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pensieve.bench import paper_figures as figures
from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.long_prompts import PREFILL_FIRST, SCHEDULERS, TABLE_4, play
from pensieve.sim.scenario import Scenario, at_latency
from pensieve.sim.trace import HABITS, drawn

ROWS = {
    "3.12a": 4,
    "3.12b": 4,
    "3.12b, M11": 1,
    "3.13a": 3,
    "3.13b": 4,
    "3.14": 4,
    "3.15a": 1,
    "3.15b": 1,
    "3.16": 3,
    "3.18": 2,
    "table 4": 12,
    "M12": 2,
}


def test_every_row_and_every_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "figures"
    assert figures.main([str(folder), "--quick", "--svg"]) == 0
    out, err = capsys.readouterr()
    assert "too short to mean anything" in out
    assert "assumed: memory: 40 GB of KV and 220 GB" in err
    assert "figure 3.12b, llama2-13b-gqa, vLLM-like" in err
    told = json.loads((folder / "figures.json").read_text())
    counts: dict[str, int] = {}
    for row in told["rows"]:
        counts[row["figure"]] = counts.get(row["figure"], 0) + 1
        assert math.isfinite(row["ours"]), row
        assert row["what"] in out
    assert counts == ROWS
    papers = {row["what"]: row["paper"] for row in told["rows"]}
    assert papers["llama2-13b-gqa: throughput over vLLM-like"] == "1.52 x"
    assert papers["yi-34b, documents, combined: between tokens P99"] == "0.35 s"
    assert (folder / "figures.md").read_text() == out
    drawn = {path.stem for path in folder.glob("*.svg")}
    assert drawn == {curve["name"] for curve in told["curves"]}
    assert len(drawn) == 10


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(figures.figures, "lines", lambda study: iter(()))
    assert figures.main([str(tmp_path / "file"), "--quick"]) == 3
    assert "cannot write to" in capsys.readouterr().err


# -- throughput at equal latency --


def curve(rate: float) -> dict[str, Any]:
    """A P90 that doubles with each conversation more, and 100 tokens for each."""
    return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": 10 * 2**rate}


@pytest.mark.parametrize("begin", [0.05, 1.0, 3.0, 40.0])
def test_the_limit_is_found_from_either_side(begin: float) -> None:
    found = at_latency(curve, 80.0, begin, narrowings=2)
    assert found.reached
    assert found.rate == pytest.approx(3.0)
    assert found.tokens_per_second == pytest.approx(300.0)
    rates = [row["rate"] for row in found.rows]
    assert rates == sorted(set(rates)), "each was played once"


def test_a_limit_that_is_not_reached_says_so() -> None:
    def flat(rate: float) -> dict[str, Any]:
        return {"rate": rate, "tokens_per_second": rate, "normalized_p90": 10.0}

    found = at_latency(flat, 80.0, 1.0, steps_max=2)
    assert (found.reached, found.rate) == (False, 2.25)
    found = at_latency(flat, 5.0, 1.0, steps_max=2)
    assert not found.reached
    assert found.rate == pytest.approx(1 / 2.25)

    def nobody(rate: float) -> dict[str, Any]:
        return {"rate": rate, "tokens_per_second": None, "normalized_p90": None}

    assert not at_latency(nobody, 80.0, 1.0, steps_max=2).reached


def test_a_load_that_serves_nobody_is_not_the_limit() -> None:
    def broken(rate: float) -> dict[str, Any]:
        p90 = 10.0 if rate <= 1 else None
        return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": p90}

    found = at_latency(broken, 80.0, 1.0)
    assert (found.reached, found.rate, found.tokens_per_second) == (True, 1.0, 100.0)


def test_longer_conversations_take_longer_to_gather() -> None:
    habits = HABITS["sharegpt"]
    assert habits.turns_from(1) == habits.turns_mean
    found = [visit.conversation for visit in drawn(habits, 1.0, 5000.0, 9, turns_min=5)]
    each = len(found) / len(set(found))
    assert each == pytest.approx(habits.turns_from(5), rel=0.07)
    assert each > 1.5 * habits.turns_mean


def test_a_load_that_has_gone_on_for_long_has_its_long_histories() -> None:
    """Before the doors open nothing takes time; afterwards an empty house has much shorter histories."""
    cost = CostModel.of(MODELS["llama2-13b-gqa"], HARDWARE["a100-80gb"])
    options: dict[str, Any] = {"warm_seconds": 20.0, "seconds": 60.0, "reaction_seconds": 20.0}
    scenario = Scenario(cost, 195_000, 1_000_000, HABITS["sharegpt"], **options)
    long, empty = (
        Scenario(**{**vars(scenario), "lived_in": lived_in}).play(0.5) for lived_in in (True, False)
    )
    assert long["history_tokens"] / long["turns"] > 2 * empty["history_tokens"] / empty["turns"]
    assert long["seconds"] == pytest.approx(60.0, abs=1.0)
    assert long["recomputed_tokens"] == 0
    assert 20 < long["normalized_p90"] < 40


# -- long prompts --


def test_pieces_of_prompts_keep_whoever_generates_going() -> None:
    """Table 4's order, and M12: at equal throughput a third or less of what prefill first makes wait."""
    found = {
        name: play("documents", 0.45, scheduling, requests=32, seeds=1)
        for name, scheduling in {**SCHEDULERS, "prefill first": PREFILL_FIRST}.items()
    }
    ours, first = found["combined"], found["prefill first"]
    assert ours["gap"] <= first["gap"] / 3
    assert ours["tokens_per_second"] >= 0.97 * first["tokens_per_second"]
    assert ours["gap"] <= found["chunked prefills only"]["gap"]
    assert ours["first_token"] < found["chunked prefills only"]["first_token"]
    assert found["hybrid batches only"]["gap"] > 3 * ours["gap"]
    assert set(TABLE_4["documents"]) == set(SCHEDULERS)
