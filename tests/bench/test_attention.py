"""The attention benchmark prints a row for each shape, and does not time wrong results."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from pensieve.bench import attention as bench_attention
from pensieve.cli.main import main
from pensieve.errors import PensieveError

TIMES: tuple[str, ...] = (
    "seconds",
    "contiguous_seconds",
    "copy_out_seconds",
    "token_by_token_seconds",
    "ratio",
)
TIMES += ("bandwidth_share", "int8_kv_seconds")
KEYS = {"batch", "queries", "context", "heads", "kv_heads", "head_size", "dtype", *TIMES}


def test_attention_prints_a_row_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--context", "40,96", "--batch", "2", "--repeats", "2", "--dtype", "float32", "--json"]
    assert main(["bench", "attention", *small]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(row["context"], row["kv_heads"]) for row in figures["rows"]] == [
        *((40, 16), (96, 16), (40, 4), (96, 4))
    ]
    for row in figures["rows"]:
        assert set(row) >= KEYS
        assert row["ratio"] == pytest.approx(row["seconds"] / row["contiguous_seconds"])
    assert set(figures["ratios"]) == {
        "float32 16/16, context below 512",
        "float32 16/4, context below 512",
    }
    assert set(figures["int8_kv_ratios"]) == set(figures["ratios"])


def test_attention_times_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: bench_attention.Inputs) -> torch.Tensor:
        return self.out.fill_(0.5)

    monkeypatch.setattr(bench_attention.Inputs, "paged", wrong)
    shape = bench_attention.AttentionShape(2, 8, 64, 4, 2, 32, "float32")
    with pytest.raises(PensieveError, match="paged is off by"):
        bench_attention.measure(shape, 1, 1e9)


def test_all_contenders_of_a_shape_agree() -> None:
    one = bench_attention.Inputs(bench_attention.AttentionShape(3, 5, 70, 8, 2, 32, "float32"), 0)
    right = one.expected()
    answers = {"paged": one.paged().clone(), "one": one.token_by_token().clone()}
    assert float((one.int8_kv() - one.expected("int8_kv")).abs().max()) < 1e-5
    answers |= {name: run().reshape(right.shape) for name, run in one.contiguous().items()}
    assert len(answers) == 6
    for name, answer in answers.items():
        assert float((answer - right).abs().max()) < 1e-5, name


def test_queries_longer_than_the_context_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--context", "4", "--queries", "8"]) == 2
    assert "at least as long" in capsys.readouterr().err


def test_the_default_is_a_dozen_shapes_and_full_the_table_of_the_docs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(
        shape: bench_attention.AttentionShape, repeats: int, bandwidth: float
    ) -> bench_attention.AttentionRow:
        times: dict[str, Any] = dict.fromkeys(TIMES, 1.0)
        return bench_attention.AttentionRow(**asdict(shape), **times)

    monkeypatch.setattr(bench_attention, "measure", timed)
    for arguments, number in (([], 12), (["--full"], 96), (["--full", "--head-size=96"], 48)):
        assert main(["bench", "attention", "--json", *arguments]) == 0
        found = capsys.readouterr()
        assert len(json.loads(found.out)["rows"]) == number
        assert f"{number} of {number}: float32" in found.err
