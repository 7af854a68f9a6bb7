"""`pensieve simulate` with a journal: it records, replays, fits, and explains errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve import __version__
from pensieve.cli.main import main
from tests.sim.recorded import journal_of


def test_the_command_records_replays_and_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, costs = str(tmp_path / "j"), str(tmp_path / "costs.json")
    command = [
        "simulate",
        "--workload",
        "sharegpt",
        "--rate",
        "0.3",
        "--seconds",
        "30",
        "--reaction",
        "5",
    ]
    assert main([*command, "--policy", "lru,return", "--record", journal, "--json"]) == 0
    iterations = sum(row["iterations"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert main(["simulate", "--journal", journal, "--fit", costs]) == 0
    out = capsys.readouterr().out
    assert (
        f"{iterations:,} iterations, by 2 engines, all planned again as they were recorded" in out
    )
    assert "held out   median      P90" in out
    assert main([*command, "--cost", costs, "--policy", "lru", "--json"]) == 0
    assert f"fitted to {iterations:,} iterations" in json.loads(capsys.readouterr().out)["assumed"]
    assert main(["simulate", "--journal", journal, "--fit", costs, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["iterations"] == iterations
    assert result["fit"]["errors"][-1]["kind"] == "all"

    lines = Path(journal).read_text().splitlines()
    Path(journal).write_text("\n".join(lines[:-1]) + '\n{"pl')
    assert main(["simulate", "--journal", journal]) == 0
    assert (
        f"line {len(lines)} is incomplete, because its engine was killed" in capsys.readouterr().out
    )
    Path(journal).write_text("\n".join(lines).replace('"tokens":', '"tokens":1', 1))
    assert main(["simulate", "--journal", journal]) == 1
    out = capsys.readouterr().out
    assert "the replay plans" in out
    assert "may plan differently" not in out
    Path(journal).write_text(
        Path(journal).read_text().replace(f'"written_by":"{__version__}"', '"written_by":"0.0.1"')
    )
    assert main(["simulate", "--journal", journal]) == 1
    assert "pensieve 0.0.1 wrote it" in capsys.readouterr().out


def test_invalid_journal_arguments_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal_of(tmp_path)
    short, other, empty = str(tmp_path / "j"), tmp_path / "other", tmp_path / "empty"
    other.write_text("{}\n")
    empty.write_text("")
    for wrong, text in (
        (["--journal", str(tmp_path / "none")], "cannot read"),
        (["--journal", str(other)], "line 1: not a journal"),
        (["--journal", str(empty)], "is empty: not a journal"),
        (["--journal", short, "--workload", "agents"], "leave out trace files"),
        (["--journal", short, "--fit", str(tmp_path / "x")], "at least 40 are needed"),
        (["--workload", "agents", "--fit", "x"], "--fit: needs --journal"),
        (["--workload", "agents", "--cost", str(other)], "is not a file that"),
        (["--workload", "agents", "--cost", str(tmp_path / "none")], "cannot read"),
        (["--workload", "agents", "--record", str(tmp_path)], "cannot write"),
    ):
        assert main(["simulate", *wrong]) in (2, 3), wrong
        assert text in capsys.readouterr().err
