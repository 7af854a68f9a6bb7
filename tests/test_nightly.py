"""The nightly command: what it keeps, where it continues, and what its exit code says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import nightly
from tests.nightly import Night, Outcome


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nightly", *arguments])
    return nightly.main()


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def sound(night: Night, log: Path, outcome: Outcome) -> None:
    outcome.counts["turns"] = night.amount(1000)


def broken(night: Night, log: Path, outcome: Outcome) -> None:
    outcome.failures.append("a reply was lost")


def mistaken(night: Night, log: Path, outcome: Outcome) -> None:
    raise ValueError("no such file")


def endless(night: Night, log: Path, outcome: Outcome) -> None:
    outcome.counts["turns"] = 7
    raise KeyboardInterrupt


def test_the_nightly_run_covers_all_tests_that_the_suite_leaves_out() -> None:
    source = Path(nightly.__file__)
    assert [each for each in nightly.SCALED if not (source.parent / each).exists()] == []
    named = {*nightly.SCALED, "cluster/test_nemesis.py"}  # the part `nemesis` runs these storms
    left_out = [
        each.relative_to(source.parent)
        for each in source.parent.rglob("test_*.py")
        if each.name != Path(__file__).name and "pytest.mark.full" in each.read_text()
    ]
    assert len(left_out) > 5
    for file in left_out:
        assert named & {str(file), *map(str, file.parents)}, f"no part of the night has {file}"


def test_every_part_writes_a_line_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"sound": sound, "broken": broken, "mistaken": mistaken, "endless": endless}
    monkeypatch.setattr(nightly, "PARTS", parts)
    monkeypatch.setattr(nightly, "commit_of_the_tree", lambda: "abc")
    folder = tmp_path / "results"
    assert run(monkeypatch, str(folder), "--only", "sound", "--share", "0.5") == 0
    assert run(monkeypatch, str(folder), "--only", "sound,broken,mistaken") == 1
    assert run(monkeypatch, str(folder), "--only", "endless,sound") == 130
    lines = kept(folder)
    assert [line["part"] for line in lines] == ["sound", "sound", "broken", "mistaken", "endless"]
    assert [line["counts"] for line in lines[:2]] == [{"turns": 500}, {"turns": 1000}]
    assert lines[2]["failures"] == ["a reply was lost"]
    assert lines[3]["failures"] == ["ValueError: no such file"]
    assert (lines[4]["interrupted"], lines[4]["counts"]) == (True, {"turns": 7})
    assert {line["commit"] for line in lines} == {"abc"}
    before = len(lines)
    assert run(monkeypatch, str(folder), "--only", "sound,broken", "--resume") == 1
    assert [line["part"] for line in kept(folder)[before:]] == ["broken"]


def test_a_complete_green_night_prints_the_line_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a complete green night counts, even in two runs. A share, one part or a failure does not."""
    monkeypatch.setattr(nightly, "PARTS", {"sound": sound, "calm": sound})
    monkeypatch.setattr(nightly, "commit_of_the_tree", lambda: "abc")
    for arguments in (("--share", "0.5"), ("--only", "sound")):
        assert run(monkeypatch, str(tmp_path), *arguments) == 0
        assert "last green run" not in capsys.readouterr().out
    assert run(monkeypatch, str(tmp_path), "--resume") == 0
    assert re.search(r"last green run: \d{4}-\d\d-\d\d, abc, 0\.0 hours", capsys.readouterr().out)
    monkeypatch.setattr(nightly, "PARTS", {"sound": sound, "broken": broken})
    assert run(monkeypatch, str(tmp_path)) == 1
    assert "last green run" not in capsys.readouterr().out


def test_a_night_continues_with_the_seeds_after_the_previous_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert run(monkeypatch, str(tmp_path), "--only", "faults", "--share", "0.00001") == 0
    first, second = kept(tmp_path)
    assert (first["counts"], second["counts"]) == ({"seeds": 1}, {"seeds": 1})
    assert (first["first_seed"], first["next_seed"]) == (1000, 1001)
    assert (second["first_seed"], second["next_seed"]) == (1001, 1002)


def test_an_unknown_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, str(tmp_path), "--only", "dreams")


def test_a_scaled_part_records_its_amount_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a night: 100 double presses of Ctrl-C, ten times as many as in the suite."""
    given: list[tuple[str, str]] = []

    def ran(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
        given.append((command[-1], variables["PENSIEVE_TEST_SCALE"]))
        return 0

    monkeypatch.setattr(nightly, "run", ran)
    assert run(monkeypatch, str(tmp_path), "--only", "ctrl-c", "--share", "0.1") == 0
    assert given == [("tests/cli/test_ctrl_c.py", "10")]
    assert kept(tmp_path)[0]["counts"]["double presses"] == 100


def test_a_whole_night_computes_the_papers_with_all_seeds_and_keeps_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    def computed(command: Sequence[str], log: Path) -> int:
        commands.append(command)
        rows = [{"verdict": "reproduced"}, {"verdict": "same shape"}, {"verdict": "same shape"}]
        Path(command[command.index("--json") + 1]).write_text(json.dumps(rows))
        return 0

    monkeypatch.setattr(nightly, "run", computed)
    monkeypatch.setattr(nightly, "PARTS", {"papers": nightly.papers})
    assert run(monkeypatch, str(tmp_path)) == 0
    assert run(monkeypatch, str(tmp_path), "--share", "0.5") == 0
    assert [("--quick" in command, "all" in command) for command in commands] == [
        (False, True),
        (True, True),
    ]
    assert kept(tmp_path)[0]["counts"] == {"reproduced": 1, "same shape": 2}
    assert list(tmp_path.glob("*-papers.json"))
