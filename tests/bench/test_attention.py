"""The attention bench prints a row for each shape, and times nothing that is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from pensieve.bench import attention as bench_attention
from pensieve.cli.main import main
from pensieve.errors import PensieveError

KEYS = {
    *("batch", "queries", "context", "heads", "kv_heads", "head_size", "dtype", "seconds", "ratio"),
    *("contiguous_seconds", "copy_out_seconds", "token_by_token_seconds"),
}


def test_attention_prints_a_row_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--context", "40,96", "--batch", "2", "--repeats", "2", "--dtype", "float32", "--json"]
    assert main(["bench", "attention", *small]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["rows"]) == 2 * 2 * 2
    for row in figures["rows"]:
        assert set(row) >= KEYS
        assert row["ratio"] == pytest.approx(row["seconds"] / row["contiguous_seconds"])
    assert set(figures["ratios"]) == {
        "float32 16/16, context below 512",
        "float32 16/4, context below 512",
    }


def test_attention_times_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: bench_attention.Inputs) -> torch.Tensor:
        return self.out.fill_(0.5)

    monkeypatch.setattr(bench_attention.Inputs, "here", wrong)
    shape = bench_attention.Shape(2, 8, 64, 4, 2, 32, "float32")
    with pytest.raises(PensieveError, match="here is off by"):
        bench_attention.measure(shape, 1, 1e9)


def test_all_contenders_of_a_shape_agree() -> None:
    one = bench_attention.Inputs(bench_attention.Shape(3, 5, 70, 8, 2, 32, "float32"), 0)
    right = one.right()
    answers = {"here": one.here().clone(), "one": one.token_by_token().clone()}
    answers |= {name: run().reshape(right.shape) for name, run in one.contiguous().items()}
    assert len(answers) == 6
    for name, answer in answers.items():
        assert float((answer - right).abs().max()) < 1e-5, name


def test_queries_longer_than_the_context_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--context", "4", "--queries", "8"]) == 2
    assert "at least as long" in capsys.readouterr().err
