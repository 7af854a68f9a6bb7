"""`simulate --plan`: the command plans, prints, and says why it does not plan."""

from __future__ import annotations

import json
import re
from operator import itemgetter
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.cli.simulate_plan import text
from pensieve.sim import cost_file
from tests.sim.plan.world import COST, LOAD

PLAN = [
    *("simulate", "--plan", "--workload", "sharegpt", "--reaction", "5", "--plan-seconds", "15"),
    *("--device-tokens", "6k", "--turns-max", "32", "--token-budget", "256"),
]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    (tmp_path / "costs.json").write_text(cost_file.text_of(COST, {}))
    return str(tmp_path / "costs.json")


def test_the_command_plans(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--tbt-p99", "0.4", "--ttft-p50", "2", "--host-tokens", "12k", "--rate", "1"]
    assert main([*PLAN, *limits, "--cost", costs, "--replicas", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "costs: made up; 6,000 tokens of KV on the device; policy return" in err
    assert "a second: carried" in err
    assert result["slo"] == {
        "tbt_p99_seconds": 0.4,
        "ttft_p50_seconds": 2.0,
        "queue_p50_seconds": 2.0,
    }
    assert sum(row["recommended"] for row in result["host_memory"]) == 1
    assert (
        result["needed"]["affinity"]["num_replicas"] <= result["needed"]["random"]["num_replicas"]
    )
    assert {row["replicas"] for row in result["fleets"]} >= {64}
    for row in result["fleets"]:
        assert row["scaled"] == (row["replicas"] > 4)
    shown = "\n".join(text(result, LOAD))
    for count in (result["needed"]["affinity"]["num_replicas"], 64):
        assert re.search(rf"^ +{count} (replicas? with )?affinity", shown, re.MULTILINE)
    assert shown.count("scaled from one of them, thinned load") >= 2
    assert "1,000 replicas are not enough" in "\n".join(
        text({**result, "needed": {**result["needed"], "random": None}}, LOAD)
    )


def test_the_command_plans_for_a_trace(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {
            "conversation": f"c{i}",
            "at": 3.0 * i + 8.0 * turn,
            "input_tokens": 60,
            "output_tokens": 20,
        }
        for i in range(40)
        for turn in range(3)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(each) for each in sorted(lines, key=itemgetter("at"))))
    given = ["simulate", "--plan", str(trace), "--cost", costs, "--device-tokens", "6k"]
    assert (
        main(
            [
                *given,
                "--host-tokens",
                "0",
                "--ttft-p50",
                "0.1",
                "--plan-seconds",
                "8",
                "--replicas",
                "8",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "load: a trace of 0.3" in err
    assert "copies of the trace at once" in out
    assert "scaled from one of them, thinned load" in out
    assert "1 replica with affinity" in out


def test_costs_from_a_file_give_times_whatever_the_hardware(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["simulate", "--workload", "sharegpt", "--seconds", "5", "--hardware", "instant"]
    separate = ["--phases", "separate", "--cost", costs, "--policy"]
    assert main([*given, *separate, "return"]) == 0
    assert "assumed: made up; return weighs copies against" in capsys.readouterr().err
    assert main([*given, *separate, "lru"]) == 0
    assert "weighs" not in capsys.readouterr().err
    assert main([*given, "--policy", "return"]) == 0
    assert "weighs" not in capsys.readouterr().err


def test_the_command_says_why_it_does_not_plan(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, why in (
        (["--cost", costs, "--tbt-p99", "0.01"], "a token takes 10.5 ms even without other turns"),
        (["--cost", costs, "--ttft-p50", "0.005"], "no load is low enough"),
        (["--cost", costs, "--tbt-p99", "0"], "above 0"),
        (["--cost", costs, "--rate", "1,2"], "one is planned for"),
        (["--cost", costs, "--policy", "lru,value"], "one is planned with"),
        (["--cost", costs, "--stateless"], "not for --plan"),
        (["--cost", costs, "--seconds", "60"], "are --plan-seconds"),
        (["--cost", costs, "--device-tokens", "6k,7k"], "one is planned with"),
        (["--hardware", "instant"], "nothing to plan"),
    ):
        assert main([*PLAN, *wrong]) == 2, wrong
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*PLAN, "--replicas", "1001"])
    assert "1 to 1000" in capsys.readouterr().err
