"""Published figures, reproduced by simulation: every row is present, and searches find the right result."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim.cost import HARDWARE, MODELS, CostModel, device_tokens_of
from pensieve.sim.workload import HABITS, drawn
from scripts.measurements.replica import Replica, Window, run_replica
from scripts.paper_figures import __main__ as command
from scripts.paper_figures import baton_paper, sarathi_capacity
from scripts.paper_figures.equal_latency import GRID_RATIO, first_crossing
from scripts.paper_figures.pipeline import Pipeline, Stages, run_pipeline, stage_of
from scripts.paper_figures.sarathi_paper import (
    COMPUTING,
    PREFILL_FIRST,
    SCHEDULERS,
    TABLE_4,
    cost_of,
    simulate,
)
from scripts.paper_figures.scenario import Scenario
from scripts.paper_figures.study import QUICK, Panel, Spread, Study, ratio

ROWS = {
    "3.12a": 5,
    "3.12b": 5,
    "3.12b, M11": 1,
    "3.13a": 3,
    "Baton, table 1": 8,
    "Baton, table 2": 15,
    "3.13b": 4,
    "3.14": 4,
    "3.15a": 1,
    "3.15b": 1,
    "3.16": 3,
    "3.18": 2,
    "9": 24,
    "10": 24,
    "11": 3,
    "table 4": 24,
    "M12": 2,
}


def test_every_row_and_every_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "figures"
    assert command.main([str(folder), "--quick", "--svg"]) == 0
    out, err = capsys.readouterr()
    assert "too short to mean anything" in out
    assert "assumed: memory: 40 GB of KV and 220 GB" in err
    assert "figure 3.12b, llama2-13b-gqa, vLLM-like" in err
    result = json.loads((folder / "figures.json").read_text())
    assert (result["quick"], result["seeds"]) == (True, 1)
    counts: dict[str, int] = {}
    for row in result["rows"]:
        counts[row["figure"]] = counts.get(row["figure"], 0) + 1
        assert math.isfinite(row["ours"]), row
        assert row["by_seed"] == [row["ours"]]
        assert row["what"] in out
    assert counts == ROWS
    papers = {row["what"]: row["paper"] for row in result["rows"]}
    assert papers["llama2-13b-gqa: throughput over vLLM-like"] == "1.52 x"
    assert papers["yi-34b, documents, combined: between tokens P99"] == "0.35 s"
    assert (folder / "figures.md").read_text() == out
    (sheet,) = folder.glob("*.svg")  # one file for all figures
    assert sheet.name == "figures.svg"
    assert len(result["curves"]) == 19


def test_a_single_figure_over_several_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "--quick", "--seeds", "3", "--figure", "3.18", "--json"]
    assert command.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["figure"] for row in result["rows"]} == {"3.18"}
    assert result["seeds"] == 3
    for row in result["rows"]:
        assert len(row["by_seed"]) == 3
        assert row["ours"] == sorted(row["by_seed"])[1]
        assert len(set(row["by_seed"])) > 1, "seeds draw other conversations"


def test_wrong_numbers_and_names_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(tmp_path), "--seeds", "0"]) == 3
    assert "--seeds must be 1 or more" in capsys.readouterr().err
    assert command.main([str(tmp_path), "--seconds", "0"]) == 3
    assert "--seconds must be above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([str(tmp_path), "--figure", "9.99"])


def test_a_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(command.FIGURES, "3.18", lambda study: iter(()))
    assert command.main([str(tmp_path / "file"), "--quick", "--figure", "3.18"]) == 3
    assert "cannot write to" in capsys.readouterr().err


def test_a_spread_shows_its_median_and_its_ends() -> None:
    found = ratio([3.0, 1.0, 4.0], [2.0, 2.0, 2.0])
    assert found.values == (1.5, 0.5, 2.0)
    assert found.shown("{:.1f} x") == "1.5 x (0.5 x to 2.0 x)"
    assert Spread((1.25,)).shown("{:.2f}") == "1.25"
    assert Spread((0.001, 0.002)).shown("{:.0f} %") == "0 %"
    assert math.isnan(ratio([1.0], [0.0]).median)


# -- throughput at equal latency --


def curve(rate: float) -> dict[str, Any]:
    """Return a P90 that doubles with each conversation per second, and 100 tokens per conversation."""
    return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": 10 * 2**rate}


def wavy(rate: float) -> dict[str, Any]:
    """Return a P90 above 80 between the rates 1.2 and 1.9, and again from 3 on."""
    p90 = 100.0 if 1.2 < rate < 1.9 or rate > 3 else 50.0
    return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": p90}


@pytest.mark.parametrize("begin", [0.05, 1.0, 3.0, 40.0])
def test_the_limit_is_found_from_either_side(begin: float) -> None:
    found = first_crossing(curve, 80.0, begin)
    assert found.reached
    assert found.num_upward == 1
    assert found.rate == pytest.approx(3.0)
    assert found.tokens_per_second == pytest.approx(300.0)
    assert found.bracket[0] <= 3.0 <= found.bracket[1]
    assert found.bracket == found.last_bracket
    assert found.row["normalized_p90"] <= 80.0


def test_no_rate_is_simulated_twice() -> None:
    rates: list[float] = []

    def counted(rate: float) -> dict[str, Any]:
        rates.append(rate)
        return curve(rate)

    first_crossing(counted, 80.0, 3.0)
    assert len(rates) == len(set(rates)) < 10


@pytest.mark.parametrize("begin", [0.5, 1.0, 1.3])
def test_a_limit_that_is_crossed_twice_is_reported_at_the_first_and_says_so(begin: float) -> None:
    """This holds for each start of the search below the first crossing."""
    found = first_crossing(wavy, 80.0, begin, halvings=6)
    assert found.rate == pytest.approx(1.2, rel=0.01)
    assert found.num_upward == 2
    assert (
        found.last_bracket[0] <= 3.0 <= found.last_bracket[1] == found.last_bracket[0] * GRID_RATIO
    )


def test_a_limit_that_is_not_reached_says_so() -> None:
    def flat(rate: float) -> dict[str, Any]:
        return {"rate": rate, "tokens_per_second": rate, "normalized_p90": 10.0}

    found = first_crossing(flat, 80.0, 1.0, scanned_max=6)
    assert (found.reached, found.num_upward) == (False, 0)
    assert found.rate == pytest.approx(GRID_RATIO), "the highest: -4 to 1 are six"
    found = first_crossing(flat, 5.0, 1.0, scanned_max=3)
    assert not found.reached
    assert found.rate == pytest.approx(GRID_RATIO**-4), "the lowest"

    def none_served(rate: float) -> dict[str, Any]:
        return {"rate": rate, "tokens_per_second": None, "normalized_p90": None}

    found = first_crossing(none_served, 80.0, 1.0, scanned_max=2)
    assert (found.reached, found.tokens_per_second) == (False, 0.0)


def test_a_load_that_serves_nobody_is_not_the_limit() -> None:
    def broken(rate: float) -> dict[str, Any]:
        p90 = 10.0 if rate <= 1 else None
        return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": p90}

    found = first_crossing(broken, 80.0, 1.0)
    assert (found.reached, found.rate, found.tokens_per_second) == (True, 1.0, 100.0)


def test_crossings_beyond_the_first_are_noted() -> None:
    study = Study(QUICK)
    scenario = study.scenario("opt-13b")
    study.crossings[scenario] = first_crossing(wavy, 80.0, 1.0)
    study.note_crossings("3.12a", {"Pensieve": scenario})
    ((figure, text),) = study.notes
    assert figure == "3.12a"
    assert "crosses the limit more than once in 1 of 1 seeds" in text


def test_longer_conversations_take_longer_to_gather() -> None:
    habits = HABITS["sharegpt"]
    assert habits.turns_from(1) == habits.turns_mean
    found = [arrival.conversation for arrival in drawn(habits, 1.0, 5000.0, 9, turns_min=5)]
    each = len(found) / len(set(found))
    assert each == pytest.approx(habits.turns_from(5), rel=0.07)
    assert each > 1.5 * habits.turns_mean


def test_a_load_that_has_gone_on_for_long_has_its_long_histories() -> None:
    """A system that starts empty has much shorter histories after the same time."""
    cost = CostModel.of(MODELS["llama2-13b-gqa"], HARDWARE["a100-80gb"])
    options: dict[str, Any] = {"warm_seconds": 20.0, "seconds": 60.0, "reaction_seconds": 20.0}
    scenario = Scenario(cost, 195_000, 1_000_000, HABITS["sharegpt"], **options)
    long, empty = (
        Scenario(**{**vars(scenario), "steady": steady}).simulate(0.5) for steady in (True, False)
    )
    assert long["history_tokens"] / long["turns"] > 2 * empty["history_tokens"] / empty["turns"]
    assert long["seconds"] == pytest.approx(60.0, abs=1.0)
    assert long["recomputed_tokens"] == 0
    assert 20 < long["normalized_p90"] < 40


# -- long prompts --


def test_pieces_of_prompts_keep_whoever_generates_going() -> None:
    """As in table 4: at equal throughput, gaps are at most a third of the gaps with prefill first."""
    found = {
        name: simulate("documents", 0.45, scheduling, requests=32, seeds=1)
        for name, scheduling in {**SCHEDULERS, "prefill first": PREFILL_FIRST}.items()
    }
    ours, first = found["combined"], found["prefill first"]
    cut_apart, hybrid = found["chunked prefills only"], found["hybrid batches only"]
    assert ours.gap.median <= first.gap.median / 3
    assert ours.tokens_per_second.median >= 0.97 * first.tokens_per_second.median
    assert ours.gap.median <= cut_apart.gap.median
    assert ours.first_token.median < cut_apart.first_token.median
    assert hybrid.gap.median > 3 * ours.gap.median
    assert set(TABLE_4["documents"]) == set(SCHEDULERS)


def test_slower_arithmetic_lengthens_the_tails_of_cut_prompts_and_not_the_pace_of_replies() -> None:
    """This explains why table 4's tails are longer than ours. Full iterations compute; decodes only read."""
    base, slower = cost_of(), cost_of(COMPUTING)
    assert slower.iteration_seconds([(0, 1024)]) > 1.3 * base.iteration_seconds([(0, 1024)])
    decodes = [(4096, 4097)] * 32
    assert slower.iteration_seconds(decodes) == base.iteration_seconds(decodes)


def test_smaller_pieces_cost_more() -> None:
    """As in figure 11."""
    found = [line.ours.median for line in sarathi_capacity.figure_11(Study(QUICK))]
    assert found == sorted(found, reverse=True)
    assert 1.0 < found[-1] < found[0] < 1.2


def test_one_stage_is_a_replica() -> None:
    replica = Replica(cost_of(), 100_000, 0, "value", 1024)
    window = Window(0.0, 2.0, 12.0)
    arrivals = list(drawn(HABITS["requests"], 1.0, 12.0, 1))
    alone = run_replica(replica, arrivals, window)
    assert alone["tokens_per_second"] > 50
    assert run_pipeline(Pipeline(replica, 1), arrivals, window) == alone


def test_iterations_of_different_lengths_leave_bubbles_between_stages() -> None:
    even, uneven = Stages(2), Stages(2)
    assert [even.pass_through(float(at), 1.0) for at in range(4)] == [2.0, 3.0, 4.0, 5.0]
    assert uneven.pass_through(0.0, 1.0) == 2.0
    assert uneven.pass_through(0.0, 3.0) == 7.0, "the second stage stood idle from 2 to 4"
    assert uneven.pass_through(2.0, 1.0) == 8.0, "and this one waits in front of both"


def test_two_stages_serve_what_one_as_large_serves_and_a_token_takes_as_long() -> None:
    """Each stage takes half the time. Two engines serve half the requests each, or one engine serves all."""
    cost = replace(cost_of(), overhead_seconds=0.0)
    whole = Replica(cost, 200_000, 0, "value", 1024)
    half = replace(whole, cost=stage_of(cost, 2), device_tokens=100_000)
    window = Window(0.0, 2.0, 62.0)
    arrivals = list(drawn(HABITS["requests"], 0.5, 62.0, 1))
    in_one = replace(half, device_tokens=200_000, stages=2)
    one = run_replica(whole, arrivals, window)
    for pipeline in (Pipeline(half, 2), Pipeline(in_one, 2)):
        two = run_pipeline(pipeline, arrivals, window)
        assert two["tokens_per_second"] == pytest.approx(one["tokens_per_second"], rel=0.1)
        assert two["seconds_per_token"] == pytest.approx(one["seconds_per_token"], rel=0.2)
        assert abs(two["asked"] - one["asked"]) <= 1


def test_two_stages_keep_an_objective_that_bubbles_would_break() -> None:
    """Run LLaMA2-70B of figure 10 under the highest load that a chosen token budget can carry."""
    machine = sarathi_capacity.MACHINES["10"][0]
    limit = sarathi_capacity.TIMES["strict"] * machine.decode_seconds
    pipeline = machine.systems("requests", "strict")[sarathi_capacity.BY_OBJECTIVE]
    window = Window(0.0, 20.0, 80.0)
    row = run_pipeline(pipeline, drawn(HABITS["requests"], 2.0, window.ends, 0), window)
    assert row["tbt_p99"] <= limit
    assert row["queue_p50"] <= 2.0
    assert row["tokens_per_second"] > 300


def test_the_sheet_has_a_panel_for_each_figure_with_every_seed() -> None:
    pytest.importorskip("matplotlib")
    study = Study(replace(QUICK, seeds=3))
    rising = [(100.0, 30.0), (200.0, 250.0)]
    lines, repeats = {"ours": rising, "theirs": rising}, {"ours": [rising, rising], "theirs": []}
    study.panels.append(Panel("figure-1", "1: opt-13b, 1 GPU", "x", "y", lines, repeats, 200.0))
    sheet = command.sheet(study, quick=True)
    sheet.lay_out()
    assert "Too short to mean anything" in sheet.title
    said = " ".join(sheet.facts)
    assert "a100-80gb" in said
    assert "first of 3 seeds" in said
    (panel,) = sheet.panels
    assert len(panel.axes.lines) == 2 + 2 + 1, "two lines, the other seeds of one, the limit"


# -- batches that requests join and leave --


def test_who_has_ended_leaves_the_batch_and_nothing_idle_is_computed() -> None:
    """As in Baton's tables: a static batch waits for its longest reply."""
    cost = CostModel.of(baton_paper.MODEL, baton_paper.RTX_4090)
    tokens = device_tokens_of(baton_paper.MODEL, baton_paper.RTX_4090)
    queries = baton_paper.second_set(0)

    def seconds_of(scheduler: SchedulerConfig) -> float:
        return baton_paper.simulated(cost, tokens, queries, scheduler, "unified")

    faster = {}
    for batch in (2, 10):
        still = baton_paper.static(cost, queries, batch, ahead=False)
        ours = seconds_of(SchedulerConfig(2048, batch))
        faster[batch] = still.seconds / ours
        assert 0.1 < still.idle_share < 0.7
    assert min(faster.values()) > 1.15
    ten = seconds_of(SchedulerConfig(2048, 10))
    assert seconds_of(SchedulerConfig(2048, 256)) < ten


def test_a_static_batch_takes_what_its_longest_members_take() -> None:
    cost = CostModel(0.0, 1.0, 0.0, 0.0, 0.0, 1, 1, 1.0, "a second for each pass")
    queries = [baton_paper.Query(5, 3), baton_paper.Query(2, 9), baton_paper.Query(7, 1)]
    found = baton_paper.static(cost, queries, 2, ahead=False)
    assert found.seconds == (1 + 8) + 1
    assert found.idle_share == 1 - (27 - 3) / (10 + 16 + 7)
