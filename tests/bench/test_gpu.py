"""Every section of the GPU bench runs small, on the CPU too, and times nothing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pensieve.bench import gpu as bench_gpu
from pensieve.bench.gpu_pages import Paged


def test_every_section_of_the_gpu_bench_runs_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU it checks and measures the same things, on other kernels."""
    out = tmp_path / "figures.jsonl"
    sections = "device,kernels,attention,decode,prefill,swap,hidden,exactness,load"
    small = ["--small", "--device", "cpu", "--out", str(out), "--sections", sections]
    assert bench_gpu.main(small) == 0, capsys.readouterr()
    figures = [json.loads(line) for line in out.read_text().splitlines()]
    assert {each["section"] for each in figures} == set(sections.split(","))
    assert all("failed" not in each for each in figures)
    ratios = {each["kind"]: each["ratio"] for each in figures if "ratio" in each and "kind" in each}
    assert set(ratios) == {"stateless", "device only", "two tiers", "two, LRU"}
    assert ratios["stateless"] == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_gpu_says_what_the_references_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels, captured graphs, swaps, and replies under pressure, on the real thing."""
    out = str(tmp_path / "figures.jsonl")
    checks = "device,kernels,attention,decode,prefill,swap,hidden,exactness"
    small = ["--small", "--device", "cuda", "--out", out, "--sections", checks]
    assert bench_gpu.main(small) == 0, capsys.readouterr()


def test_the_gpu_bench_times_nothing_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Paged, "run", lambda self: self.out.fill_(0.5))
    out = tmp_path / "figures.jsonl"
    small = ["--small", "--device", "cpu", "--out", str(out), "--sections", "kernels,decode"]
    assert bench_gpu.main(small) == 1
    figures = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["section"] for each in figures if each.get("failed")] == ["kernels", "decode"]
    assert not any("seconds" in each for each in figures)
