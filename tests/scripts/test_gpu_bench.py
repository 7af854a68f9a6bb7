"""Every section of the GPU bench runs at a small size, also on the CPU, and times no wrong result."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.errors import PensieveError
from pensieve.kernels import choices, cuda_launch, multi_token_attention, write_kv
from pensieve.kernels.attention import cuda, reference
from pensieve.kernels.attention.input import AttentionInput
from pensieve.kernels.kv_format import FP8
from pensieve.model.kv.memory import KVMemory
from pensieve.model.sampling.sampler import Sampler
from scripts.gpu_bench import __main__ as bench_gpu
from scripts.gpu_bench import engines, kernels, pages
from scripts.gpu_bench.harness import SECTIONS, Bench, figures_of, succeeded
from scripts.gpu_bench.model import drawn_conversations
from scripts.gpu_bench.pages import Paged, baselines, usable
from scripts.gpu_bench.stages import (
    KERNELS,
    STAGES,
    Consequences,
    Stage,
    Step,
    after,
    decisions,
    small,
    unverified_kernels,
)
from tests.kernels.emulated import needs_x86, run


def figure(section: str, **fields: Any) -> dict[str, Any]:
    return {"section": section, "small": False, "line": "…", **fields}


WRONG_COPY = figure("kernels", failed=True, kind="copy")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_runs_at_a_small_size(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, a section checks and measures the same things with other kernels."""
    assert succeeded(section, tmp_path, "cpu", 60, True), capsys.readouterr()
    figures = figures_of(tmp_path)
    assert {each["section"] for each in figures} == {section}
    assert all("failed" not in each and each["small"] for each in figures)
    if section == "load":
        ratios = {each["kind"]: each["ratio"] for each in figures if "ratio" in each}
        assert set(ratios) == {"stateless", "device only", "two tiers", "two, LRU"}
        assert ratios["stateless"] == 1.0


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "load"])
def test_results_on_a_gpu_equal_the_references(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check kernels, captured graphs, swaps, and replies under memory pressure on a real GPU."""
    assert succeeded(section, tmp_path, "cuda", 120, True), capsys.readouterr()


@pytest.mark.parametrize("section", ["kernels", "decode", "prefill", "attention"])
def test_the_gpu_bench_does_not_time_wrong_results(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Paged, "run", lambda self: self.out.fill_(0.5))
    assert not succeeded(section, tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert {each["section"] for each in figures if each.get("failed")} == {section}
    assert not any("seconds" in each or "fp8_speed" in each for each in figures)
    told = decisions(3, figures, [section])
    assert any(f"{section}: " in each and "failed" in each for each in told)
    assert not any("above its limit" in each for each in told)


def test_torchs_warnings_about_an_unsupported_baseline_are_not_shown() -> None:
    def refused() -> torch.Tensor:
        warnings.warn("Memory efficient kernel not used because …", UserWarning, stacklevel=1)
        raise RuntimeError("no available kernel")

    right = torch.ones(2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert set(usable({"refused": refused, "right": right.clone}, right, print)) == {"right"}
    assert not told


def test_a_wrong_baseline_is_left_out_and_named() -> None:
    """Without earlier context, torch's own causal attention is one of the baselines."""
    query, keys = torch.randn(1, 40, 4, 64), torch.randn(1, 2, 40, 64)
    ways = baselines(query, keys, keys)
    right = ways["fused, batch"]()
    assert {"fused, causal", "fused, folded"} < set(ways)
    ways["fused, folded"] = lambda: torch.zeros_like(right)
    reported: list[str] = []
    assert set(usable(ways, right, reported.append)) == {"fused, batch", "fused, causal"}
    assert len(reported) == 1
    assert reported[0].startswith("skipped: torch (fused, folded) is off by")
    assert "fused, causal" not in baselines(query[:, :8], keys, keys)


# -- the run: one process for each section --


def test_a_section_that_hangs_fails_alone(tmp_path: Path) -> None:
    log = io.StringIO()
    run = bench_gpu.Run(tmp_path, "cpu", 600, log)
    run.step(Step("device", 120, small=True))  # starts the process that all others are forked from
    run.step(Step("load", 1, small=True))
    run.step(Step("swap", 60, small=True))
    assert run.failed == ["load"]
    figures = figures_of(tmp_path)
    (failed,) = [each for each in figures if each.get("failed")]
    assert failed["line"] == "FAILED: ended after 1 s"
    assert figures[-1]["section"] == "swap"
    assert "swap_in, 10 pages" in log.getvalue(), "what a process printed is in the log"


def dies(*given: object) -> None:
    raise SystemExit(1)


def test_a_section_that_dies_before_it_begins_is_reported_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The causes: an invalid choice, a missing device, and an unexpected exit."""
    run = bench_gpu.Run(tmp_path, "cpu", 600, io.StringIO())
    run.step(Step("device", 120, small=True, choices="hopper=yes"))
    assert not succeeded("swap", tmp_path, "cuda:99", 60, True)
    monkeypatch.setattr(bench_gpu, "run_section", dies)
    run.step(Step("decode", 60, small=True))
    assert run.failed == ["device", "decode"]
    figures = figures_of(tmp_path)
    assert [each["section"] for each in figures] == ["device", "swap", "decode"]
    assert all(each["failed"] for each in figures)
    assert "hopper=0 or 1" in figures[0]["line"]


def starts_another(*given: Any) -> None:
    """Start a process in its own process group, like compute-sanitizer."""
    os.setsid()
    with subprocess.Popen(["sleep", "60"], process_group=0) as another:
        os.write(given[-1].fileno(), f"{another.pid}\n".encode())


def test_processes_started_by_a_timed_out_section_are_killed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "run_section", starts_another)
    log = io.StringIO()
    bench_gpu.Run(tmp_path, "cpu", 600, log).step(Step("device", 10))
    assert ended(int(log.getvalue().split()[0]))


def ended(pid: int) -> bool:
    """Return whether the process ends within some seconds, even if no parent reaps it."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_wrong_kernels_are_switched_off_one_by_one_until_all_pass_or_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's kernel is wrong once, then the search. In the second case, Hopper's kernel is wrong twice."""
    right = [figure("kernels", kind=kind) for kind in KERNELS]
    wide, drawn = ([figure("kernels", failed=True, kind=kind)] for kind in ("wide", "draw"))
    stages = [
        Stage(1, 1, "", (Step("kernels", 9),)),
        Stage(6, 1, "", (Step("load", 9),)),
    ]
    for index, (answers, ran, chosen) in enumerate(
        [
            ([wide, drawn, right], ["kernels"] * 3 + ["load"], ["hopper=0", "radix=0"]),
            ([wide, wide], ["kernels"] * 2, ["hopper=0"]),
        ]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        run = bench_gpu.Run(folder, "cpu", 600, io.StringIO())
        seen: list[str] = []

        def step(
            step: Step,
            seen: list[str] = seen,
            answers: list[Any] = answers,
            folder: Path = folder,
        ) -> None:
            seen.append(step.section)
            with (folder / "figures.jsonl").open("a") as out:
                for each in answers.pop(0) if answers else ():
                    out.write(json.dumps(each) + "\n")

        monkeypatch.setattr(run, "step", step)
        run.stages(stages)
        assert seen == ran
        assert run._choices == chosen


def test_a_run_keeps_figures_log_and_decisions_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even without a given folder. `choices` from the environment reach the processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setenv("PENSIEVE_GPU_CHOICES", "radix=0")
    short = Stage(1, 1, "", (Step("versions", 60), Step("device", 60)))
    monkeypatch.setattr(bench_gpu, "STAGES", (short, short._replace(number=2)))
    monkeypatch.setattr(bench_gpu, "default_device", lambda: "cpu")
    assert bench_gpu.main(["--small", "--stages", "2"]) == 0
    (folder,) = tmp_path.glob("bench_gpu_*")
    assert {each.name for each in folder.iterdir()} == {"figures.jsonl", "log.txt", "decisions.txt"}
    figures = figures_of(folder)
    assert any("radix=0" in each["line"] for each in figures)
    assert sum("copy_bandwidth" in each for each in figures) == 1


def test_a_stage_without_time_left_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench_gpu.Run(tmp_path, "cpu", 60, io.StringIO())
    run.stages(small(STAGES))
    assert run.failed == ["all"]
    assert capsys.readouterr().out.count("is skipped") == len(STAGES)
    assert not figures_of(tmp_path)


# -- what figures decide --


@pytest.mark.parametrize(
    ("found", "means"),
    [
        ([figure("kernels", kind="narrow"), figure("kernels", kind="wide")], Consequences()),
        ([figure("kernels", failed=True, kind="narrow")], Consequences(stop=True)),
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="wide")],
            Consequences(choices="hopper=0"),
        ),
        # The process was killed and named no kernel. The narrow kernel had been checked, or had not.
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True)],
            Consequences(choices="hopper=0"),
        ),
        ([figure("kernels", failed=True)], Consequences(stop=True)),
        ([figure("versions", failed=True)], Consequences(stop=True)),
        ([figure("sanitizer", failed=True), figure("kernels", kind="narrow")], Consequences()),
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="fused")],
            Consequences(stop=True),
        ),
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="fp8")],
            Consequences(),
        ),
        ([figure("kernels", kind="narrow"), WRONG_COPY], Consequences(stop=True)),
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="draw")],
            Consequences(choices="radix=0"),
        ),
        # The kernels have not been checked.
        ([figure("sanitizer", failed=True)], Consequences(stop=True)),
        ([], Consequences(stop=True)),
    ],
)
def test_the_consequence_of_wrong_kernels_is_a_switch_or_the_end_of_the_run(
    found: list[dict[str, Any]], means: Consequences
) -> None:
    assert after(1, found) == means
    assert after(3, found) == Consequences()


def test_kernels_that_failed_in_the_section_kernels_are_not_timed(tmp_path: Path) -> None:
    """Kernels that the section did not reach are not timed either."""
    right = [figure("kernels", kind=kind) for kind in KERNELS]
    assert unverified_kernels([]) == frozenset()
    assert unverified_kernels([*right, figure("decode", failed=True)]) == frozenset()
    wrong = [*right[:4], figure("kernels", failed=True, kind="draw")]
    assert unverified_kernels(wrong) == {"draw", "fused", "fp8"}
    assert unverified_kernels([*wrong, *right]) == frozenset(), (
        "the section ran again, with a switch"
    )
    assert unverified_kernels([*right, figure("kernels", failed=True, kind="fused")]) == {"fused"}
    (tmp_path / "figures.jsonl").write_text("".join(json.dumps(each) + "\n" for each in wrong))
    for section in ("decode", "prefill", "iteration", "exactness"):
        assert succeeded(section, tmp_path, "cpu", 60, True)
    lines = [each["line"] for each in figures_of(tmp_path)[len(wrong) :] if "fp8" in each["line"]]
    assert len(lines) == 5
    assert all("skipped" in line for line in lines)


@pytest.mark.parametrize(
    ("number", "found", "told"),
    [
        (2, [figure("decode", failed=True)], "are meaningless"),
        (3, [figure("decode", share=0.7)], "merge inside the kernel"),
        (3, [figure("decode", share=0.9), figure("prefill", share=0.7)], "above its limit"),
        (3, [figure("prefill", share=0.5)], "ping-pong"),
        (3, [figure("decode", fp8_speed=1.2)], "whether unpacking is the limit"),
        (4, [figure("sampler", seconds=1e-3, kind="greedy")], "sampler takes 1.00 ms"),
        (4, [figure("iteration", host_seconds=3e-3, seconds=4e-3, kind="graphs", rows=1)], "host"),
        (
            4,
            [figure("iteration", host_seconds=3e-3, seconds=4e-3, kind="eager", rows=1)],
            "nothing",
        ),
        (
            4,
            [figure("iteration", host_seconds=1e-3, seconds=4e-3, kind="graphs", rows=1)],
            "nothing",
        ),
        (4, [figure("hidden", ratio=1.2)], "1.20 x"),
        (5, [figure("attention", mean=1.2, heads="16/4")], "at most 32 rows"),
        (6, [figure("load", kind="two tiers", ratio=1.4)], "1.40 x stateless"),
    ],
)
def test_each_stage_reports_the_decision_that_follows_from_its_figures(
    number: int, found: list[dict[str, Any]], told: str
) -> None:
    wanted = [each["section"] for each in found]
    assert any(told in sentence for sentence in decisions(number, found, wanted))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_stage_without_figures_is_reported_as_not_examined(number: int) -> None:
    told = decisions(number, [], [step.section for step in STAGES[number - 1].steps])
    for name in {step.section for step in STAGES[number - 1].steps}:
        assert f"{name}: not examined" in told
    for praise in ("continue", "are meaningful", "above its limit"):
        assert not any(praise in sentence for sentence in told)


def test_switched_off_kernels_stay_off_in_every_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "current", choices.Choices(hopper=0, radix=0))
    seen: list[choices.Choices] = []
    run, drawn = Paged.run, Sampler.draw

    def attend(self: Paged) -> torch.Tensor:
        seen.append(choices.current)
        return run(self)

    def draw(self: Sampler, *given: Any) -> Any:
        seen.append(choices.current)
        return drawn(self, *given)

    monkeypatch.setattr(Paged, "run", attend)
    monkeypatch.setattr(Sampler, "draw", draw)
    for section in ("decode", "iteration", "sampler"):
        before = len(seen)
        assert succeeded(section, tmp_path, "cpu", 60, True)
        assert len(seen) > before
    assert {(each.hopper, each.radix) for each in seen} == {(0, 0)}


def raises(*given: object) -> None:
    raise PensieveError("planted")


@pytest.mark.parametrize("section", ["decode", "prefill"])
def test_wrong_fp8_kv_does_not_suppress_figures_of_other_types(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Paged.run

    def attend(self: Paged) -> torch.Tensor:
        return run(self) if self.kv_scales is None else self.out.fill_(0.5)

    monkeypatch.setattr(Paged, "run", attend)
    assert not succeeded(section, tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    failed = [bool(each.get("failed")) for each in figures]
    assert failed == sorted(failed), "fp8 runs after all other types"
    assert sum("share" in each for each in figures) == sum(failed) > 0
    (told,) = (each for each in decisions(3, figures, [section]) if section in each)
    assert "parts of it failed, and the rest was examined" in told
    assert told.count("KV in fp8") == sum(failed)


def test_timed_iterations_never_decode_over_nan_of_uninitialized_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN logits take other paths through kernels and the sampler, so they must not be timed."""
    allocated = KVMemory._allocate

    def with_nan(*given: Any) -> torch.Tensor:
        arena = allocated(*given)
        arena.view(torch.uint8).fill_(0xFF)
        return arena

    monkeypatch.setattr(KVMemory, "_allocate", with_nan)
    assert succeeded("iteration", tmp_path, "cpu", 60, True)
    executor_of = vars(engines)["executor_of"]
    monkeypatch.setattr(
        engines, "executor_of", lambda *given, **more: executor_of(*given, graphs=False)
    )
    (tmp_path / "figures.jsonl").unlink()
    assert not succeeded("iteration", tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert all("0 tokens" in each["line"] and each["failed"] for each in figures)
    assert len(figures) == 2, "each kind"


@pytest.mark.parametrize("dimension", [0, 1])
def test_exactness_fails_if_fp8_scales_of_keys_and_values_or_of_heads_are_swapped(
    dimension: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = reference.multi_token_attention

    def by_others(inputs: AttentionInput, out: torch.Tensor) -> None:
        if inputs.kv_scales is not None:
            inputs = inputs._replace(kv_scales=inputs.kv_scales.flip(dimension))
        attend(inputs, out)

    monkeypatch.setattr(reference, "multi_token_attention", by_others)
    assert not succeeded("exactness", tmp_path, "cpu", 60, True)
    elements, in_bytes = figures_of(tmp_path)
    assert "0 wrong" in elements["line"]
    assert "tokens are far less likely" in in_bytes["line"]


def test_a_swap_that_moves_nothing_is_found_even_if_an_earlier_swap_moved_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target pages already have the right contents, because another swap moved the same pages."""
    kept: dict[int, Any] = {}
    prepared, swap_in = KVMemory.prepared_for_swap, KVMemory.swap_in
    ways: list[Any] = []

    def same(self: KVMemory, moves: Any) -> Any:
        return kept.setdefault(id(self), prepared(self, moves))

    def once(self: Bench, runs: Any, **more: Any) -> float:
        ways.append(runs)
        runs[0]()
        return 1.0

    monkeypatch.setattr(KVMemory, "prepared_for_swap", same)
    monkeypatch.setattr(
        KVMemory, "swap_in", lambda *given: swap_in(*given) if len(ways) == 1 else None
    )
    monkeypatch.setattr(Bench, "seconds", once)
    assert not succeeded("swap", tmp_path, "cpu", 60, True)
    failed = [each["what"] for each in figures_of(tmp_path) if each.get("failed")]
    assert failed == ["swap_in, neighbours"]


def test_a_persistent_device_error_ends_its_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected error is reported with a traceback, because there is only one run."""
    bench = Bench(torch.device("cpu"), True, io.StringIO(), 60, 0.0)
    with bench.reporting_failure("swap", "the first"):
        raise PensieveError("planted")
    assert bench.failed
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setattr(bench, "synchronize", raises)
    with pytest.raises(ValueError, match="another"), bench.reporting_failure("swap", "the second"):
        raise ValueError("another")
    assert "Traceback" in capsys.readouterr().err


@needs_x86
@pytest.mark.parametrize("fp8", [False, True])
def test_a_wrong_rotation_is_found(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right kernel passes on emulated threads. Then one of its inputs is changed."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(cuda_launch, "launch", lambda launch, device: run(launch))
    kernels.check_rotation(cpu, torch.bfloat16, fp8=fp8)
    launch_of = cuda.rotate_and_write_kv_launch
    for index, planted in enumerate(
        [
            lambda each: each * 1.2,  # query
            lambda each: each * 1.2,  # key
            lambda each: each * 1.2,  # value
            lambda each: each * 0.7,  # cosine
            lambda each: -each,  # sine
            lambda each: each.flip(0),  # slots
        ]
    ):
        kept: list[torch.Tensor] = []

        def wrong(*given: Any, index: int = index, planted: Any = planted, kept: Any = kept) -> Any:
            kept += [planted(each) if i == index else each for i, each in enumerate(given)]
            return launch_of(*kept)

        monkeypatch.setattr(cuda, "rotate_and_write_kv_launch", wrong)
        with pytest.raises(PensieveError, match="rotate_and_write_kv"):
            kernels.check_rotation(cpu, torch.bfloat16, fp8=fp8)


def test_the_program_for_compute_sanitizer_reads_and_writes_fp8_and_other_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """compute-sanitizer examines this program."""
    seen: set[tuple[str, torch.dtype]] = set()

    def read(inputs: AttentionInput, *rest: Any) -> None:
        seen.add(("read", inputs.key_pages.dtype))
        multi_token_attention(inputs, *rest)

    def write(*given: Any) -> None:
        seen.add(("write", given[3].dtype))
        write_kv(*given)

    monkeypatch.setattr(pages, "multi_token_attention", read)
    monkeypatch.setattr(kernels, "write_kv", write)
    kernels.run_smallest(torch.device("cpu"))
    assert seen == {
        (name, dtype) for name in ("read", "write") for dtype in (torch.bfloat16, FP8.element)
    }


def test_drawn_conversations_have_the_published_lengths() -> None:
    found = drawn_conversations(5.0, 200.0, 3.0, 1000, 1)
    assert len(found) == pytest.approx(1000, rel=0.15)
    turns = sum(len(talk.messages) for _, talk in found)
    inputs = sum(len(each) for _, talk in found for each in talk.messages)
    assert turns / len(found) == pytest.approx(5.56, rel=0.1)
    assert inputs / turns == pytest.approx(37.8, rel=0.1)
    assert sum(sum(talk.outputs) for _, talk in found) / turns == pytest.approx(204.6, rel=0.1)


def test_throughput_is_interpolated_at_a_given_latency() -> None:
    points = [(0.01, 100.0), (0.03, 300.0), (0.02, 220.0)]
    assert engines.throughput_at(points, 0.025) == pytest.approx(260.0)
    assert engines.throughput_at(points, 0.5) == 300.0
    assert engines.throughput_at(points, 0.001) == 100.0
