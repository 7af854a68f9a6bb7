"""The capacity benchmark: each scheduling gets the same load, and the highest sustained load is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pensieve.bench import capacity as bench
from pensieve.bench.bench_daemon import serving
from pensieve.bench.capacity import (
    OURS,
    PREFILL_FIRST,
    WHOLE_PROMPTS,
    CapacityOptions,
    Scheduling,
    Trial,
)
from pensieve.bench.capacity_load import Figures, ObservedTurn, OfferedLoad, Played, play
from pensieve.bench.capacity_report import CapacityRow, plot
from pensieve.bench.report import Report
from pensieve.bench.step import decode_seconds
from pensieve.cli.main import main
from pensieve.errors import InvalidArgument

LOAD = OfferedLoad(2, 8, 6, 0.5, 40, 0.01)


def options(**changes: object) -> CapacityOptions:
    given = {"model": "", "load": LOAD, "tbt": 0.1, "ttft": 0.0, "rate": 0.0, "seconds": 60.0}
    return CapacityOptions(**{**given, "rounds": 1, "seed": 0, **changes})  # type: ignore[arg-type]


# -- the load --


def test_a_seed_draws_the_same_conversations_at_every_rate() -> None:
    slow, fast = LOAD.scripts(1.0, 60, 3), LOAD.scripts(4.0, 60, 3)
    assert 30 < len(slow) < 90 < len(fast)
    for one, other in zip(slow, fast, strict=False):
        assert one.turns == other.turns
        assert one.arrives_at == pytest.approx(4 * other.arrives_at)
    assert LOAD.scripts(1.0, 60, 4)[0] != slow[0]


def test_only_first_messages_are_documents() -> None:
    scripts = LOAD.scripts(10.0, 60, 0)
    firsts = [len(each.turns[0].text.split()) for each in scripts]
    assert 0.4 < sum(length > 8 for length in firsts) / len(firsts) < 0.6
    assert {length for length in firsts if length <= 8} == {8}
    assert all(20 <= length <= 60 for length in firsts if length > 8)
    assert {len(each.turns[1].text.split()) for each in scripts} == {8}
    assert all(each.turns[0].think_seconds == 0 for each in scripts)


def test_figures_ignore_turns_before_the_end_of_the_warm_up() -> None:
    early = ObservedTurn(0.5, 9.0, 9.0, [9.0] * 50, 6, True)
    late = ObservedTurn(1.0, 0.2, 0.1, [0.1] * 99 + [0.5], 6, True)
    cut = ObservedTurn(2.0, 4.0, 4.0)
    figures = Figures.of(Played([early, late, cut], 10.0), 1.0, 0.4)
    assert (figures.turns, figures.unfinished) == (2, 1)
    assert (figures.gap_p50, figures.gap_p99) == (0.1, 0.1)
    assert figures.attained == 0.99
    assert (figures.first_token_p50, figures.queue_p50) == (0.2, 0.1)
    assert figures.tokens_per_second == 1.2
    nothing = Figures.of(Played([], 10.0), 1.0, 0.4)
    assert (nothing.turns, nothing.gap_p99, nothing.attained) == (0, None, None)


def test_a_load_that_is_cut_off_leaves_no_running_turns() -> None:
    """An iteration takes 0.2 s, and a reply takes sixty iterations."""
    with serving([], {"PENSIEVE_ENGINE": "echo:0.2"}) as daemon:
        scripts = OfferedLoad(1, 8, 60, 0.0, 40, 0.0).scripts(20.0, 1.0, 0)
        cut = asyncio.run(play(daemon.address, scripts, 60, 8.0))
        assert len(cut.turns) == len(scripts)
        assert not any(turn.is_complete for turn in cut.turns)
        assert all(turn.first_token_seconds > 0 for turn in cut.turns)
        assert all(turn.output_tokens < 60 for turn in cut.turns)
        whole = asyncio.run(play(daemon.address, scripts[:2], 3))
        assert all(turn.is_complete and turn.output_tokens == 3 for turn in whole.turns)
        assert all(turn.queue_seconds is not None for turn in whole.turns)


# -- the search --


def sustained_up_to(limit: float) -> Trial:
    """Return a trial of a daemon that keeps gaps of 50 ms up to `limit` conversations per second."""

    def trial(rate: float, seed: int, seconds_max: float | None) -> Played:
        assert seconds_max == 60.0
        gap = 0.05 if rate <= limit else 0.3
        return Played([ObservedTurn(10.0, 0.1, 0.0, [gap] * 100, 100, True)], 60.0)

    return trial


def test_the_search_finds_the_highest_load_and_plays_none_twice() -> None:
    rates: list[float] = []
    inner = sustained_up_to(1.0)

    def counted(rate: float, seed: int, seconds_max: float | None) -> Played:
        rates.append(rate)
        return inner(rate, seed, seconds_max)

    searched = bench.search(Scheduling(PREFILL_FIRST), (0.1, 0.2), options(), counted)
    assert len(rates) == len(set(rates))
    for found, objective in zip(searched.found, (0.1, 0.2), strict=True):
        assert (found.scheduling, found.objective) == (PREFILL_FIRST, objective)
        assert 1.0 / bench.RESOLUTION <= found.rate <= 1.0
        assert found.figures is not None
        assert found.figures.gap_p99 == 0.05
    assert {row.rate for row in searched.rows} == set(rates)


def test_the_search_explains_why_no_load_meets_the_objective() -> None:
    searched = bench.search(Scheduling(WHOLE_PROMPTS), (0.1,), options(), sustained_up_to(0.0))
    (found,) = searched.found
    assert (found.rate, found.figures) == (0.0, None)
    assert "P99 time between tokens 0.3 s" in found.why
    assert len(searched.rows) == 2


def test_a_median_queue_time_above_two_seconds_fails_the_load() -> None:
    def queued(rate: float, seed: int, seconds_max: float | None) -> Played:
        return Played([ObservedTurn(10.0, 3.0, 2.5, [0.01], 2, True)], 60.0)

    (found,) = bench.search(Scheduling(WHOLE_PROMPTS), (0.1,), options(), queued).found
    assert "median time in the queue 2.5 s" in found.why


def test_schedulings_without_an_objective_share_one_daemon() -> None:
    assert list(bench.daemons((OURS, WHOLE_PROMPTS, PREFILL_FIRST), (0.1, 0.5))) == [
        (Scheduling(OURS, 0.1), (0.1,)),
        (Scheduling(OURS, 0.5), (0.5,)),
        (Scheduling(WHOLE_PROMPTS), (0.1, 0.5)),
        (Scheduling(PREFILL_FIRST), (0.1, 0.5)),
    ]
    flags = Scheduling(PREFILL_FIRST).flags
    assert Scheduling(PREFILL_FIRST).variables["PENSIEVE_ENGINE"] == "separate"
    assert flags[flags.index("--tbt") + 1] == "0"
    flags = Scheduling(OURS, 0.5, 0.5).flags
    assert flags[flags.index("--tbt") + 1] == "0.25"
    assert Scheduling(OURS, 0.5, 0.5).variables["PENSIEVE_ENGINE"] == "model"


def test_the_default_objectives_come_from_a_measured_iteration(
    monkeypatch: pytest.MonkeyPatch, random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decode_seconds(random_model, 3, 20, 2) > 0
    monkeypatch.setattr(bench, "measured_decode_seconds", lambda folder: 0.02)

    @contextmanager
    def trials(*_: object) -> Iterator[Trial]:
        yield sustained_up_to(1.0)

    monkeypatch.setattr(bench, "trials", trials)
    rows = bench.run(options(model=str(random_model), tbt=0.0), Report(as_json=True))
    printed = json.loads(capsys.readouterr().out)
    assert printed["objectives"] == [0.1, 0.5]
    assert printed["decode_seconds"] == 0.02
    found = {(each["scheduling"], each["objective"]): each["rate"] for each in printed["capacity"]}
    assert set(found) == {
        ("ours, 100 ms", 0.1),
        ("ours, 500 ms", 0.5),
        *((name, objective) for name in (WHOLE_PROMPTS, PREFILL_FIRST) for objective in (0.1, 0.5)),
    }
    assert found[WHOLE_PROMPTS, 0.1] <= 1.0 < found[WHOLE_PROMPTS, 0.5], "300 ms are within 500"
    assert len(rows) == len(printed["rows"])


# -- with daemons --


def test_a_fixed_rate_plays_one_load_on_each_daemon(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--turns", "2", "--input-tokens", "8", "--output-tokens", "6", "--think", "0.01"]
    load = ["--documents", "0.5", "--document-tokens", "40", "--rate", "20", "--seconds", "0.5"]
    arguments = ["bench", "capacity", str(random_model), *small, *load, "--tbt", "0.5"]
    assert main([*arguments, "--rounds", "2", "--seed", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = printed["rows"]
    assert [(row["scheduling"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("ours, 500 ms", WHOLE_PROMPTS, PREFILL_FIRST) for seed in (1, 2)
    ]
    for row in rows:
        assert row["unfinished"] == 0
        assert 0 < row["gap_p50"] <= row["gap_p99"]
        assert 0 < row["first_token_p50"] <= row["first_token_p99"]
        assert 0 < row["attained"] <= 1
        assert row["turns"] >= 10
    assert printed["capacity"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "at least 1"),
        ({"load": OfferedLoad(output_tokens=1)}, "has no gap"),
        ({"load": OfferedLoad(document_share=1.5)}, "a share"),
        ({"tbt": -0.1}, "at least 0"),
        ({"seconds": 0.0}, "above 0"),
        ({"rate": 0.01}, "fewer than 4"),
    ],
)
def test_impossible_options_are_explained(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        options(**changes)


def test_the_plot_has_a_line_for_each_scheduling_and_a_level_for_each_objective(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    turn = [ObservedTurn(10.0, 0.1, 0.0, [0.05], 2, True)]
    rows = [
        CapacityRow(name, 0.1, rate, seed, Figures.of(Played(turn, 60.0), 1.0, 0.1))
        for name in ("ours, 100 ms", PREFILL_FIRST)
        for rate in (1.0, 2.0)
        for seed in (0, 1)
    ]
    plot(rows, tmp_path / "gaps.svg", ["a model", "a machine"])
    drawn = (tmp_path / "gaps.svg").read_text()
    for text in ("ours, 100 ms", PREFILL_FIRST, "objective 0.1 s", "conversations per second"):
        assert text in drawn
