"""`simulate --batch`: the command compares, prints what it assumes, and says why it does not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.cli.simulate_batch import text
from pensieve.sim import batch, cost_file
from tests.scripts.made_up import COST

BATCH = ["simulate", "--batch", "64/32x4", "--device-tokens", "4k", "--turns-max", "16"]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    (tmp_path / "costs.json").write_text(cost_file.text_of(COST, {}))
    return str(tmp_path / "costs.json")


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = batch.drawn_batch
    monkeypatch.setattr(
        batch,
        "drawn_batch",
        lambda shape, seed: drawn(replace(shape, requests=32, output_tokens=4), seed),
    )


def test_the_command_compares_three_ways_to_share(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BATCH, "--cost", costs, "--seed", "0,1", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "4,000 tokens of KV on the device, none on the host" in err
    assert "1,000 requests of 64 + 32 tokens, 4 of each prefix" in err
    assert "attention over a shared page is charged to each request" in err
    rows = result["rows"]
    assert [(row["seed"], row["sharing"]) for row in rows] == [
        (seed, sharing) for seed in (0, 1) for sharing in ("groups", "lru", "off")
    ]
    for row in rows:
        assert row["requests"] == 32
        if row["sharing"] == "groups":
            assert row["saving"] == row["one_prefix"] == pytest.approx(0.5)
            assert row["over_off"] > 1.0
        if row["sharing"] == "off":
            assert (row["saving"], row["over_off"]) == (0.0, 1.0)
    shown = "\n".join(text(result["assumed"], rows))
    assert "50.0% with one prefix for each request" in shown
    assert "groups  50.0% (50.0% to 50.0%)" in shown


def test_one_seed_has_no_spread(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BATCH, "--cost", costs, "--apart", "2"]) == 0
    out = capsys.readouterr().out
    assert "about 2 requests apart" in out
    assert " to " not in out.split("sharing")[-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--batch", "nothing"], "batch"),
        (["--workload", "sharegpt"], "workload"),
        (["trace.jsonl"], "traces"),
        (["--apart", "-1"], "apart"),
        (["--device-tokens", "4k,8k"], "device_tokens"),
        (["--turns-max", "4000"], "turns_max"),
        (["--hardware", "instant"], "hardware"),
    ],
)
def test_what_cannot_be_simulated_is_named(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BATCH, *options]) == 2
    assert named in capsys.readouterr().err
