"""`simulate --streaming`: the command compares, prints what it assumes, and says why it does not run."""

from __future__ import annotations

import json

import pytest

from pensieve.cli.main import main
from pensieve.cli.simulate_streaming import text
from pensieve.sim.systems import SYSTEMS

STREAMING = ["simulate", "--streaming", "--model", "opt-6.7b", "--hardware", "rtx-4090"]


def test_the_command_compares_four_systems(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rate", "0.2,2", "--seed", "0,1", "--requests", "20", "--json"]
    assert main([*STREAMING, *options]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    for line in (
        "opt-6.7b on 1 x rtx-4090, data sheets x 0.6",
        "15,640 tokens of KV on the device, 91,552 on the host",
        "20 requests a run, arriving at random",
        "orca: 7 places of 2,048 tokens",
        "prompts add at most 0.05 s",
        "the latest is preempted and recomputed",
        "promoted after 10 s",
    ):
        assert line in err
    rows = result["rows"]
    assert [(row["seed"], row["rate"], row["system"]) for row in rows] == [
        (seed, rate, system) for seed in (0, 1) for rate in (0.2, 2.0) for system in SYSTEMS
    ]
    assert all(row["requests"] == 20 for row in rows)
    assert all(0 < row["gap_p99"] <= row["gap_max"] for row in rows)
    shown = "\n".join(text(result["assumed"], rows, result["limit"]))
    assert "medians of 2 seeds" in shown
    assert "sustained within 53.9 ms/token, and delivered at 2 requests/s" in shown
    assert " resident     above 2" in shown
    assert " to " in shown.split("normalized latency")[1]


def test_the_text_has_ratios_where_both_rates_are_known() -> None:
    rows = [
        {"system": system, "rate": rate, "seed": 0, **dict.fromkeys(("gap_max", "gap_p99"), 5.0)}
        | {"normalized_mean": latency, "tokens_per_second": 60 * rate if system == "vllm" else 90.0}
        for system, latencies in (("vllm", (50.0, 150.0)), ("resident", (40.0, 120.0)))
        for rate, latency in zip((1.0, 2.0), latencies, strict=True)
    ]
    lines = list(text(["assumed"], rows, 100.0))
    assert lines[0] == "assumed"
    assert "medians of 1 seed, least and most behind them" in lines
    assert lines[-2].split() == ["vllm", "1.5", "1.00", "x", "120", "1.00", "x"]
    assert lines[-1].split() == ["resident", "1.75", "1.17", "x", "90", "0.75", "x"]
    assert list(text([], rows, 10.0))[-1].split() == [
        "resident",
        "below",
        "1",
        "-",
        "90",
        "0.75",
        "x",
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workload", "sharegpt"], "workload"),
        (["trace.jsonl"], "traces"),
        (["--policy", "lru"], "policy"),
        (["--stateless"], "stateless"),
        (["--phases", "separate"], "phases"),
        (["--hardware", "instant"], "hardware"),
        (["--device-tokens", "5k,8k"], "device_tokens"),
        (["--device-tokens", "2k"], "device_tokens"),
        (["--rate", "0"], "rate"),
        (["--turns-max", "4000"], "turns_max"),
        (["--requests", "0"], "requests"),
        (["--limit", "nan"], "limit"),
        (["--tbt", "-1"], "tbt"),
        (["--model", "opt-66b"], "model"),
    ],
)
def test_what_cannot_be_simulated_is_named(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*STREAMING, *options]) == 2
    assert named in capsys.readouterr().err
