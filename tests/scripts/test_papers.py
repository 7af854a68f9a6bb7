"""scripts/paper: verdicts, searches and the papers' systems."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.sim.cost import CostModel
from pensieve.sim.workload import WORKLOAD_PRESETS, drawn
from scripts.measurements.batch_simulation import SHAPES, BatchShape
from scripts.measurements.replica import Replica, Window, run_replica
from scripts.papers import __main__ as command
from scripts.papers import batchllm, baton, sarathi
from scripts.papers.baton import PaddedSlots, Query
from scripts.papers.claims import (
    NO_VERDICT,
    NOT_REPRODUCED,
    REPRODUCED,
    SAME_SHAPE,
    VERDICTS,
    Claim,
    about,
    absolute,
    improvement,
    less,
    more,
    no_claim,
)
from scripts.papers.equal_latency import GRID_RATIO, first_crossing
from scripts.papers.pipeline import Stages, run_pipeline, stage_of
from scripts.papers.rows import QUICK, Extent, Row, Spread, largest, ratio

TINY = BatchShape(100, 96, 32, 4, output_tokens=8, output_tokens_max=20, apart=3.0)


@pytest.mark.parametrize(
    ("claim", "values", "verdict"),
    [
        (about(1.5), (1.4,), REPRODUCED),
        (about(1.5), (1.2,), SAME_SHAPE),
        (about(1.5), (2.9,), SAME_SHAPE),
        (about(1.5), (3.1,), NOT_REPRODUCED),  # more than four times the effect
        (about(1.5), (1.1,), NOT_REPRODUCED),  # less than a quarter of the effect
        (about(1.5), (0.9, 1.2, 1.2), NOT_REPRODUCED),  # the other direction in one seed
        (about(2.0, 4.0), (4.5,), REPRODUCED),
        (about(1.09), (1.05,), REPRODUCED),
        (about(1.09), (1.04,), SAME_SHAPE),  # near the number, but less than half of the effect
        (about(1.09), (1.01,), NOT_REPRODUCED),
        (about(0.85), (1.0,), NOT_REPRODUCED),
        (improvement(14.6), (-14.6,), NOT_REPRODUCED),
        (absolute(0.3, "{:.1f} s"), (0.5,), SAME_SHAPE),  # a time, not an effect
        (absolute(0.3, "{:.1f} s"), (0.7,), NOT_REPRODUCED),
        (more(), (1.01, 30.0), SAME_SHAPE),
        (more(), (0.99, 30.0), NOT_REPRODUCED),
        (more(), (1.004,), NOT_REPRODUCED),  # no visible effect
        (less(), (0.5,), SAME_SHAPE),
        (more(0.0, "{:+.0f} points"), (0.9,), NOT_REPRODUCED),  # less than a point
        (more(0.0, "{:+.0f} points"), (1.1,), SAME_SHAPE),
        (about(1.5), (math.nan,), NOT_REPRODUCED),
        (no_claim(), (1.5,), "-"),
    ],
)
def test_a_verdict_compares_the_papers_number_with_ours(
    claim: Claim, values: tuple[float, ...], verdict: str
) -> None:
    assert Row("a figure", "a row", claim, Spread(values)).verdict == verdict


@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        (about(1.5), "1.50 x"),
        (improvement(37.5, 90.5), "37.5 % to 90.5 %"),
        (absolute(20e3, "{:,.0f}/s"), "20,000/s"),
        (more(100, "{:.0f} ms"), "more than 100 ms"),
        (less(), "less than 1.00 x"),
        (no_claim(), "-"),
    ],
)
def test_a_claim_is_shown_with_its_unit(claim: Claim, shown: str) -> None:
    assert claim.shown == shown


def test_a_spread_shows_its_median_and_its_ends() -> None:
    found = ratio([3.0, 1.0, 4.0], [2.0, 2.0, 2.0])
    assert list(found) == [1.5, 0.5, 2.0]
    assert list(largest([found, Spread([1.0, 1.0, 3.0])])) == [1.5, 1.0, 3.0]
    assert found.shown("{:.1f} x") == "1.5 x (0.5 x to 2.0 x)"
    assert Spread((1.25,)).shown("{:.2f}") == "1.25"
    assert math.isnan(ratio([1.0], [0.0]).median)


def test_the_table_has_both_numbers_a_verdict_and_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "rows.json"
    words = ["sarathi-iterations", "--quick", "--jobs", "1", "--json", str(results)]
    assert command.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    rows = json.loads(results.read_text())
    assert len(out) == 2 + len(rows) + 2
    assert "| 1.00 x | 1.08 x | reproduced |" in "\n".join(out)
    assert out[-1].startswith(f"{len(rows)} rows: ")
    for row in rows:
        assert row["verdict"] in VERDICTS
        # One row has no verdict: the paper describes the setting, and claims nothing about it.
        assert (row["verdict"] == NO_VERDICT) == (row["figure"].endswith("section 4.3")), row
        assert row["reason"]
        assert all(map(math.isfinite, row["by_seed"]))


def test_invalid_seed_counts_and_unknown_figures_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["all", "--seeds", "0"]) == 3
    assert "--seeds must be 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["9.99"])


@pytest.mark.parametrize(
    "name",
    [
        *("pensieve-3.12a", "pensieve-3.14", "sarathi-table-4"),
        *("batchmaker-2.3", "batchmaker-2.9", "batchmaker-cpu-tree"),
        *(name for name in batchllm.FIGURES if "qwen2" not in name),
    ],
)
def test_a_figure_yields_rows_with_reasons_and_verdicts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As short as possible: one seed, an almost empty load, few requests. The nightly run has all figures."""
    tiny = replace(
        QUICK,
        warm_seconds=1.0,
        seconds=8.0,
        capacity_warm_seconds=1.0,
        capacity_seconds=6.0,
        capacity_requests=1.0,
        resolution=4.0,
        requests=8,
        panel_fills=0.0,
        bound_seeds=1,
        batch_share=0.1,
        repeats=1,
    )
    for each in SHAPES:
        monkeypatch.setitem(SHAPES, each, TINY)
    monkeypatch.setattr(batchllm, "LENGTHS", ("64/32", "32/64"))
    rows, _ = command.rows_of(name, tiny)
    assert rows
    for row in rows:
        assert row.reason
        assert row.name
        assert row.verdict


def test_the_longest_figures_begin_first() -> None:
    names = sorted(command.FIGURES, key=command._place)
    assert names[0].startswith("sarathi-10")
    assert all(any(name.startswith(each) for name in names) for each in command.LONGEST)


# -- throughput at equal latency --


def curve(rate: float) -> dict[str, Any]:
    """Return a P90 that doubles with each conversation per second, and 100 tokens per conversation."""
    return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": 10 * 2**rate}


def wavy(rate: float) -> dict[str, Any]:
    """Return a P90 above 80 between the rates 1.2 and 1.9, and again from 3 on."""
    p90 = 100.0 if 1.2 < rate < 1.9 or rate > 3 else 50.0
    return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": p90}


@pytest.mark.parametrize("begin", [0.05, 1.0, 3.0, 40.0])
def test_the_limit_is_found_from_a_start_below_or_above_it(begin: float) -> None:
    found = first_crossing(curve, 80.0, begin)
    step = GRID_RATIO ** (1 / 4)  # after two halvings
    assert 3.0 / step <= found.rate <= 3.0
    assert found.tokens_per_second == pytest.approx(100 * found.rate)
    assert found.figures == curve(found.rate)
    assert found.figures["normalized_p90"] <= 80.0


def test_no_rate_is_simulated_twice() -> None:
    rates: list[float] = []

    def counted(rate: float) -> dict[str, Any]:
        rates.append(rate)
        return curve(rate)

    first_crossing(counted, 80.0, 3.0)
    assert len(rates) == len(set(rates)) < 10


@pytest.mark.parametrize("begin", [0.5, 1.0, 1.3])
def test_the_first_of_several_crossings_is_the_limit(begin: float) -> None:
    """The search may start anywhere below the first crossing."""
    found = first_crossing(wavy, 80.0, begin, halvings=6)
    assert found.rate == pytest.approx(1.2, rel=0.01)


def test_without_a_crossing_the_highest_or_lowest_scanned_rate_is_returned() -> None:
    def flat(rate: float) -> dict[str, Any]:
        return {"rate": rate, "tokens_per_second": rate, "normalized_p90": 10.0}

    found = first_crossing(flat, 80.0, 1.0, scanned_max=6)
    assert found.rate == pytest.approx(GRID_RATIO), "the highest of six rates: exponents -4 to 1"
    found = first_crossing(flat, 5.0, 1.0, scanned_max=3)
    assert found.rate == pytest.approx(GRID_RATIO**-4), "the lowest"

    def none_served(rate: float) -> dict[str, Any]:
        return {"rate": rate, "tokens_per_second": None, "normalized_p90": None}

    found = first_crossing(none_served, 80.0, 1.0, scanned_max=2)
    assert (found.rate, found.tokens_per_second) == (GRID_RATIO**-3, 0.0)


def test_a_rate_without_served_requests_is_not_the_limit() -> None:
    def broken(rate: float) -> dict[str, Any]:
        p90 = 10.0 if rate <= 1 else None
        return {"rate": rate, "tokens_per_second": 100 * rate, "normalized_p90": p90}

    found = first_crossing(broken, 80.0, 1.0)
    assert (found.rate, found.tokens_per_second) == (1.0, 100.0)


def test_drawn_conversations_have_the_predicted_mean_number_of_turns() -> None:
    preset = WORKLOAD_PRESETS["sharegpt"]
    assert preset.turns_from(1) == preset.turns_mean
    found = [arrival.conversation for arrival in drawn(preset, 1.0, 5000.0, 9, turns_min=5)]
    each = len(found) / len(set(found))
    assert each == pytest.approx(preset.turns_from(5), rel=0.07)
    assert each > 1.5 * preset.turns_mean


# -- long prompts --


def served(workload: str, rate: float, **options: Any) -> dict[str, Any]:
    """Return the figures of 32 requests to Yi-34B."""
    replica = Replica(sarathi.YI.cost, sarathi.YI.device_tokens, 0, "value", turns_max=128)
    (row,) = sarathi._served(
        replace(replica, **options), workload, rate, Extent(seeds=1, requests=32)
    )
    return row


def test_prompt_pieces_keep_gaps_between_tokens_short() -> None:
    """As in table 4: at equal throughput, gaps are at most a third of the gaps with prefill first."""
    found = {
        name: served("documents", 0.35, **options)
        for name, options in {
            **sarathi.SCHEDULERS,
            "prefill first": sarathi.PREFILL_FIRST,
        }.items()
    }
    ours, first = found["combined"], found["prefill first"]
    cut_apart, hybrid = found["chunked prefills only"], found["hybrid batches only"]
    assert ours["gap_p99"] <= first["gap_p99"] / 3
    assert ours["tokens_per_second"] >= 0.97 * first["tokens_per_second"]
    assert ours["gap_p99"] <= cut_apart["gap_p99"]
    assert ours["first_token_p50"] < cut_apart["first_token_p50"]
    assert hybrid["gap_p99"] > 3 * ours["gap_p99"]


def test_collectives_and_tiles_make_pieces_cost_more() -> None:
    plain = replace(sarathi.A100_PAIR, collective_seconds=0.0, tile_tokens=1, unhidden_share=0.0)

    def overhead(cost: CostModel) -> float:
        pieces = (cost.iteration_seconds([(start, start + 512)]) for start in range(0, 4096, 512))
        return sum(pieces) / cost.iteration_seconds([(0, 4096)])

    assert overhead(CostModel.of(sarathi.YI.model, plain)) == pytest.approx(1.004, abs=0.004)
    assert 1.1 < overhead(sarathi.YI.cost) < 1.25


def test_orca_reserves_memory_for_the_longest_context() -> None:
    assert sarathi.YI.orca_turns(16_384) < sarathi.YI.device_tokens // 16_384
    assert sarathi.LLAMA.orca_turns(16_384) >= 1


def test_a_pipeline_of_one_stage_equals_a_replica() -> None:
    replica = Replica(sarathi.YI.cost, 100_000, 0, "value", 1024)
    window = Window(0.0, 2.0, 12.0)
    arrivals = list(drawn(WORKLOAD_PRESETS["requests"], 1.0, 12.0, 1))
    alone = run_replica(replica, arrivals, window)
    assert alone["tokens_per_second"] > 50
    assert run_pipeline(replica, 1, arrivals, window) == alone


def test_iterations_of_different_lengths_leave_bubbles_between_stages() -> None:
    even, uneven = Stages(2), Stages(2)
    assert [even.pass_through(float(at), 1.0) for at in range(4)] == [2.0, 3.0, 4.0, 5.0]
    assert uneven.pass_through(0.0, 1.0) == 2.0
    assert uneven.pass_through(0.0, 3.0) == 7.0, "the second stage stood idle from 2 to 4"
    assert uneven.pass_through(2.0, 1.0) == 8.0, "this iteration waits before both stages"


def test_two_stages_have_the_throughput_and_token_time_of_one_large_stage() -> None:
    """Each stage takes half the time. Two engines serve half the requests each, or one engine serves all."""
    model, hardware = sarathi.YI.model, replace(sarathi.A100_PAIR, overhead_seconds=0.0)
    whole = Replica(CostModel.of(model, hardware), 200_000, 0, "value", 1024)
    half = replace(whole, cost=CostModel.of(stage_of(model, 2), hardware), device_tokens=100_000)
    window = Window(0.0, 2.0, 62.0)
    arrivals = list(drawn(WORKLOAD_PRESETS["requests"], 0.5, 62.0, 1))
    in_one = replace(half, device_tokens=200_000, stages=2)
    one = run_replica(whole, arrivals, window)
    for engine in (half, in_one):
        two = run_pipeline(engine, 2, arrivals, window)
        assert two["tokens_per_second"] == pytest.approx(one["tokens_per_second"], rel=0.1)
        assert two["seconds_per_token"] == pytest.approx(one["seconds_per_token"], rel=0.2)
        assert abs(two["asked"] - one["asked"]) <= 1


def test_two_stages_keep_an_objective_that_bubbles_would_break() -> None:
    """Run LLaMA2-70B of figure 10 under a load that a chosen token budget can carry."""
    machine = sarathi.LLAMA
    limit = sarathi.TIMES["strict"] * machine.decode_seconds
    engine = machine.systems("requests", "strict")[sarathi.OURS]
    engine = replace(engine, token_budget=8192, tbt_seconds=0.9 * limit)
    window = Window(0.0, 20.0, 80.0)
    arrivals = drawn(WORKLOAD_PRESETS["requests"], 0.5, window.ends, 0)
    row = run_pipeline(engine, machine.num_stages, arrivals, window)
    assert row["tbt_p99"] <= limit
    assert row["queue_p50"] <= 2.0
    assert row["tokens_per_second"] > 100


# -- padded slots --

PASS = CostModel(0.0, 1.0, 0.0, 0.0, 0.0, 1, 1, 1.0, "a second for each pass")
BY_COLUMN = CostModel(0.0, 0.0, 0.0, 1.0, 0.0, 1, 1, 1.0, "a second for each key that is read")


def seconds_of(cost: CostModel, refills: bool, ahead: bool, queries: list[Query]) -> float:
    return PaddedSlots(cost, 2, refills, ahead).run(queries)[-1].at


@pytest.mark.parametrize(
    ("refills", "ahead", "seconds"),
    [
        (False, False, 9 + 1),  # a prompt's step has the first token of its reply
        (False, True, 2 + 9 + 1),  # two groups of prompts ahead, without tokens
        (True, False, 9 + 1),  # the third query joins with a step of its own
        (True, True, 2 + 9),  # the third query takes no step of its own
    ],
)
def test_a_padded_batch_takes_the_steps_of_its_longest_queries(
    refills: bool, ahead: bool, seconds: float
) -> None:
    queries = [Query(5, 3), Query(2, 9), Query(7, 1)]
    assert seconds_of(PASS, refills, ahead, queries) == seconds


def test_the_padding_of_an_inserted_prompt_stays_in_the_other_slot() -> None:
    """Query 0 is long. Query 2 joins after query 1, and its prompt pads the KV of query 0 by 100 columns."""
    short = [Query(1, 20), Query(1, 1), Query(1, 1)]
    long = [Query(1, 20), Query(1, 1), Query(100, 1)]
    steps_after = 17
    more_keys = seconds_of(BY_COLUMN, True, False, long) - seconds_of(BY_COLUMN, True, False, short)
    assert more_keys >= 99 * steps_after
    ahead = seconds_of(BY_COLUMN, True, True, long) - seconds_of(BY_COLUMN, True, True, short)
    assert ahead < more_keys


def test_an_ended_query_leaves_the_batch() -> None:
    """As in table 2 of the Baton paper."""
    cost = CostModel.of(baton.MODEL, baton.RTX_4090)
    for batch in (2, 10):
        found = {
            name: PaddedSlots(cost, batch, *baton.SYSTEMS[name]).run(baton.second_set(0))[-1].at
            for name in ("Benchmark", "Baton-PD")
        }
        assert found["Benchmark"] / found["Baton-PD"] > 1.1


# -- cellular batching --


def rows_by_name(name: str) -> dict[str, Row]:
    return {row.name: row for row in command.rows_of(name, QUICK)[0]}


def test_figure_2_5_has_the_papers_times() -> None:
    rows = list(rows_by_name("batchmaker-2.5").values())
    assert [row.ours.median for row in rows[:4]] == [5, 12, 2, 3]
    assert [row.verdict for row in rows] == [REPRODUCED] * 4 + [SAME_SHAPE]


def test_a_request_waits_for_about_five_steps_to_join_a_batch() -> None:
    """A step takes 0.25 ms with its gather."""
    queueing = rows_by_name("batchmaker-2.9")["LSTM, cellular: P99 of queueing"]
    assert 4.5 < queueing.ours.median / 0.25 < 5.5
    assert queueing.verdict == REPRODUCED


def test_numbers_that_a_cost_was_fitted_to_are_not_claims() -> None:
    for row in rows_by_name("batchmaker-2.10").values():
        assert row.reason.startswith("fitted to the paper's")
        assert row.paper.is_empty
