"""`pensieve simulate` compares policies, sweeps, draws, and explains errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.extras import ADD
from pensieve.sim import report

# -- the command --


def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"conversation": name, "at": at, "input_tokens": 1500, "output_tokens": 3}
        for at in range(0, 60, 10)
        for name in "abc"
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)) + "\nbroken\n")
    given = ["simulate", str(trace), "--hardware", "instant", "--device-tokens", "20k"]
    assert main([*given, "--host-tokens", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [row["policy"] for row in result["rows"]] == ["lru", "value", "return"]
    assert len({row["history_tokens"] for row in result["rows"]}) == 1
    assert result["problems"] == 1
    assert "line 19 (" in err
    assert main([*given, "--policy", "lru"]) == 0
    assert "recomputed" in capsys.readouterr().out


def test_a_drawn_workload_runs_and_invalid_arguments_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = ["--workload", "sharegpt", "--rate", "0.5", "--seconds", "20", "--reaction", "5"]
    assert main(["simulate", *drawn, "--model", "qwen2-7b", "--policy", "value"]) == 0
    out, err = capsys.readouterr()
    assert "qwen2-7b on 1 x h200" in err
    assert "P90 ms/token" in out
    for wrong, text in (
        (["--policy", "best"], "none of lru, value, return"),
        (["--workload", "sharegpt", "x.jsonl"], "not both"),
        ([], "give trace files"),
        (["missing.jsonl"], "cannot read missing.jsonl"),
        (["--workload", "sharegpt", "--rate", "0"], "above 0"),
    ):
        assert main(["simulate", *wrong]) in (2, 3)
        assert text in capsys.readouterr().err


# -- sweeps and plots --


def test_sweeps_and_their_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = ["--rate", "0.5,2", "--host-tokens", "0,50k", "--device-tokens", "10k"]
    given = ["--workload", "sharegpt", "--seconds", "40", "--reaction", "5", "--policy", "value"]
    folder = tmp_path / "drawn" / "here"
    plotted = ["--plot", str(folder), "--json"]
    assert main(["simulate", *given, *swept, "--model", "opt-13b", *plotted]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["rows"]
    places = [(row["rate"], row["host_size"]) for row in rows]
    assert places == [(0.5, 0), (0.5, 50_000), (2.0, 0), (2.0, 50_000)]
    assert all(row["device_size"] == 10_000 and row["seconds"] <= 40.1 for row in rows)
    assert rows[0]["series"]["tokens"]
    assert "4 of 4, value" in err
    (sheet,) = folder.iterdir()  # one file for the whole study
    assert sheet.name == "simulate.png"
    assert sheet.read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", *given, *swept]) == 0
    assert "host size" in capsys.readouterr().out


def test_tier_sizes_default_to_the_hardwares_memory(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", "--workload", "sharegpt", "--seconds", "5", "--json", "--stateless"]
    assert main([*given, "--model", "opt-13b", "--hardware", "a100-80gb"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["device_size"] == int((0.9 * 80e9 - 26e9) / 819_200)
    assert row["host_size"] == int(220e9 / 819_200)
    assert (row["stateless"], row["phases"]) == (True, "unified")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("--model opt-66b", "the weights of opt-66b are 132 GB"),
        ("--model opt-13b --hardware a100-80gb --device-tokens 80k", "room for 65,917"),
        ("--token-budget 100", "must be at least --turns-max (256)"),
        ("--devices 0", "1 or more"),
        ("--prompt-seconds -1", "at least 0"),
        ("--tbt -1", "at least 0"),
        ("--hardware instant --phases separate", "all times are 0"),
        ("--count-from 700", "nothing is counted"),
        ("--until 3 --count-from 5", "nothing is counted"),
    ],
)
def test_impossible_simulations_are_explained(
    wrong: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--workload", "sharegpt", *wrong.split()]) == 2
    assert text in capsys.readouterr().err


def test_splitting_prompts_shortens_the_gaps_of_other_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = "--workload assistant --seconds 30 --rate 2 --model opt-13b --hardware a100-80gb"
    gaps = []
    for limit in ("--prompt-seconds 0", "--prompt-seconds 0.02", "--tbt 0.05"):
        given = [*drawn.split(), "--policy", "lru", *limit.split()]
        assert main(["simulate", *given, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        gaps.append(row["gap_p99"])
    assert gaps[1] < 0.3 * gaps[0]
    assert gaps[2] <= 1.15 * 50.0 < 0.5 * gaps[0]  # milliseconds


def test_equal_rows_are_explained_if_nothing_was_evicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["simulate", "--workload", "sharegpt", "--seconds", "20", "--hardware", "instant"]
    assert main(given) == 0
    assert "equal because nothing was evicted" in capsys.readouterr().err
    tight = [*given, "--device-tokens", "4k", "--host-tokens", "0", "--reaction", "5"]
    assert main(tight) == 0
    assert "equal because" not in capsys.readouterr().err
    assert main([*given, "--policy", "lru"]) == 0
    assert "equal because" not in capsys.readouterr().err, "nothing was compared"


def test_several_seeds_give_one_row_with_median_and_spread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = ["--workload", "sharegpt", "--seconds", "40", "--reaction", "5", "--rate", "2"]
    given = ["simulate", *drawn, "--hardware", "instant", "--device-tokens", "5k"]
    assert main([*given, "--host-tokens", "0", "--seed", "0,1,2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["policy"], row["seed"]) for row in rows] == [
        (policy, seed) for policy in ("lru", "value", "return") for seed in range(3)
    ]
    assert all(row["saved"] == 0 for row in rows if row["policy"] == "lru"), (
        "each seed is compared with its own LRU row"
    )
    lines = report.table(rows).splitlines()
    assert len(lines) == 1 + 3
    saved = [f"{row['saved']:+.1%}" for row in rows if row["policy"] == "return"]
    assert any(f"({low} to {high})" in lines[3] for low in saved for high in saved)


def test_without_matplotlib_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delenv(ADD, raising=False)
    given = ["simulate", "--workload", "sharegpt", "--plot", str(tmp_path)]
    assert main(given) == 3
    assert "--plot needs matplotlib: pip install 'matplotlib" in capsys.readouterr().err
