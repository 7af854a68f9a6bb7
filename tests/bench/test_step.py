"""The step benchmark prints a row for each batch, and does not time wrong results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.bench import step as bench_step
from pensieve.bench.random_model import RandomShape
from pensieve.bench.step import REST, GeneratingTurn, weight_bytes
from pensieve.cli.main import main
from pensieve.core.iteration import Slice
from pensieve.errors import PensieveError
from pensieve.kernels.layer import cpu
from pensieve.kernels.layer.cpu import PARTS
from pensieve.model.loader import load
from pensieve.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("flag", "rounded"), [("--weights", "int8 weights"), ("--kv-dtype", "int8 KV")]
)
def test_step_prints_a_row_for_each_batch_and_the_effect_of_rounding(
    flag: str, rounded: str, random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch", "1,3", "--context", "20", "--prompt", "30", "--repeats", "2", "--json"]
    assert main(["bench", "step", str(random_model), flag, "int8", *small]) == 0
    printed = capsys.readouterr()
    assert f"{rounded} against the checkpoint's: " in printed.err
    figures = json.loads(printed.out)
    assert [(row["kind"], row["batch"]) for row in figures["rows"]] == [
        *(("decode", 1), ("mixed", 1), ("decode", 3), ("mixed", 3))
    ]
    for row in figures["rows"]:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    assert 0 < figures["accuracy"]["kl_divergence"] < 1
    assert 0.5 < figures["accuracy"]["same_token_share"] <= 1


def test_step_parts_cover_a_step_and_read_all_weights(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch", "1,3", "--context", "20", "--prompt", "30", "--repeats", "3", "--json"]
    assert main(["bench", "step", str(random_model), *small, "--parts"]) == 0
    found = capsys.readouterr()
    parts = json.loads(found.out)["parts"]
    for batch in (1, 3):
        names = [part["name"] for part in parts if part["batch"] == batch]
        assert (
            {"heads in", "attention", "heads out", "MLP in", "MLP out"}
            < set(names)
            <= {*PARTS, REST}
        )
        assert all(part["seconds"] > 0 for part in parts)
    model = load(random_model)
    read = sum(weight_bytes(model).values())  # without norms
    assert 0.95 * bench_step.weight_bytes_read(model) < read <= bench_step.weight_bytes_read(model)
    assert "GB/s of weights" in found.err


def test_parts_of_layers_in_torch_are_not_measured(
    random_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available", lambda dtype: False)
    assert main(["bench", "step", str(random_model), "--batch", "1", "--parts"]) == 2
    assert "parts: only layers that run in C++" in capsys.readouterr().err


def test_step_refuses_to_time_turns_that_depend_on_their_batch(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = bench_step.Bench.decode

    def wrong(self: bench_step.Bench, turns: list[GeneratingTurn], *others: Slice) -> float:
        took = decode(self, turns, *others)
        if len(turns) > 1:
            turns[0].tokens[-1] ^= 1
        return took

    monkeypatch.setattr(bench_step.Bench, "decode", wrong)
    model, tokenizer = load(random_model), Tokenizer.load(random_model)
    options = bench_step.StepOptions("", "", (2,), 9, 8, 1, int8=False)
    rows = bench_step.measure(model, tokenizer, options)
    with pytest.raises(PensieveError, match="turn 0 gets another reply when it is alone"):
        next(iter(rows))


def test_the_floor_counts_the_weight_bytes_that_are_read(random_model: Path) -> None:
    shape = RandomShape(2, 64, 2, 1, 128, 8000)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128  # without norms
    right = 2 * (2 * layer + 64 + 8000 * 64)
    assert (
        load(random_model).shape.weight_bytes == right + 2 * 4 * 64 + 2 * 8000 * 64
    )  # includes the embedding table, which is not read
    read = bench_step.weight_bytes_read(load(random_model))
    assert right <= read <= right * 1.02, shape  # weights are padded
