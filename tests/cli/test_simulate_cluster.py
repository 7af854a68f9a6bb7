"""`simulate --cluster`: the command simulates, prints, and says why it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.sim import cost_file
from tests.scripts.made_up import COST

SMALL = [
    *("simulate", "--cluster", "6", "--seconds", "30", "--reaction", "5", "--rate", "0.5"),
    *("--device-tokens", "60k", "--host-tokens", "0", "--simulated", "1", "--lease", "1"),
    *("--events", ""),
]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    (tmp_path / "costs.json").write_text(cost_file.text_of(COST, {}))
    return str(tmp_path / "costs.json")


def test_the_command_simulates_a_cluster(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    events = ["--events", "10:fail:1,20:join:1", "--history", "50", "--round-trip", "100"]
    assert main([*SMALL, "--cost", costs, *events, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [row["phase"] for row in found["phases"]] == ["before", "after fail 1", "after join 1"]
    assert [row["replicas"] for row in found["phases"]] == [6, 5, 6]
    assert found["history"]["regions"][0]["first_token_seconds"] == pytest.approx(0.2)
    assert found["history"]["stores"][0]["store_turns_per_second"] == 50
    assert "6 replicas, 1 of them with the daemon's scheduler, of the other 5 turns" in err
    assert main([*SMALL, "--cost", costs]) == 0
    assert "the fullest replica over the mean" in capsys.readouterr()[0]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--events", "5:melt:1"], "5:melt:1"),
        (["--events", "50:fail:1"], "before --seconds 30"),
        (["--cluster", "1"], "2 to 10,000"),
        (["--simulated", "7"], "at most the 6"),
        (["--history", "x"], "numbers above 0"),
        (["--rate", "1,2"], "one is simulated"),
        (["--policy", "clairvoyant"], "is none of"),
        (["--drain", "0"], "above 0"),
        (["--forks", "2"], "at most 1"),
        (["--phases", "separate"], "single simulation"),
    ],
)
def test_what_cannot_be_simulated_is_named(
    more: list[str], why: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--cost", costs, *more]) == 2
    assert why in capsys.readouterr()[1]


def test_where_nothing_takes_time_there_is_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--hardware", "instant"]) == 2
    assert "no latency" in capsys.readouterr()[1]
