"""`pensieve profile` measures and keeps a profile, and a daemon uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.bench import profile as bench_profile
from pensieve.bench.profile_driver import Driver
from pensieve.bench.profile_points import ProfilePoint
from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.sim import cost_file
from tests.conversations.rig_daemon import ServeProcess

SMALL = ["--threads", "1", "--device-cache", "4096t", "--host-cache", "1024t", "--turns-max", "8"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_profile, "QUICK_SECONDS", 3.0)


CHUNKS_OF_16 = {"settings": {"chunk_tokens": "16"}}


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "pensieve" / "profiles").glob("*"))


def line_of_costs(process: ServeProcess) -> str:
    with Client(process.start()):
        pass
    assert process.stop() == 0
    lines = (line for line in process.log.read_text().splitlines() if line[0] == "{")
    (found,) = [m for line in lines if (m := json.loads(line)["message"]).startswith("costs: ")]
    return str(found)


def test_a_profile_is_saved_and_logged_by_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--quick", "--json", *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out)
    (path,) = kept(tmp_path)
    assert figures["path"] == str(path)
    found = cost_file.load_all(path)
    assert found.cost.dense_points
    assert found.cost.decode_points
    assert found.cost.attention_seconds_per_pair >= 0
    assert found.cost.link_bytes_per_second < float("inf")
    assert found.cost.chunk_costs is not None
    assert found.cost.chunk_costs[0] == 32
    every = next(each for each in figures["errors"] if each["kind"] == "all")
    assert every["held_out"] == sum(each["held_out"] for each in figures["iterations"]) > 3
    assert figures["objectives"]["relaxed_seconds"] == pytest.approx(
        5 * figures["objectives"]["strict_seconds"]
    )

    profiled = line_of_costs(ServeProcess(tmp_path / "same", *SMALL, engine="model"))
    assert profiled.startswith("costs: profiled on this machine, 20")
    assert profiled.endswith(f"({path})")
    process = ServeProcess(tmp_path / "other", *SMALL, engine="model", parameters=CHUNKS_OF_16)
    assert line_of_costs(process) == (
        "costs: estimated from the model's shape: no profile of this model on this machine; "
        "`pensieve profile` makes one"
    )
    process = ServeProcess(
        tmp_path / "named", *SMALL, engine="model", environment={"PENSIEVE_COST": str(path)}
    )
    assert line_of_costs(process).startswith(f"costs: profiled, from {path}: a profile of ")
    simulated = ["simulate", "--workload", "sharegpt", "--seconds", "20", "--cost", str(path)]
    assert main([*simulated, "--device-tokens", "4k", "--host-tokens", "8k"]) == 0


def test_output_sets_the_file_of_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cost.json"
    assert main(["profile", "--quick", *SMALL, "--output", str(path)]) == 0
    assert not kept(tmp_path)
    told = capsys.readouterr().out
    assert "error of the prediction, of held-out iterations" in told
    assert "objectives for the time between tokens (Sarathi) are strict" in told
    assert f"written to {path}; `pensieve simulate --cost FILE` uses it" in told
    assert cost_file.load_all(path).measured_with["chunk_tokens"] == 32


def test_ctrl_c_leaves_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_steps = 0
    seconds = Driver.seconds

    def interrupted(self: Driver, point: ProfilePoint) -> float:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 20:
            raise KeyboardInterrupt
        return seconds(self, point)

    monkeypatch.setattr(Driver, "seconds", interrupted)
    assert main(["profile", "--quick", *SMALL]) == 130
    assert not kept(tmp_path)


def test_settings_are_printed_and_a_wrong_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--print-config", "--threads", "3"]) == 0
    told = capsys.readouterr().out
    assert "threads = 3  # flag" in told
    assert "policy" not in told
    assert main(["profile", "./nowhere"]) == 4
    assert "no model folder" in capsys.readouterr().err
    assert main(["profile", "--weights", "int3"]) == 3
    assert "--weights" in capsys.readouterr().err
